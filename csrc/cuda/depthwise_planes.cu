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
  using Rows = typename P::Rows;
  using Columns = typename P::Columns;
  constexpr int kTaps = P::kTaps;
  const Thread<S, false, I> thread(w);
  if (!thread.exists) return;
  const Spot<I> to = Spot<I>::template make<false>(w, thread.at, 0);
  const I top = to.strip * P::kTile.rows - w.shift, left = to.column * P::kTile.columns - w.side;
  const I first_row = Rows::source(top, w.pad[1]), first_column = Columns::source(left, w.pad[2]);
  bool exists[Columns::kSources];
#pragma unroll
  for (int c = 0; c < Columns::kSources; ++c) exists[c] = within(first_column + c, w.from[2]);

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

  // Rows outside are loaded from the nearest one, and left out of the sums: so loads depend on the
  // conditions of columns alone.
  const I last_row = w.from[1] - 1;
  // equal (<= for <): the same row
  const I begin = first_row < 0 ? 0 : (first_row < last_row ? first_row : last_row);
  const Volume<const S, I> from(static_cast<const S*>(w.source), false, to.sample, w.from_channels,
                                w.by_multiplier.quotient(to.channel), w.from);
  const S* line = from.at(to.depth, begin, first_column);
  S rows[P::kAhead][Columns::kSources];
  const auto load_row = [&](int q) {
    // equal (> for >=): nobody reads the row
    if (q >= Rows::kSources) return;
#pragma unroll
    for (int c = 0; c < Columns::kSources; ++c)
      rows[q % P::kAhead][c] = exists[c] ? line[c] : store_one<S>(0);
    if (within(first_row + q, last_row)) line += w.from[2];
  };
  const auto add_row = [&](int q) {
    if (!within(first_row + q, w.from[1])) return;
#pragma unroll
    for (int c = 0; c < Columns::kSources; ++c) {
      const T value = load_one(rows[q % P::kAhead][c]);
#pragma unroll
      for (int p = 0; p < P::kTile.rows; ++p) {
        const int k = Rows::tap(p, q);
        if (k < 0 || k >= kTaps) continue;
#pragma unroll
        for (int j = 0; j < P::kTile.columns; ++j) {
          const int x = Columns::tap(j, c);
          if (x >= 0 && x < kTaps) sum[p][j] += weight[k][x] * value;
        }
      }
    }
  };
#pragma unroll
  for (int q = 0; q < P::kAhead - 1; ++q) load_row(q);
#pragma unroll
  for (int q = 0; q < Rows::kSources; ++q) {
    load_row(q + P::kAhead - 1);
    add_row(q);
  }

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
