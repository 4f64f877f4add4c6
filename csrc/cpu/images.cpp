// Images of bytes to normalised numbers. Where the layout changes, bytes are moved in the
// first-level cache: a quarter of what numbers take.
#include "../ops/images.h"
#include "dispatch.h"

namespace fusedtrain {
namespace cpu {
namespace {

constexpr int64_t kBytes = 8192;  // of a block whose bytes are moved
constexpr int64_t kPattern = 1024;
constexpr int64_t kStep = kNormStep;

// Whole steps, so that all runs but a plane's last have no rest.
int64_t pixels_a_block(const NormalizeImages& call) {
  const int64_t most = kBytes / call.channels / kStep * kStep;
  return most > kStep ? most : kStep;
}
static_assert(kBytes / kMostChannelsMoved >= kStep, "the bytes of a block fit");

struct Block {
  int64_t sample, first, n;  // of pixels
};
Block block_at(const NormalizeImages& call, int64_t i) {
  const int64_t each = pixels_a_block(call), of_sample = (call.pixels + each - 1) / each;
  const int64_t first = i % of_sample * each;
  return {i / of_sample, first, smaller(each, call.pixels - first)};
}

// Coefficients of the elements of some pixels, or of some channels where they are many. Runs of
// this length follow each other `step` apart.
struct Pattern {
  int64_t first, length, step;
  alignas(64) float upper[kPattern], lower[kPattern], shift[kPattern];

  Pattern(const NormalizeImages& call, int64_t first) : first(first) {
    const int64_t channels = smaller(call.channels - first, kPattern);
    const bool repeats = call.channels * kStep <= kPattern;
    length = repeats ? kPattern / (channels * kStep) * channels * kStep : channels;
    step = repeats ? length : call.channels;
    for (int64_t i = 0, c = 0; i < kPattern; ++i) {
      const bool there = i < length;
      const float* at = call.coefficients + first + c;
      upper[i] = there ? at[0] : 0;
      lower[i] = there ? at[call.channels] : 0;
      shift[i] = there ? at[2 * call.channels] : 0;
      if (++c == channels) c = 0;
    }
  }

  template <class S, class Kernel>
  void run(Kernel kernel, const uint8_t* x, S* y, int64_t n) const {
    for (int64_t i = first; i < n; i += step)
      kernel(x + i, y + i, smaller(length, n - i), upper, lower, shift, 1);
  }
};

template <class S, class T>
void to_last(const NormalizeImages& call, const ImageKernels<S, T>& k, int64_t begin, int64_t end) {
  alignas(64) uint8_t moved[kBytes];
  for (int64_t first = 0; first < call.channels; first += kPattern) {
    const Pattern pattern(call, first);
    for (int64_t i = begin; i < end; ++i) {
      const Block b = block_at(call, i);
      const int64_t at = (b.sample * call.pixels + b.first) * call.channels;
      const uint8_t* x = call.x + at;
      if (!call.x_last) {
        kernels().join_channels(call.x + b.sample * call.pixels * call.channels + b.first,
                                call.pixels, call.channels, moved, b.n);
        x = moved;
      }
      pattern.run(k.run, x, static_cast<S*>(call.y) + at, b.n * call.channels);
    }
  }
}

template <class S, class T>
void to_planes(const NormalizeImages& call, const ImageKernels<S, T>& k, int64_t begin,
               int64_t end) {
  alignas(64) uint8_t moved[kBytes];
  const float* coefficients = call.coefficients;
  for (int64_t i = begin; i < end; ++i) {
    const Block b = block_at(call, i);
    const int64_t sample = b.sample * call.pixels * call.channels;
    const uint8_t* x = call.x + sample + b.first;
    int64_t stride = call.pixels;
    if (call.x_last) {
      x = moved;
      stride = (b.n + kStep - 1) / kStep * kStep;
      kernels().split_channels(call.x + sample + b.first * call.channels, call.channels, moved,
                               stride, b.n);
    }
    for (int64_t c = 0; c < call.channels; ++c)
      k.run(x + c * stride, static_cast<S*>(call.y) + sample + c * call.pixels + b.first, b.n,
            coefficients + c, coefficients + call.channels + c,
            coefficients + 2 * call.channels + c, 0);
  }
}

}  // namespace

void compute(const NormalizeImages& call, Parallel parallel) {
  const int64_t size = pixels_a_block(call);
  const int64_t blocks = call.samples * ((call.pixels + size - 1) / size);
  if (blocks == 0) return;
  const int64_t each = call.samples * call.channels * call.pixels / blocks + 1;
  by_dtype(call.dtype, kernels().image, [&](const auto& k) {
    in_parts(parallel, blocks, (kGrain + each - 1) / each, [&](int64_t first, int64_t last) {
      if (call.y_last)
        to_last(call, k, first, last);
      else
        to_planes(call, k, first, last);
    });
  });
}

}  // namespace cpu
}  // namespace fusedtrain
