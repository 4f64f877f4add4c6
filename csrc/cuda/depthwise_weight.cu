// Depthwise convolutions: the gradients of weight and bias, in two launches without atomics.
//
// A thread has the sums of some taps of a channel, or in channels_last of as many channels as 16
// bytes hold, and adds up strips of rows: a gradient that it loads serves all of its taps, an input
// all rows of the strip that see it. Sums meet in the block, and blocks leave shares that a second
// kernel adds up: their order is fixed for a device.
#include "depthwise_shares.cuh"
#include "reduce.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;

// Taps of a thread: kTaps rows of a kernel (of that size, with this stride of rows and a dilation
// of 1), or 1, a row of any kernel; kColumns columns of it. kStrip: rows of gradients.
template <bool kWide_, int kTaps_, int kStride_>
struct Shape {
  static constexpr bool kWide = kWide_;
  static constexpr int kTaps = kTaps_, kStride = kStride_;
  static constexpr int kColumns = kTaps > 1 ? (kWide ? 1 : kTaps) : (kWide ? 4 : 8);
  // As many rows as 128 registers hold with the sums and the inputs of a column.
  static constexpr int kStrip =
      kTaps == 1 ? 1 : (!kWide ? 8 : (kTaps == 3 ? 4 : (kTaps * kStride > 10 ? 1 : 2)));
  static constexpr int kSources = (kStrip - 1) * kStride + kTaps;
};

// Threads of a block are slots x groups of taps x lanes; slots share the steps. Block b has part
// b % parts (channels x groups of taps) and group b / parts of the steps.
template <class I>
struct WeightWalk {
  bool last;
  I multiplier, channels, in_channels;
  I in[3], out[3], kernel[3], stride[3], dilation[3], pad[3];
  I lanes, tap_units, units, slots;  // of a block; units: tap_units x lanes
  I chunks, tap_groups;              // of the columns of a kernel; of all taps
  I channel_parts, parts, groups;
  I steps, per_group;
  int64_t weights, numbers;  // shares of a group: weights, and biases behind them
  Divisor<I> by_column, by_strip, by_depth, by_multiplier;
  const void* grad;
  const void* x;  // or null
  bool with_bias;

  template <class S, class K>
  static WeightWalk make(const DepthwiseBackward& call, K) {
    WeightWalk w = {};
    w.last = call.last;
    w.multiplier = I(call.multiplier);
    w.channels = I(call.out_channels());
    w.in_channels = I(call.channels);
    for (int d = 0; d < 3; ++d) {  // equal (<= for <): an overrun that AddressSanitizer sees
      w.in[d] = I(call.in[d]);
      w.out[d] = I(call.out[d]);
      w.kernel[d] = I(call.kernel[d]);
      w.stride[d] = I(call.stride[d]);
      w.dilation[d] = I(call.dilation[d]);
      w.pad[d] = I(call.pad[d]);
    }
    w.chunks = I(ceil_div(w.kernel[2], K::kColumns));
    w.tap_groups =
        call.grad_weight == nullptr ? 1 : w.chunks * w.kernel[0] * (K::kTaps > 1 ? 1 : w.kernel[1]);
    constexpr int kLanes = Vec<S, K::kWide>::kLanes;
    const int64_t vectors = w.channels / kLanes, most = kLanes > 1 ? 16 : 32;
    const int64_t strips = ceil_div(call.out[1], K::kStrip);
    w.steps = I(call.samples * call.out[0] * strips * call.out[2]);
    // Few channels a block where shares would be large; two vectors are a sector of memory.
    for (int64_t lanes = most; lanes >= 2; lanes /= 2) {
      w.lanes = call.last ? I(ceil_div(vectors, ceil_div(vectors, lanes))) : 1;
      const I room = call.last ? kThreads / 2 / w.lanes : 1;
      w.tap_units = I(ceil_div(w.tap_groups, ceil_div(w.tap_groups, room)));
      w.units = w.lanes * w.tap_units;
      w.slots = kThreads / w.units;
      w.channel_parts = I(ceil_div(vectors, w.lanes));
      w.parts = w.channel_parts * I(ceil_div(w.tap_groups, w.tap_units));
      const int64_t groups =
          share_groups<S>(call, w.parts, ceil_div(w.steps, int64_t(w.slots) * 4));
      w.per_group = I(ceil_div(w.steps, groups));
      w.groups = I(ceil_div(w.steps, w.per_group));
      if (groups <= share_room<S>(call) || !call.last) break;
    }
    w.weights = call.out_channels() * call.taps();
    w.numbers = w.weights + call.out_channels();
    w.by_column = Divisor<I>(call.out[2]);
    w.by_strip = Divisor<I>(strips);
    w.by_depth = Divisor<I>(call.out[0]);
    w.by_multiplier = Divisor<I>(call.multiplier);
    w.grad = call.grad;
    w.x = call.grad_weight == nullptr ? nullptr : call.x;
    w.with_bias = call.grad_bias != nullptr;
    return w;
  }
};

