// Max pooling: a thread a byte of codes, with the outputs whose places it holds; backward, a thread
// an input, which looks at the windows that reach it: no atomics, sums in the order of the outputs.
//
// In channels_last a thread does so for as many channels as 16 bytes hold. Windows of 2 x 2 and 3 x
// 3, and inputs that at most three windows a dimension reach, are known when the kernel is
// compiled: all that a thread reads of them is on its way before it compares.
#include "../bits.h"
#include "../ops/pool.h"
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

// The largest numbers so far, by lane. The first of equal ones wins, the last NaN: as in torch.
template <class V>
struct Maximum {
  V best;
  int place[V::kLanes];

  __device__ __forceinline__ explicit Maximum(int first) {
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) {
      best.lane[l] = -typename V::T(INFINITY);
      place[l] = first;
    }
  }
  __device__ __forceinline__ void add(const V& value, int at) {
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) {
      if (!(value.lane[l] > best.lane[l] || value.lane[l] != value.lane[l])) continue;
      best.lane[l] = value.lane[l];
      place[l] = at;
    }
  }
};

// The window of the output at `at`: its corner, which may lie in the padding, and the places of it
// that exist.
template <class I>
struct Place {
  I top, left;
  int first_i, first_j, last_i, last_j;
  int64_t start;  // of the plane and channel in the input

  __device__ __forceinline__ Place(const MaxPoolForward& call, I at) {
    const I channels = I(call.channels), height = I(call.height), width = I(call.width);
    const Pixel<I> p(at, channels, I(call.out_height), I(call.out_width));
    top = p.row * I(call.stride_h) - I(call.pad_h);
    left = p.column * I(call.stride_w) - I(call.pad_w);
    first_i = top < 0 ? int(-top) : 0;
    first_j = left < 0 ? int(-left) : 0;
    last_i = height - top < I(call.kernel_h) ? int(height - top) : int(call.kernel_h);
    last_j = width - left < I(call.kernel_w) ? int(width - left) : int(call.kernel_w);
    start = p.plane * height * width * channels + p.channel;
  }
};

__device__ __forceinline__ int between(int least, int x, int most) {
  return x < least ? least : (x > most ? most : x);
}

// Window of kWindow x kWindow places. Where one does not exist its neighbour is loaded, so that no
// branch stands between the loads.
template <class S, class I, int kWindow, class V>
struct Window {
  Place<I> place;
  Packed<S, V::kIsWide> value[kWindow][kWindow];

  __device__ __forceinline__ Window(const MaxPoolForward& call, I at) : place(call, at) {
    const I channels = I(call.channels), width = I(call.width);
    const S* x = static_cast<const S*>(call.x) + place.start;
#pragma unroll
    for (int i = 0; i < kWindow; ++i)
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const I row = place.top + between(place.first_i, i, place.last_i - 1);
        const I column = place.left + between(place.first_j, j, place.last_j - 1);
        value[i][j].load(x + (row * width + column) * channels);
      }
  }
  __device__ __forceinline__ bool exists(int i, int j) const {
    return i >= place.first_i && i < place.last_i && j >= place.first_j && j < place.last_j;
  }
  __device__ __forceinline__ Maximum<V> maximum() const {
    Maximum<V> most(place.first_i * kWindow + place.first_j);
#pragma unroll
    for (int i = 0; i < kWindow; ++i)
#pragma unroll
      for (int j = 0; j < kWindow; ++j)
        if (exists(i, j)) most.add(value[i][j].get(), i * kWindow + j);
    return most;
  }
};

template <class S, class I, class V>
__device__ __forceinline__ Maximum<V> maximum_of(const MaxPoolForward& call, I at) {
  const Place<I> p(call, at);
  const I channels = I(call.channels), width = I(call.width);
  const int kernel_w = int(call.kernel_w);
  Maximum<V> most(p.first_i * kernel_w + p.first_j);
  const S* x = static_cast<const S*>(call.x) + p.start;
  for (int i = p.first_i; i < p.last_i; ++i) {
    const S* row = x + ((p.top + i) * width + p.left) * channels;
    for (int j = p.first_j; j < p.last_j; ++j) {
      V value;
      value.load(row + j * channels);
      most.add(value, i * kernel_w + j);
    }
  }
  return most;
}

