// Depthwise convolutions with a stride of 1 or 2 and no dilation: a thread keeps the sums of a
// strip of rows, so that an element that it loads serves all rows of the strip that see it.
//
// Threads next to each other have neighbouring columns or, in channels_last, neighbouring channels:
// loads are of neighbours in both layouts, and columns share what they load by the first-level
// cache. Kernels of 3, 5 and 7 squared are known when the kernel is compiled (those of planes are
// in depthwise_planes.cu); rows of other kernels are taken four or eight at a time, with a stride
// of 1.
#include "depthwise.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// Rows of a kernel that are taken together: all three, five or seven of them, or an even number of
// those of another kernel.
template <int kTaps>
constexpr bool kKnown = kTaps % 2 == 1;

// Rows of a strip: a multiple of the stride, as many as 128 registers hold with what they see.
template <bool kWide, int kTaps, int kStride, bool kBackward>
constexpr int kRows = !kWide ? 8 : (!kBackward && kTaps * kStride > 10 ? 2 : 4);

// Adds the products of a column of the kernel to the sums of a strip; `tap` is the first of its
// taps, of which `left` are left.
template <class P, class S, bool kWide, int kStrip, class I>
__device__ __forceinline__ void add_column(const Walk<I>& w, const Weights<S, kWide, I>& weights,
                                           const Volume<const S, I>& from, I depth, I first_row,
                                           I column, I tap, I left, Vec<S, kWide> (&sum)[kStrip]) {
  using V = Vec<S, kWide>;
  constexpr int kTaps = P::kTaps;
  Packed<S, kWide> packed[P::kSources];
  const bool exists = within(column, w.from[2]);
#pragma unroll
  for (int q = 0; q < P::kSources; ++q) {
    const I row = first_row + q;
    if (exists && within(row, w.from[1]))
      packed[q].load(from.at(depth, row, column));
    else
      packed[q].bits = typename Packed<S, kWide>::Bits{};
  }
  V weight[kTaps];
#pragma unroll
  for (int k = 0; k < kTaps; ++k)
    if (kKnown<kTaps> || k < left) weight[k] = weights[tap + k * w.kernel[2]];
#pragma unroll
  for (int q = 0; q < P::kSources; ++q) {
    const V value = packed[q].get();
#pragma unroll
    for (int p = 0; p < kStrip; ++p) {
      const int k = P::tap(p, q);
      if (k < 0 || k >= kTaps || (!kKnown<kTaps> && k >= left)) continue;
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) sum[p].lane[l] += weight[k].lane[l] * value.lane[l];
    }
  }
}