// The steps of a thread: sum[row of the kernel][column], and of the gradients alone.
template <class K, class V, class S, class I>
__device__ __forceinline__ void add_steps(const WeightWalk<I>& w, I first, I end, I channel,
                                          I slice_tap, I row_tap, I column_tap,
                                          V (&sum)[K::kTaps][K::kColumns], V& bias) {
  const I input = w.by_multiplier.quotient(channel);
  for (I step = first; step < end; step += w.slots) {
    I sample = step;
    const I column = w.by_column.digit(sample);
    const I row = w.by_strip.digit(sample) * K::kStrip;
    const I depth = w.by_depth.digit(sample);
    const Volume<const S, I> grad(static_cast<const S*>(w.grad), w.last, sample, w.channels,
                                  channel, w.out);
    V g[K::kStrip];
    const I rows = w.out[1] - row;
#pragma unroll
    for (int p = 0; p < K::kStrip; ++p) {
      Packed<S, V::kIsWide> packed;
      packed.bits = typename Packed<S, V::kIsWide>::Bits{};
      if (p < rows) packed.load(grad.at(depth, row + p, column));
      g[p] = packed.get();
    }
#pragma unroll
    for (int p = 0; p < K::kStrip; ++p)
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) bias.lane[l] += g[p].lane[l];
    const I slice = depth * w.stride[0] - w.pad[0] + slice_tap * w.dilation[0];
    if (w.x == nullptr || !within(slice, w.in[0])) continue;
    const Volume<const S, I> x(static_cast<const S*>(w.x), w.last, sample, w.in_channels, input,
                               w.in);
    const I top = row * w.stride[1] - w.pad[1] + row_tap * w.dilation[1];
#pragma unroll
    for (int j = 0; j < K::kColumns; ++j) {
      const I place = column * w.stride[2] - w.pad[2] + (column_tap + j) * w.dilation[2];
      // equal (> for >=): nobody reads the column beyond the block's
      if (column_tap + j >= w.kernel[2] || !within(place, w.in[2])) continue;
      Packed<S, V::kIsWide> packed[K::kSources];
#pragma unroll
      for (int q = 0; q < K::kSources; ++q) {
        packed[q].bits = typename Packed<S, V::kIsWide>::Bits{};
        if (within(top + q, w.in[1])) packed[q].load(x.at(slice, top + q, place));
      }
#pragma unroll
      for (int q = 0; q < K::kSources; ++q) {
        const V value = packed[q].get();
#pragma unroll
        for (int p = 0; p < K::kStrip; ++p) {
          const int k = q - p * K::kStride;
          // No gradient of zero instead: it would meet an infinity of the input.
          if (k < 0 || k >= K::kTaps || p >= rows) continue;
#pragma unroll
          for (int l = 0; l < V::kLanes; ++l) sum[k][j].lane[l] += g[p].lane[l] * value.lane[l];
        }
      }
    }
  }
}

template <class S, class I, class K>
__global__ void __launch_bounds__(kThreads, 2)
    weight_kernel(const WeightWalk<I> w, typename Compute<S>::T* shares) {
  using V = Vec<S, K::kWide>;
  using T = typename V::T;
  constexpr int kSums = K::kTaps * K::kColumns;
  // equal (the next block #1): lanes, or blocks, only change places
  const I part = I(blockIdx.x) % w.parts, group = I(blockIdx.x) / w.parts;
  const I slot = I(threadIdx.x) / w.units, unit = I(threadIdx.x) - slot * w.units;
  const I tap_unit = unit / w.lanes, tap_part = part / w.channel_parts;
  const I first_channel = (part - tap_part * w.channel_parts) * w.lanes * V::kLanes;
  const I channel = first_channel + (unit - tap_unit * w.lanes) * V::kLanes;
  const I tap_group = tap_part * w.tap_units + tap_unit, line = tap_group / w.chunks;
  const I slice_tap = K::kTaps > 1 ? line : line / w.kernel[1];
  const I row_tap = K::kTaps > 1 ? 0 : line - slice_tap * w.kernel[1];
  const I column_tap = (tap_group - line * w.chunks) * K::kColumns;
  const bool exists = channel < w.channels && tap_group < w.tap_groups;

  V sum[K::kTaps][K::kColumns] = {}, bias = {};
  const I first = group * w.per_group;
  const I end = first + w.per_group < w.steps ? first + w.per_group : w.steps;
  if (exists && slot < w.slots)
    add_steps<K, V, S>(w, first + slot, end, channel, slice_tap, row_tap, column_tap, sum, bias);

  T* const share = shares + group * w.numbers;
  const int32_t taps = w.kernel[0] * w.kernel[1] * w.kernel[2];
  // Number i of the sums of a unit, of lane l; the last one is the bias.
  const auto write = [&](int i, I unit, int l, T total) {
    const I tap_unit = unit / w.lanes, tap_group = tap_part * w.tap_units + tap_unit;
    const I channel = first_channel + (unit - tap_unit * w.lanes) * V::kLanes + l;
    if (channel >= w.channels || tap_group >= w.tap_groups) return;
    if (i == kSums) {
      if (w.with_bias && tap_group == 0) share[w.weights + channel] = total;
      return;
    }
    const I line = tap_group / w.chunks;
    const I column = (tap_group - line * w.chunks) * K::kColumns + i % K::kColumns;
    if (w.x == nullptr || column >= w.kernel[2]) return;
    // A line is a slice of the kernel, or a row of it.
    const I row = K::kTaps > 1 ? line * w.kernel[1] + i / K::kColumns : line;
    share[int64_t(channel) * taps + row * w.kernel[2] + column] = total;
  };
  __shared__ T scratch[(kSums + 1) * kWarps > kThreads * V::kLanes ? (kSums + 1) * kWarps
                                                                   : kThreads * V::kLanes];
  if (!K::kWide && w.units == 1) {
    // equal (the next thread #2): only lane 0 of a warp writes
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int i = 0; i <= kSums; ++i) {
      const V& mine = i < kSums ? sum[i / K::kColumns % K::kTaps][i % K::kColumns] : bias;
      const T total = warp_sum(mine.lane[0]);
      if (lane == 0) scratch[i * kWarps + warp] = total;
    }
    __syncthreads();
    const int i = threadIdx.x;
    if (i > kSums) return;
    T total = 0;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) total += scratch[i * kWarps + k];
    write(i, 0, 0, total);
    return;
  }