// kWindow: 2 or 3, with codes of as few bits as they need; or 0, any window, codes of `bits`.
template <class S, class I, int kWindow, bool kWide>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_kernel(const MaxPoolForward call, int bits, int64_t bytes, int64_t outputs) {
  using V = Vec<S, kWide>;
  using Word = typename BytesOf<V::kLanes>::Word;
  const int64_t byte = (int64_t(blockIdx.x) * kPoolThreads + threadIdx.x) * V::kLanes;
  if (byte >= bytes) return;
  if constexpr (kWindow > 0) bits = kWindow == 2 ? 2 : 4;
  const int part = block_bytes(bits);
  int64_t at = byte / part * kBitBlock + byte % part;
  Word packed = 0;
  const auto finish = [&](const Maximum<V>& most, int64_t output, int shift) {
    most.best.store(static_cast<S*>(call.y) + output);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) packed |= Word(Word(most.place[l]) << (8 * l + shift));
  };
  if constexpr (kWindow > 0 && !kWide) {
    // All outputs together: an element has only 2 bytes.
    constexpr int kBits = kWindow == 2 ? 2 : 4, kOutputs = 8 / kBits;
    if (at + (kOutputs - 1) * block_bytes(kBits) < outputs) {
      const Window<S, I, kWindow, V> first(call, I(at)), second(call, I(at + part));
      if constexpr (kOutputs == 4) {
        const Window<S, I, kWindow, V> third(call, I(at + 2 * part)), last(call, I(at + 3 * part));
        finish(first.maximum(), at, 0);
        finish(second.maximum(), at + part, kBits);
        finish(third.maximum(), at + 2 * part, 2 * kBits);
        finish(last.maximum(), at + 3 * part, 3 * kBits);
      } else {
        finish(first.maximum(), at, 0);
        finish(second.maximum(), at + part, kBits);
      }
      if (call.codes != nullptr) call.codes[byte] = packed;
      return;
    }
  }
#pragma unroll 1
  for (int shift = 0; shift < 8 && at < outputs; shift += bits, at += part) {
    if constexpr (kWindow > 0)
      finish(Window<S, I, kWindow, V>(call, I(at)).maximum(), at, shift);
    else
      finish(maximum_of<S, I, V>(call, I(at)), at, shift);
  }
  if (call.codes != nullptr) *reinterpret_cast<Word*>(call.codes + byte) = packed;
}

// The windows that reach an input, from the first one on, and what is loaded of one.
template <class I>
struct Reached {
  Pixel<I> pixel;
  I h, w, first_h, first_w, last_h, last_w;

  __device__ __forceinline__ Reached(const MaxPoolBackward& call, I at)
      : pixel(at, I(call.channels), I(call.height), I(call.width)) {
    const I stride_h = I(call.stride_h), stride_w = I(call.stride_w);
    h = pixel.row + I(call.pad_h);
    w = pixel.column + I(call.pad_w);
    const I least_h = h - I(call.kernel_h) + 1, least_w = w - I(call.kernel_w) + 1;
    first_h = least_h > 0 ? (least_h + stride_h - 1) / stride_h : 0;
    first_w = least_w > 0 ? (least_w + stride_w - 1) / stride_w : 0;
    const I end_h = h / stride_h + 1, end_w = w / stride_w + 1;
    last_h = end_h < I(call.out_height) ? end_h : I(call.out_height);
    last_w = end_w < I(call.out_width) ? end_w : I(call.out_width);
  }
  // The place of the input in window (o, q).
  __device__ __forceinline__ int place(const MaxPoolBackward& call, I o, I q) const {
    return int(h - o * I(call.stride_h)) * int(call.kernel_w) + int(w - q * I(call.stride_w));
  }
};

template <class S, class I, class V>
struct OutputOf {
  using Word = typename BytesOf<V::kLanes>::Word;
  Packed<S, V::kIsWide> grad;
  Word codes;
  int shift;

