// Depthwise convolutions: the entries, and the kernel of any kernel size, stride and dilation.
//
// A thread an output, or as many channels of one as 16 bytes hold; kernels of usual sizes are in
// depthwise_strips.cu, the gradients of weight and bias in depthwise_weight.cu.
#include "depthwise.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// Blocks of a multiprocessor: as many as spill no register, on sm_75 either.
template <class S, class I>
constexpr int kBlocks = sizeof(I) + sizeof(S) > 8 ? 2
                        : sizeof(S) > 2           ? 3
                                                  : 4;

template <class S, class I, bool kWide, bool kBackward>
__global__ void __launch_bounds__(kThreads, kBlocks<S, I>) any_kernel(const Walk<I> w) {
  using V = Vec<S, kWide>;
  using Taps = Line<I, kBackward, 0>;
  const Thread<S, kWide, I> thread(w);
  Weights<S, kWide, I> weights(w, thread.group, thread.lane);
  if (!thread.exists) return;
  const Spot<I> to = Spot<I>::template make<kWide>(w, thread.at, thread.channel(w));
  const Taps slices(w, 0, to.depth), rows(w, 1, to.strip), columns(w, 2, to.column);
  V sum = first_sum<V, S>(w, to.channel);
  for (I m = 0; m < (kBackward ? w.multiplier : 1); ++m) {
    const I filter = kBackward ? to.channel * w.multiplier + m : to.channel;
    const I channel = kBackward ? filter : w.by_multiplier.quotient(to.channel);
    const Volume<const S, I> from(static_cast<const S*>(w.source), w.last, to.sample,
                                  w.from_channels, channel, w.from);
    weights.choose(w, filter);
    for (I z = 0; z < slices.count; ++z) {
      const I depth = slices.source + z * slices.source_step;
      if (!within(depth, w.from[0])) continue;
      for (I y = 0; y < rows.count; ++y) {
        const I row = rows.source + y * rows.source_step;
        if (!within(row, w.from[1])) continue;
        const I slice = slices.tap + z * slices.tap_step, line = rows.tap + y * rows.tap_step;
        const I first = (slice * w.kernel[1] + line) * w.kernel[2] + columns.tap;
#pragma unroll 4
        for (I x = 0; x < columns.count; ++x) {
          const I column = columns.source + x * columns.source_step;
          if (!within(column, w.from[2])) continue;
          V value;
          value.load(from.at(depth, row, column));
          const V weight = weights[first + x * columns.tap_step];
#pragma unroll
          for (int l = 0; l < V::kLanes; ++l) sum.lane[l] += weight.lane[l] * value.lane[l];
        }
      }
    }
  }
  const Volume<S, I> target(static_cast<S*>(w.target), w.last, to.sample, w.channels, to.channel,
                            w.to);
  sum.store(target.at(to.depth, to.strip, to.column));
}

template <class S, class I, bool kBackward>
void run_any(const DepthwiseSums& call, void* stream) {
  if (const int64_t lanes = wide_lanes<S>(call); lanes > 0)
    launch_wide<S>(&any_kernel<S, I, true, kBackward>, Tile{1, 1}, lanes, call, stream);
  else
    launch_narrow(&any_kernel<S, I, false, kBackward>, Tile{1, 1}, call, stream);
}

template <class S, class I>
void run_any(const DepthwiseSums& call, void* stream) {
  return call.backward ? run_any<S, I, true>(call, stream) : run_any<S, I, false>(call, stream);
}

void run(const DepthwiseSums& call, void* stream) {
  if (depthwise_strips(call, stream)) return;
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    if (is_small(call))
      run_any<S, int32_t>(call, stream);
    else
      run_any<S, int64_t>(call, stream);
  });
}

}  // namespace

void compute(const DepthwiseForward& call, void* stream) {
  if (call.samples == 0 || call.channels == 0 || call.outputs() == 0) return;
  run({call, false, call.x, call.weight, call.bias, call.y}, stream);
}

void compute(const DepthwiseBackward& call, void* stream) {
  // equal (always): without either nothing is written
  if (call.grad_weight != nullptr || call.grad_bias != nullptr) depthwise_weight(call, stream);
  if (call.grad_input == nullptr || call.samples * call.channels * call.inputs() == 0) return;
  run({call, true, call.grad, call.weight, nullptr, call.grad_input}, stream);
}

}  // namespace cuda
}  // namespace fusedtrain