#pragma unroll
  for (int i = 0; i <= kSums; ++i) {
    const V& mine = i < kSums ? sum[i / K::kColumns % K::kTaps][i % K::kColumns] : bias;
    __syncthreads();
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) scratch[l * kThreads + threadIdx.x] = mine.lane[l];
    __syncthreads();
    for (I k = threadIdx.x; k < w.units * V::kLanes; k += kThreads) {
      const I l = k / w.units, of = k - l * w.units;
      T total = 0;
      for (I s = 0; s < w.slots; ++s) total += scratch[l * kThreads + s * w.units + of];
      write(i, of, l, total);
    }
  }
}

// Calls f with the stored type, the type of indices and the shape of the kernel for a call.
template <class F>
void with_kernel(const DepthwiseBackward& call, const F& f) {
  const int64_t size = call.kernel[1], stride = call.stride[1];
  // equal (< for <=): the speed alone changes
  bool known = is_small(call) && call.grad_weight != nullptr && stride <= 2 &&
               (size == 3 || size == 5 || size == 7) && call.dilation[1] == 1;
  known = known && call.kernel[2] == size;
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    // equal (never #1): the speed alone changes
    const bool wide = call.last && call.multiplier == 1 && call.channels % Vec<S>::kLanes == 0 &&
                      aligned(static_cast<const char*>(call.grad),
                              static_cast<const char*>(call.grad_weight ? call.x : nullptr));
    const auto run = [&](auto index, auto taps, auto step) {
      using I = decltype(index);
      constexpr int kTaps = decltype(taps)::value, kStride = decltype(step)::value;
      if (wide)
        f(S(), I(), Shape<true, kTaps, kStride>());
      else  // planes of kernels of known sizes have their own file: these are volumes, or odd
            // channels
        f(S(), I(), Shape<false, kTaps == 3 ? 3 : 1, kTaps == 3 ? kStride : 1>());
    };
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    if constexpr (sizeof(S) < 8) {
      const auto strided = [&](auto taps) {
        return stride == 1 ? run(int32_t(), taps, One()) : run(int32_t(), taps, Two());
      };
      if (known && size == 3) return strided(std::integral_constant<int, 3>());
      if (known && size == 5) return strided(std::integral_constant<int, 5>());
      if (known) return strided(std::integral_constant<int, 7>());
    }
    return is_small(call) ? run(int32_t(), One(), One()) : run(int64_t(), One(), One());
  });
}

}  // namespace

int64_t depthwise_shares(const DepthwiseBackward& call) {
  int64_t count = 0;
  // equal (never): the workspace only gets larger
  if (call.grad_weight == nullptr && call.grad_bias == nullptr) return count;
  if ((count = depthwise_planes_shares(call)) > 0) return count;
  if ((count = depthwise_tiles_shares(call)) > 0) return count;
  with_kernel(call, [&](auto stored, auto index, auto shape) {
    using Walk = WeightWalk<decltype(index)>;
    const Walk w = Walk::template make<decltype(stored)>(call, shape);
    count = w.groups * w.numbers;  // equal (times two): the workspace only gets larger
  });
  return count;
}

void depthwise_weight(const DepthwiseBackward& call, void* stream) {
  if (depthwise_weight_planes(call, stream) || depthwise_weight_tiles(call, stream)) return;
  with_kernel(call, [&](auto stored, auto index, auto shape) {
    using S = decltype(stored);
    using Walk = WeightWalk<decltype(index)>;
    const Walk w = Walk::template make<S>(call, shape);
    launch(&weight_kernel<S, decltype(index), decltype(shape)>, int64_t(w.parts) * w.groups,
           kThreads, stream, 0, w, shares_in<S>(call.shares));
    add_group_shares<S>(call, w.groups, stream);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