  __device__ __forceinline__ void load(const MaxPoolBackward& call, const Pixel<I>& pixel, I o,
                                       I q) {
    const I output =
        ((pixel.plane * I(call.out_height) + o) * I(call.out_width) + q) * I(call.channels) +
        pixel.channel;
    const Spot spot = spot_of(output, call.bits);
    grad.load(static_cast<const S*>(call.grad) + output);
    codes = *reinterpret_cast<const Word*>(call.codes + spot.byte);
    shift = spot.shift;
  }
  __device__ __forceinline__ void add_to(V& sum, int bits, int place) const {
    const V g = grad.get();
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l)
      if ((int(codes >> (8 * l + shift)) & ((1 << bits) - 1)) == place) sum.lane[l] += g.lane[l];
  }
};

// Inputs of a thread, whose loads are under way together (a column of 16 bytes is enough), and
// blocks that a multiprocessor must hold.
template <int kReach, bool kWide>
constexpr int kInputs = kWide || kReach == 0 ? 1 : (kReach == 1 ? 8 : (kReach == 2 ? 4 : 2));
template <class S, class I, int kReach, bool kWide>
constexpr int kResident = sizeof(S) == 8 && !kWide ? 2
                          : sizeof(I) == 8         ? (kReach == 0 ? 2 : 3)
                          : kReach == 3            ? (kWide ? 3 : 2)
                          : kReach == 2            ? (kWide ? 5 : 2)
                          : kReach == 1            ? (kWide ? 7 : 4)
                                                   : 4;

// kReach: no more windows a dimension reach an input; or 0, any number.
template <class S, class I, int kReach, bool kWide>
__global__ void __launch_bounds__(kPoolThreads, kResident<S, I, kReach, kWide>)
    max_pool2d_backward_kernel(const MaxPoolBackward call, int64_t inputs) {
  using V = Vec<S, kWide>;
  constexpr int kEach = kInputs<kReach, kWide>;
  const int64_t first = int64_t(blockIdx.x) * kEach * kPoolThreads + threadIdx.x;
  S* const grad_input = static_cast<S*>(call.grad_input);
  const auto zero = [] {
    V sum;
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) sum.lane[l] = 0;
    return sum;
  };
  if constexpr (kReach == 0) {
    const int64_t at = first * V::kLanes;
    if (at >= inputs) return;
    const Reached<I> r(call, I(at));
    V sum = zero();
    for (I o = r.first_h; o < r.last_h; ++o) {
      for (I q = r.first_w; q < r.last_w; ++q) {
        OutputOf<S, I, V> output;
        output.load(call, r.pixel, o, q);
        output.add_to(sum, call.bits, r.place(call, o, q));
      }
    }
    sum.store(grad_input + at);
  } else {
    OutputOf<S, I, V> output[kEach][kReach][kReach];
    int place[kEach][kReach][kReach];  // in the window, or -1
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int64_t at = (first + e * kPoolThreads) * V::kLanes;
      const Reached<I> r(call, I(at < inputs ? at : 0));
#pragma unroll
      for (int i = 0; i < kReach; ++i)
#pragma unroll
        for (int j = 0; j < kReach; ++j) {
          // Another output where there is none: no branch stands between the loads.
          const int o = between(0, int(r.first_h) + i, int(call.out_height) - 1);
          const int q = between(0, int(r.first_w) + j, int(call.out_width) - 1);
          output[e][i][j].load(call, r.pixel, I(o), I(q));
          const bool exists = r.first_h + i < r.last_h && r.first_w + j < r.last_w;
          place[e][i][j] = exists ? r.place(call, I(o), I(q)) : -1;
        }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int64_t at = (first + e * kPoolThreads) * V::kLanes;
      if (at >= inputs) continue;
      V sum = zero();
#pragma unroll
      for (int i = 0; i < kReach; ++i)
#pragma unroll
        for (int j = 0; j < kReach; ++j) output[e][i][j].add_to(sum, call.bits, place[e][i][j]);
      sum.store(grad_input + at);
    }
  }
}

