// Max pooling: a thread a byte of codes, with the outputs whose places it holds.
//
// In channels_last a thread does so for as many channels as 16 bytes hold. Windows of 2 x 2 and 3 x
// 3 are known when the kernel is compiled: all that a thread reads of them is on its way before it
// compares.
#include "pool.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// The largest numbers so far, by lane. The first of equal ones wins, the last NaN: as in torch.
template <class V>
struct Maximum {
  V best;
  int place[V::kLanes];

  __device__ __forceinline__ Maximum(const V& value, int at) : best(value) {
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) place[l] = at;
  }
  __device__ __forceinline__ void add(int lane, typename V::T value, int at) {
    if (!(value > best.lane[lane] || value != value)) return;
    best.lane[lane] = value;
    place[lane] = at;
  }
  __device__ __forceinline__ void add(const V& value, int at) {
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) add(l, value.lane[l], at);
  }
};

// The window of an output: its corner, which may lie in the padding.
template <class I, bool kPlanes = false>
struct Place {
  I top, left, start;  // of the plane and channel in the input

  __device__ __forceinline__ Place(const MaxPoolForward& call, const Image<I>& out, I at) {
    const Pixel<I, kPlanes> p(at, out);
    const I channels = kPlanes ? 1 : I(call.channels);
    top = p.row * I(call.stride_h) - I(call.pad_h);
    left = p.column * I(call.stride_w) - I(call.pad_w);
    start = p.plane * I(call.height) * I(call.width) * channels + p.channel;
  }
};

// Window of kWindow x kWindow places. Where one does not exist its neighbour is loaded, at the
// neighbour's place: so no branch stands between the loads, and the maximum and its place are the
// same.
template <class S, class I, int kWindow, class V>
struct Window {
  Packed<S, V::kIsWide> value[kWindow][kWindow];
  int row_place[kWindow], column_place[kWindow];

  __device__ __forceinline__ Window(const MaxPoolForward& call, const Image<I>& out, I at) {
    const Place<I, !V::kIsWide> place(call, out, at);
    const I channels = V::kIsWide ? I(call.channels) : 1, width = I(call.width);
    I row[kWindow], column[kWindow];  // elements from the tensor's, and from the row's, first one
#pragma unroll
    for (int k = 0; k < kWindow; ++k) {
      const I i = existing(k, place.top, I(call.height)), j = existing(k, place.left, width);
      row_place[k] = int(i - place.top) * kWindow;
      column_place[k] = int(j - place.left);
      row[k] = place.start + i * width * channels;
      column[k] = j * channels;
    }
#pragma unroll
    for (int i = 0; i < kWindow; ++i)
#pragma unroll
      for (int j = 0; j < kWindow; ++j)
        value[i][j].load(static_cast<const S*>(call.x) + Unsigned<I>(row[i] + column[j]));
  }
  // The padding is one element at most, so it has the first place alone.
  __device__ __forceinline__ static I existing(int k, I first, I size) {
    if (k == 0) return first < 0 ? 0 : first;
    const I last = size - 1;
    return first + k < last ? first + k : last;  // equal (<= for <): equal sides have equal results
  }
  __device__ __forceinline__ Maximum<V> maximum() const {
    Maximum<V> most = of_row(0);
#pragma unroll
    for (int i = 1; i < kWindow; ++i) {
      const Maximum<V> next = of_row(i);
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) most.add(l, next.best.lane[l], next.place[l]);
    }
    return most;
  }
  __device__ __forceinline__ Maximum<V> of_row(int i) const {
    Maximum<V> most(value[i][0].get(), column_place[0]);
#pragma unroll
    for (int j = 1; j < kWindow; ++j) most.add(value[i][j].get(), column_place[j]);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) most.place[l] += row_place[i];
    return most;
  }
};

template <class S, class I, class V>
__device__ __forceinline__ Maximum<V> maximum_of(const MaxPoolForward& call, const Image<I>& out,
                                                 I at) {
  const Place<I> p(call, out, at);
  const I channels = I(call.channels), height = I(call.height), width = I(call.width);
  const int kernel_w = int(call.kernel_w);
  // equal (<= for < #1): equal sides have equal results
  const int first_i = p.top < 0 ? int(-p.top) : 0, first_j = p.left < 0 ? int(-p.left) : 0;
  const int last_i = height - p.top < I(call.kernel_h) ? int(height - p.top) : int(call.kernel_h);
  const int last_j = width - p.left < I(call.kernel_w) ? int(width - p.left) : int(call.kernel_w);
  V lowest;
#pragma unroll
  for (int l = 0; l < V::kLanes; ++l) lowest.lane[l] = -typename V::T(INFINITY);
  Maximum<V> most(lowest, first_i * kernel_w + first_j);
  const S* x = static_cast<const S*>(call.x) + p.start;
  for (int i = first_i; i < last_i; ++i) {
    const S* row = x + ((p.top + i) * width + p.left) * channels;
    for (int j = first_j; j < last_j; ++j) {
      V value;
      value.load(row + j * channels);
      most.add(value, i * kernel_w + j);
    }
  }
  return most;
}

