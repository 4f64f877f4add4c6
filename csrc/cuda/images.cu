// Images of bytes to normalised numbers, in either layout: one launch.
//
// Stores are of 16 bytes. Where the layout changes a thread takes its pixels of all three channels,
// so that each byte is loaded once. Other numbers of channels: into planes a thread goes through
// the channels; into pixels it takes 16 bytes of the output wherever their bytes are (planes:
// through the first-level cache).
#include "../ops/images.h"
#include "launch.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 16;

// So many neighbouring bytes, loaded in the widest pieces that they are a multiple of.
template <int kBytes>
struct ByteRun {
  static constexpr int kPiece = kBytes % 16 == 0  ? 16
                                : kBytes % 8 == 0 ? 8
                                : kBytes % 4 == 0 ? 4
                                                  : 1;
  using Word = std::conditional_t<kPiece == 1, uint8_t, uint32_t>;
  static constexpr int kWords = kPiece / sizeof(Word);
  struct alignas(kPiece) Piece {
    Word word[kWords];
  };

  Word words[kBytes / sizeof(Word)];

  __device__ __forceinline__ void load(const uint8_t* p) {
#pragma unroll
    for (int i = 0; i < kBytes / kPiece; ++i) {
      const Piece piece = reinterpret_cast<const Piece*>(p)[i];
#pragma unroll
      for (int k = 0; k < kWords; ++k) words[i * kWords + k] = piece.word[k];
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    return float((words[i / sizeof(Word)] >> (i % sizeof(Word) * 8)) & 0xff);
  }
};

struct Coefficient {
  float upper, lower, shift;
  Coefficient() = default;
  __device__ __forceinline__ Coefficient(const NormalizeImages& call, int64_t channel)
      : upper(call.coefficients[channel]),
        lower(call.coefficients[call.channels + channel]),
        shift(call.coefficients[2 * call.channels + channel]) {}
  __device__ __forceinline__ float operator()(float x) const {
    return x * upper + (x * lower + shift);
  }
};

// A division of 64 bits takes 70 instructions, one of 32 bits 20.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  // equal (one more): indices from 2^32 on need more memory than tests have
  return ((a | b) >> 32) == 0 ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;
}

// Three channels: from planes to pixels (kToLast), or from pixels to planes. The stores of a thread
// to pixels are neighbours, each of half a sector, and meet in the second-level cache.
template <class S, bool kToLast>
__global__ void __launch_bounds__(kThreads) three_channels_kernel(const NormalizeImages call) {
  using V = Vec<S>;
  constexpr int kLanes = V::kLanes, kChannels = 3;
  const int64_t each = call.pixels / kLanes;
  for (int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x; k < call.samples * each;
       k += int64_t(gridDim.x) * kThreads) {
    const int64_t sample = quotient(k, each), pixel = (k - sample * each) * kLanes;
    const int64_t start = sample * kChannels * call.pixels;
    ByteRun<kLanes> planes[kChannels];
    ByteRun<kLanes * kChannels> pixels;
    if constexpr (kToLast) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) planes[c].load(call.x + start + c * call.pixels + pixel);
    } else {
      pixels.load(call.x + start + pixel * kChannels);
    }
    float y[kLanes * kChannels];  // in the order of the output
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const Coefficient f(call, c);
#pragma unroll
      for (int l = 0; l < kLanes; ++l)
        y[kToLast ? l * kChannels + c : c * kLanes + l] =
            f(kToLast ? planes[c][l] : pixels[l * kChannels + c]);
    }
    S* to = static_cast<S*>(call.y) + start + pixel * (kToLast ? kChannels : 1);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      V out;
#pragma unroll
      for (int l = 0; l < kLanes; ++l) out.lane[l] = y[c * kLanes + l];
      out.store(to + c * (kToLast ? kLanes : call.pixels));
    }
  }
}

template <class S, bool kWide, bool kLast>
__global__ void __launch_bounds__(kThreads) to_planes_kernel(const NormalizeImages call) {
  using V = Vec<S, kWide>;
  const int64_t each = call.pixels / V::kLanes;
  for (int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x; k < call.samples * each;
       k += int64_t(gridDim.x) * kThreads) {
    const int64_t sample = quotient(k, each), pixel = (k - sample * each) * V::kLanes;
    const int64_t start = sample * call.channels * call.pixels;
    S* y = static_cast<S*>(call.y) + start + pixel;
    V out;
    for (int64_t c = 0; c < call.channels; ++c) {
      const Coefficient f(call, c);
      if constexpr (kLast) {
#pragma unroll
        for (int l = 0; l < V::kLanes; ++l)
          out.lane[l] = f(call.x[start + (pixel + l) * call.channels + c]);
      } else {
        ByteRun<V::kLanes> bytes;
        bytes.load(call.x + start + c * call.pixels + pixel);
#pragma unroll
        for (int l = 0; l < V::kLanes; ++l) out.lane[l] = f(bytes[l]);
      }
      out.store(y + c * call.pixels);
    }
  }
}