// Divisions of 64 bits take several times as long. Windows reach beyond the tensor by less than a
// kernel and a stride.
bool is_small(const MaxPool& call) {
  constexpr int64_t kMost = int64_t(1) << 29;
  return call.inputs() < kMost && call.outputs() < kMost && call.stride_h < kMost &&
         call.stride_w < kMost;
}

template <class S, class... P>
bool is_wide(const MaxPool& call, const P*... pointers) {
  return call.channels % Vec<S>::kLanes == 0 && aligned(pointers...);
}

// Calls f with a constant from 0 to 3.
template <class F>
void with_constant(int64_t value, const F& f) {
  if (value == 1) return f(std::integral_constant<int, 1>());
  if (value == 2) return f(std::integral_constant<int, 2>());
  if (value == 3) return f(std::integral_constant<int, 3>());
  f(std::integral_constant<int, 0>());
}

// 2 or 3 where the kernel of such windows has these codes, or none.
int window_of(const MaxPoolForward& call) {
  const int size = int(call.kernel_h), bits = size == 2 ? 2 : 4;
  const bool fits = call.kernel_w == size && (call.bits == 0 || call.bits == bits);
  return is_small(call) && fits && (size == 2 || size == 3) ? size : 0;
}

// Windows that reach an input, in the dimension where they are more; 0 where they are many.
int64_t reach_of(const MaxPoolBackward& call) {
  const int64_t down = ceil_div(call.kernel_h, call.stride_h);
  const int64_t across = ceil_div(call.kernel_w, call.stride_w);
  const int64_t most = down > across ? down : across;
  return is_small(call) && most <= 3 ? most : 0;
}

}  // namespace

void max_pool2d(const MaxPoolForward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const int window = window_of(call);
    const int bits = call.bits > 0 ? call.bits : (window == 0 ? 8 : (window == 2 ? 2 : 4));
    const int64_t outputs = call.outputs(), bytes = packed_bytes(outputs, bits);
    if (bytes == 0) return;
    const bool wide = is_wide<S>(call, static_cast<const char*>(call.x),
                                 static_cast<const char*>(call.y), call.codes);
    with_constant(window, [&](auto constant) {
      constexpr int kWindow = decltype(constant)::value == 1 ? 0 : decltype(constant)::value;
      auto* kernel = wide ? &max_pool2d_kernel<S, int32_t, kWindow, true>
                          : &max_pool2d_kernel<S, int32_t, kWindow, false>;
      if (!is_small(call))
        kernel = wide ? &max_pool2d_kernel<S, int64_t, 0, true>
                      : &max_pool2d_kernel<S, int64_t, 0, false>;
      const int64_t threads = wide ? bytes / Vec<S>::kLanes : bytes;
      launch(kernel, ceil_div(threads, kPoolThreads), kPoolThreads, stream, 0, call, bits, bytes,
             outputs);
    });
  });
}

void max_pool2d(const MaxPoolBackward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const int64_t inputs = call.inputs();
    if (inputs == 0) return;
    const bool wide = is_wide<S>(call, static_cast<const char*>(call.grad),
                                 static_cast<const char*>(call.grad_input), call.codes);
    with_constant(reach_of(call), [&](auto constant) {
      constexpr int kReach = decltype(constant)::value;
      auto* kernel = wide ? &max_pool2d_backward_kernel<S, int32_t, kReach, true>
                          : &max_pool2d_backward_kernel<S, int32_t, kReach, false>;
      if (!is_small(call))
        kernel = wide ? &max_pool2d_backward_kernel<S, int64_t, 0, true>
                      : &max_pool2d_backward_kernel<S, int64_t, 0, false>;
      const int64_t threads = wide ? inputs / Vec<S>::kLanes : inputs;
      const int each = wide ? kInputs<kReach, true> : kInputs<kReach, false>;
      launch(kernel, ceil_div(threads, kPoolThreads * each), kPoolThreads, stream, 0, call, inputs);
    });
  });
}

}  // namespace cuda
}  // namespace fusedtrain