template <class S, bool kWide, int kTaps, int kStride, bool kBackward>
__global__ void __launch_bounds__(kThreads, kTileBlocks) strips_kernel(const Walk<int32_t> w) {
  using I = int32_t;
  using V = Vec<S, kWide>;
  constexpr int kStrip = kRows<kWide, kTaps, kStride, kBackward>;
  using P = Pattern<kTaps, kStride, kStrip, kBackward>;
  const Thread<S, kWide, I> thread(w);
  Weights<S, kWide, I> weights(w, thread.group, thread.lane);
  if (!thread.exists) return;
  const Spot<I> to = Spot<I>::template make<kWide>(w, thread.at, thread.channel(w));
  const I first = to.strip * kStrip - w.shift, first_row = P::source(first, w.pad[1]);
  const Line<I, kBackward, 0> slices(w, 0, to.depth);
  const Line<I, kBackward, kKnown<kTaps> ? kStride : 0> columns(w, 2, to.column);
  V sum[kStrip];
  sum[0] = first_sum<V, S>(w, to.channel);
#pragma unroll
  for (int p = 1; p < kStrip; ++p) sum[p] = sum[0];
  for (I m = 0; m < (kBackward ? w.multiplier : 1); ++m) {
    const I filter = kBackward ? to.channel * w.multiplier + m : to.channel;
    const I channel = kBackward ? filter : w.by_multiplier.quotient(to.channel);
    const Volume<const S, I> from(static_cast<const S*>(w.source), w.last, to.sample,
                                  w.from_channels, channel, w.from);
    weights.choose(w, filter);
    for (I z = 0; z < slices.count; ++z) {
      const I depth = slices.source + z * slices.source_step;
      if (!within(depth, w.from[0])) continue;
      const I slice = (slices.tap + z * slices.tap_step) * w.kernel[1] * w.kernel[2];
      if constexpr (kKnown<kTaps>) {
#pragma unroll(kTaps* kStride == 3 && !(kWide && kBackward) ? 3 : 1)
        for (int x = 0; x < P::kColumns; ++x) {
          // equal (>= for >): a stride of 1 sees all columns of the kernel
          if (kBackward && kStride > 1 && columns.tap + x * kStride >= kTaps) break;
          add_column<P>(w, weights, from, depth, first_row,
                        columns.source + x * columns.source_step,
                        slice + columns.tap + x * columns.tap_step, I(kTaps), sum);
        }
      } else {
        for (I part = 0; part < w.kernel[1]; part += kTaps)
          for (I x = 0; x < columns.count; ++x)
            add_column<P>(w, weights, from, depth, first_row + (kBackward ? -part : part),
                          columns.source + x * columns.source_step,
                          slice + part * w.kernel[2] + columns.tap + x * columns.tap_step,
                          w.kernel[1] - part, sum);
      }
    }
  }
  const Volume<S, I> target(static_cast<S*>(w.target), w.last, to.sample, w.channels, to.channel,
                            w.to);
#pragma unroll
  for (int p = 0; p < kStrip; ++p)
    if (within(first + p, w.to[1])) sum[p].store(target.at(to.depth, first + p, to.column));
}

template <class S, int kTaps, int kStride, bool kBackward>
void run_pass(const DepthwiseSums& call, void* stream) {
  constexpr Tile kWideTile = {kRows<true, kTaps, kStride, kBackward>, 1};
  const int64_t lanes = wide_lanes<S>(call);
  // equal (never): the speed alone changes
  if (kKnown<kTaps> && (lanes > 0 ? depthwise_tiles(call, stream) : depthwise_planes(call, stream)))
    return;
  if (lanes > 0)
    return launch_wide<S>(&strips_kernel<S, true, kTaps, kStride, kBackward>, kWideTile, lanes,
                          call, stream);
  constexpr int kNarrow = kKnown<kTaps> ? kTaps : 8;
  launch_narrow(&strips_kernel<S, false, kNarrow, kStride, kBackward>, Tile{8, 1}, call, stream);
}

template <class S, int kTaps, int kStride>
void run(const DepthwiseSums& call, void* stream) {
  return call.backward ? run_pass<S, kTaps, kStride, true>(call, stream)
                       : run_pass<S, kTaps, kStride, false>(call, stream);
}

}  // namespace

bool depthwise_strips(const DepthwiseSums& call, void* stream) {
  const int64_t stride = call.stride[1], size = call.kernel[1];
  // equal (>= for >): the speed alone changes
  if (!is_small(call) || call.dtype == Dtype::kFloat64 || call.dilation[1] != 1 || stride > 2)
    return false;
  const bool square = call.kernel[2] == size && call.stride[2] == stride && call.dilation[2] == 1;
  const bool known = square && (size == 3 || size == 5 || size == 7);
  // equal (<= for <): the speed alone changes
  if (!known && (stride != 1 || size < 4)) return false;
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    if constexpr (sizeof(S) < 8) {
      if (!known) return run<S, 4, 1>(call, stream);
      if (size == 3) return stride == 1 ? run<S, 3, 1>(call, stream) : run<S, 3, 2>(call, stream);
      if (size == 5) return stride == 1 ? run<S, 5, 1>(call, stream) : run<S, 5, 2>(call, stream);
      return stride == 1 ? run<S, 7, 1>(call, stream) : run<S, 7, 2>(call, stream);
    }
  });
  return true;
}

}  // namespace cuda
}  // namespace fusedtrain
