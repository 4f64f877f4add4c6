// Max pooling: a thread a byte of codes, with the outputs whose places it holds; backward, a thread
// an input, which looks at the windows that reach it: no atomics, sums in the order of the outputs.
#include "../bits.h"
#include "../ops.h"
#include "launch.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kPoolThreads = 256;

// Where an element is in memory order; I is wide enough for all indices.
template <class I>
struct Pixel {
  I plane, row, column, channel;
  __device__ __forceinline__ Pixel(I at, I channels, I height, I width) {
    const I pixel = at / channels, line = pixel / width;
    channel = at - pixel * channels;
    column = pixel - line * width;
    plane = line / height;
    row = line - plane * height;
  }
};

// The first of equal numbers wins, the last NaN: as in torch.
template <class S, class I>
__device__ __forceinline__ int find_maximum(const MaxPoolForward& call, I at) {
  using T = typename Compute<S>::T;
  const I channels = I(call.channels), height = I(call.height), width = I(call.width);
  const Pixel<I> p(at, channels, I(call.out_height), I(call.out_width));
  const I top = p.row * I(call.stride_h) - I(call.pad_h);
  const I left = p.column * I(call.stride_w) - I(call.pad_w);
  const int kernel_w = int(call.kernel_w);
  const int first_i = top < 0 ? int(-top) : 0, first_j = left < 0 ? int(-left) : 0;
  const int last_i = height - top < I(call.kernel_h) ? int(height - top) : int(call.kernel_h);
  const int last_j = width - left < I(kernel_w) ? int(width - left) : kernel_w;
  const S* x = static_cast<const S*>(call.x) + p.plane * height * width * channels + p.channel;
  T best = -T(INFINITY);
  int place = first_i * kernel_w + first_j;
  for (int i = first_i; i < last_i; ++i) {
    const S* row = x + ((top + i) * width + left) * channels;
    for (int j = first_j; j < last_j; ++j) {
      const T value = load_one(row[j * channels]);
      if (value > best || value != value) {
        best = value;
        place = i * kernel_w + j;
      }
    }
  }
  static_cast<S*>(call.y)[at] = store_one<S>(best);
  return place;
}

// `bits` is that of the codes, or 8 where there are none.
template <class S, class I>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_kernel(const MaxPoolForward call, int bits, int64_t bytes, int64_t outputs) {
  const int64_t byte = int64_t(blockIdx.x) * kPoolThreads + threadIdx.x;
  if (byte >= bytes) return;
  const int part = block_bytes(bits);
  int64_t at = byte / part * kBitBlock + byte % part;
  unsigned packed = 0;
  for (int shift = 0; shift < 8 && at < outputs; shift += bits, at += part)
    packed |= unsigned(find_maximum<S, I>(call, I(at))) << shift;
  if (call.codes != nullptr) call.codes[byte] = uint8_t(packed);
}

template <class S, class I>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_backward_kernel(const MaxPoolBackward call, int64_t inputs) {
  using T = typename Compute<S>::T;
  const int64_t at = int64_t(blockIdx.x) * kPoolThreads + threadIdx.x;
  if (at >= inputs) return;
  const I channels = I(call.channels), out_width = I(call.out_width);
  const I stride_h = I(call.stride_h), stride_w = I(call.stride_w);
  const Pixel<I> p(I(at), channels, I(call.height), I(call.width));
  const I h = p.row + I(call.pad_h), w = p.column + I(call.pad_w);
  const I least_h = h - I(call.kernel_h) + 1, least_w = w - I(call.kernel_w) + 1;
  const I first_h = least_h > 0 ? (least_h + stride_h - 1) / stride_h : 0;
  const I first_w = least_w > 0 ? (least_w + stride_w - 1) / stride_w : 0;
  const I end_h = h / stride_h + 1, end_w = w / stride_w + 1;
  const I last_h = end_h < I(call.out_height) ? end_h : I(call.out_height);
  const I last_w = end_w < out_width ? end_w : out_width;
  const int bits = call.bits, mask = (1 << bits) - 1;
  const S* grad = static_cast<const S*>(call.grad);
  T sum = T(0);
  for (I o = first_h; o < last_h; ++o) {
    const I row = (p.plane * I(call.out_height) + o) * out_width;
    const int start = int(h - o * stride_h) * int(call.kernel_w);
    for (I q = first_w; q < last_w; ++q) {
      const I output = (row + q) * channels + p.channel;
      const Spot spot = spot_of(output, bits);
      const int place = (call.codes[spot.byte] >> spot.shift) & mask;
      if (place == start + int(w - q * stride_w)) sum += load_one(grad[output]);
    }
  }
  static_cast<S*>(call.grad_input)[at] = store_one<S>(sum);
}

// Divisions of 64 bits take several times as long. Windows reach beyond the tensor by less than a
// kernel and a stride.
bool is_small(const MaxPool& call) {
  constexpr int64_t kMost = int64_t(1) << 29;
  return call.inputs() < kMost && call.outputs() < kMost && call.stride_h < kMost &&
         call.stride_w < kMost;
}

}  // namespace

void max_pool2d(const MaxPoolForward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const int64_t outputs = call.outputs();
    const int bits = call.bits == 0 ? 8 : call.bits;
    const int64_t bytes = packed_bytes(outputs, bits);
    if (bytes == 0) return;
    const auto kernel =
        is_small(call) ? &max_pool2d_kernel<S, int32_t> : &max_pool2d_kernel<S, int64_t>;
    launch(kernel, ceil_div(bytes, kPoolThreads), kPoolThreads, stream, 0, call, bits, bytes,
           outputs);
  });
}

void max_pool2d(const MaxPoolBackward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const int64_t inputs = call.inputs();
    if (inputs == 0) return;
    const auto kernel = is_small(call) ? &max_pool2d_backward_kernel<S, int32_t>
                                       : &max_pool2d_backward_kernel<S, int64_t>;
    launch(kernel, ceil_div(inputs, kPoolThreads), kPoolThreads, stream, 0, call, inputs);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