// kWindow: 2 or 3, of planes or with kWide, codes of as few bits as they need; or 0, any window,
// codes of `bits`.
template <class S, class I, int kWindow, bool kWide>
__global__ void __launch_bounds__(kPoolThreads, kWide ? 3 : 4)
    max_pool2d_kernel(const MaxPoolForward call, const Image<I> out, int bits, I bytes, I outputs) {
  using V = Vec<S, kWide>;
  using Word = typename BytesOf<V::kLanes>::Word;
  const I byte = (I(blockIdx.x) * kPoolThreads + I(threadIdx.x)) * V::kLanes;
  if (byte >= bytes) return;
  if constexpr (kWindow > 0) bits = kWindow == 2 ? 2 : 4;
  const int part = block_bytes(bits);
  I at = Unsigned<I>(byte) / part * kBitBlock + Unsigned<I>(byte) % part;
  Word packed = 0;
  const auto finish = [&](const Maximum<V>& most, I output, int shift) {
    most.best.store(static_cast<S*>(call.y) + Unsigned<I>(output));
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) packed |= Word(Word(most.place[l]) << (8 * l + shift));
  };
  if constexpr (kWindow > 0 && !kWide) {
    // All outputs together: an element has only 2 bytes.
    constexpr int kBits = kWindow == 2 ? 2 : 4, kOutputs = 8 / kBits;
    // equal (+ for -): the last whole tile goes element by element
    if (at + (kOutputs - 1) * block_bytes(kBits) < outputs) {
      const Window<S, I, kWindow, V> first(call, out, at), second(call, out, at + part);
      if constexpr (kOutputs == 4) {
        const Window<S, I, kWindow, V> third(call, out, at + 2 * part),
            last(call, out, at + 3 * part);
        finish(first.maximum(), at, 0);
        finish(second.maximum(), at + part, kBits);
        finish(third.maximum(), at + 2 * part, 2 * kBits);
        finish(last.maximum(), at + 3 * part, 3 * kBits);
      } else {
        finish(first.maximum(), at, 0);
        finish(second.maximum(), at + part, kBits);
      }
      if (call.codes != nullptr) call.codes[Unsigned<I>(byte)] = packed;
      return;
    }
  }
#pragma unroll 1
  for (int shift = 0; shift < 8 && at < outputs; shift += bits, at += part) {
    if constexpr (kWindow > 0)
      finish(Window<S, I, kWindow, V>(call, out, at).maximum(), at, shift);
    else
      finish(maximum_of<S, I, V>(call, out, at), at, shift);
  }
  if (call.codes != nullptr) *reinterpret_cast<Word*>(call.codes + byte) = packed;
}

// 2 or 3 where the kernel of such windows has these codes, or none.
int window_of(const MaxPoolForward& call, bool wide) {
  const int size = int(call.kernel_h), bits = size == 2 ? 2 : 4;
  // equal (never): the speed alone changes
  const bool fits = (wide || call.channels == 1) && call.kernel_w == size &&
                    (call.bits == 0 || call.bits == bits);
  return is_small(call) && fits && (size == 2 || size == 3) ? size : 0;
}

template <class S, class I, int kWindow, bool kWide>
void run(const MaxPoolForward& call, int bits, void* stream) {
  const int64_t outputs = call.outputs(), bytes = packed_bytes(outputs, bits);
  const Image<I> out(call.out_height, call.out_width, call.channels);
  launch(max_pool2d_kernel<S, I, kWindow, kWide>,
         ceil_div(bytes / Vec<S, kWide>::kLanes, kPoolThreads), kPoolThreads, stream, 0, call, out,
         bits, I(bytes), I(outputs));
}

}  // namespace

void compute(const MaxPoolForward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const bool wide = is_wide<S>(call, static_cast<const char*>(call.x),
                                 static_cast<const char*>(call.y), call.codes);
    const int window = window_of(call, wide);
    // equal (one more #1): the speed alone changes
    const int bits = call.bits > 0 ? call.bits : (window == 0 ? 8 : (window == 2 ? 2 : 4));
    if (call.outputs() == 0) return;
    if (!is_small(call))
      wide ? run<S, int64_t, 0, true>(call, bits, stream)
           : run<S, int64_t, 0, false>(call, bits, stream);
    else if (window == 2)
      wide ? run<S, int32_t, 2, true>(call, bits, stream)
           : run<S, int32_t, 2, false>(call, bits, stream);
    else if (window == 3)
      wide ? run<S, int32_t, 3, true>(call, bits, stream)
           : run<S, int32_t, 3, false>(call, bits, stream);
    else
      wide ? run<S, int32_t, 0, true>(call, bits, stream)
           : run<S, int32_t, 0, false>(call, bits, stream);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
