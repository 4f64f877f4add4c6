// Depthwise convolutions of planes, with kernels of 3, 5 or 7 squared, a stride of 1 or 2 and no
// dilation: a thread keeps the sums of a tile of rows and columns, so that each element that it
// loads serves all outputs of the tile that see it.
#include "depthwise.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

template <int kTaps_, int kStride, bool kBackward>
struct Planes {
  static constexpr int kTaps = kTaps_;
  // As many rows as 128 registers hold.
  static constexpr int kRows =
      kStride == 2 && !kBackward ? (kTaps == 7 ? 2 : 4) : (kTaps * kStride == 7 ? 7 : 8);
  static constexpr Tile kTile = {kRows, 4};
  using Rows = Pattern<kTaps, kStride, kTile.rows, kBackward>;
  using Columns = Pattern<kTaps, kStride, kTile.columns, kBackward>;
  // Rows that are under way together: as many as registers hold.
  static constexpr int kAhead = kTaps == 3 ? 6 : (kTaps == 5 ? 3 : 2);
};

template <class S, class P>
__global__ void __launch_bounds__(kThreads, kTileBlocks) planes_kernel(const Walk<int32_t> w) {
  using I = int32_t;
  using T = typename Compute<S>::T;
  constexpr int kTaps = P::kTaps;
  const Thread<S, false, I> thread(w);
  if (!thread.exists) return;
  const Spot<I> to = Spot<I>::template make<false>(w, thread.at, 0);
  const I top = to.strip * P::kTile.rows - w.shift, left = to.column * P::kTile.columns - w.side;
  const T bias = first_sum<Vec<S, false>, S>(w, to.channel).lane[0];
  const S* const taps = static_cast<const S*>(w.weight) + to.channel * (kTaps * kTaps);
  T weight[kTaps][kTaps];
#pragma unroll
  for (int k = 0; k < kTaps * kTaps; ++k) weight[k / kTaps][k % kTaps] = load_one(taps[k]);
  T sum[P::kTile.rows][P::kTile.columns];
#pragma unroll
  for (int p = 0; p < P::kTile.rows; ++p)
#pragma unroll
    for (int j = 0; j < P::kTile.columns; ++j) sum[p][j] = bias;

  const Volume<const S, I> from(static_cast<const S*>(w.source), false, to.sample, w.from_channels,
                                w.by_multiplier.quotient(to.channel), w.from);
  Window<P, S> window(from.at(to.depth, 0, 0), w.from, P::Rows::source(top, w.pad[1]),
                      P::Columns::source(left, w.pad[2]));
  window.walk([&](int p, int j, int k, int t, T value) { sum[p][j] += weight[k][t] * value; });

  const Volume<S, I> target(static_cast<S*>(w.target), false, to.sample, w.channels, to.channel,
                            w.to);
  S* out = target.at(to.depth, top, left);
#pragma unroll
  for (int p = 0; p < P::kTile.rows; ++p, out += w.to[2]) {
    if (!within(top + p, w.to[1])) continue;
#pragma unroll
    for (int j = 0; j < P::kTile.columns; ++j)
      if (within(left + j, w.to[2])) out[j] = store_one<S>(sum[p][j]);
  }
}

template <class S, int kTaps, int kStride, bool kBackward>
void run(const DepthwiseSums& call, void* stream) {
  using P = Planes<kTaps, kStride, kBackward>;
  launch_narrow(&planes_kernel<S, P>, P::kTile, call, stream);
}

template <class S, int kTaps>
void run(const DepthwiseSums& call, void* stream) {
  if (call.stride[1] == 1)
    return call.backward ? run<S, kTaps, 1, true>(call, stream)
                         : run<S, kTaps, 1, false>(call, stream);
  return call.backward ? run<S, kTaps, 2, true>(call, stream)
                       : run<S, kTaps, 2, false>(call, stream);
}

}  // namespace

bool depthwise_planes(const DepthwiseSums& call, void* stream) {
  if (call.last || !is_flat(call) || (call.backward && call.multiplier != 1)) return false;
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    if constexpr (sizeof(S) < 8) {
      if (call.kernel[1] == 3) return run<S, 3>(call, stream);
      return call.kernel[1] == 5 ? run<S, 5>(call, stream) : run<S, 7>(call, stream);
    }
  });
  return true;
}

}  // namespace cuda
}  // namespace fusedtrain