// The stride of a thread is a multiple of the channels, so its coefficients stay.
template <class S, bool kWide, bool kLast>
__global__ void __launch_bounds__(kThreads) to_last_kernel(const NormalizeImages call) {
  using V = Vec<S, kWide>;
  const int64_t total = call.samples * call.pixels * call.channels;
  const int64_t stride = int64_t(gridDim.x) * kThreads * V::kLanes;
  const int64_t first = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * V::kLanes;
  const int64_t channel = first - quotient(first, call.channels) * call.channels;
  Coefficient f[V::kLanes];
  int64_t of_lane = channel;
#pragma unroll
  for (int l = 0; l < V::kLanes; ++l) {
    f[l] = Coefficient(call, of_lane);
    if (++of_lane == call.channels) of_lane = 0;
  }
  // equal (<= for <): nothing lies beyond the last element
  for (int64_t i = first; i < total; i += stride) {
    // equal (< for <=): the last whole tile goes element by element
    const bool whole = i + V::kLanes <= total;
    float x[V::kLanes];
    if constexpr (kLast) {
      if (whole) {
        ByteRun<V::kLanes> bytes;
        bytes.load(call.x + i);
#pragma unroll
        for (int l = 0; l < V::kLanes; ++l) x[l] = bytes[l];
      } else {
#pragma unroll
        for (int l = 0; l < V::kLanes; ++l) x[l] = i + l < total ? call.x[i + l] : 0;
      }
    } else {
      const int64_t at = quotient(i, call.channels);
      int64_t sample = quotient(at, call.pixels), pixel = at - sample * call.pixels, c = channel;
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) {
        const int64_t from = (sample * call.channels + c) * call.pixels + pixel;
        x[l] = i + l < total ? call.x[from] : 0;
        if (++c == call.channels) {
          c = 0;
          if (++pixel == call.pixels) {
            pixel = 0;
            ++sample;
          }
        }
      }
    }
    S* y = static_cast<S*>(call.y) + i;
    if (whole) {
      V out;
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) out.lane[l] = f[l](x[l]);
      out.store(y);
    } else {
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l)
        if (i + l < total) y[l] = store_one<S>(f[l](x[l]));
    }
  }
}

int64_t common_divisor(int64_t a, int64_t b) { return b == 0 ? a : common_divisor(b, a % b); }

template <class S>
void run(const NormalizeImages& call, void* stream) {
  constexpr int kLanes = Vec<S>::kLanes;
  const int64_t most = int64_t(multiprocessors()) * kBlocksPerMultiprocessor;
  const auto blocks_for = [&](int64_t vectors) {
    const int64_t blocks = ceil_div(vectors, kThreads);
    return blocks < most ? blocks : most;
  };
  const bool stores = aligned(static_cast<const char*>(call.y)), loads = aligned(call.x);
  const int64_t pixels = call.samples * call.pixels;  // equal (times two): the speed alone changes
  // equal (never #1): the speed alone changes
  if (call.channels == 3 && call.x_last != call.y_last && stores && loads &&
      call.pixels % kLanes == 0) {
    auto* kernel = call.y_last ? three_channels_kernel<S, true> : three_channels_kernel<S, false>;
    return launch(kernel, blocks_for(pixels / kLanes), kThreads, stream, 0, call);
  }
  if (call.y_last) {
    const bool wide = stores && (loads || !call.x_last);
    auto* kernel = call.x_last
                       ? (wide ? to_last_kernel<S, true, true> : to_last_kernel<S, false, true>)
                       : (wide ? to_last_kernel<S, true, false> : to_last_kernel<S, false, false>);
    const int lanes = wide ? kLanes : 1;
    const int64_t blocks = blocks_for(ceil_div(pixels * call.channels, lanes));
    const int64_t unit = call.channels / common_divisor(call.channels, kThreads * lanes);
    return launch(kernel, ceil_div(blocks, unit) * unit, kThreads, stream, 0, call);
  }
  const bool wide = stores && loads && call.pixels % kLanes == 0;
  auto* kernel =
      call.x_last ? (wide ? to_planes_kernel<S, true, true> : to_planes_kernel<S, false, true>)
                  : (wide ? to_planes_kernel<S, true, false> : to_planes_kernel<S, false, false>);
  launch(kernel, blocks_for(ceil_div(pixels, wide ? kLanes : 1)), kThreads, stream, 0, call);
}

}  // namespace

void compute(const NormalizeImages& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    if constexpr (sizeof(S) < 8) run<S>(call, stream);  // the binding refuses float64
  });
}

}  // namespace cuda
}  // namespace fusedtrain
