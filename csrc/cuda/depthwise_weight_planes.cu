// Depthwise convolutions of planes: the gradients of weight and bias, for kernels of 3, 5 or 7
// squared with a stride of 1 or 2 and no dilation.
//
// A thread has the sums of all taps of a channel. It goes from tile to tile of gradients, and loads
// the inputs that a tile has seen a row at a time.
#include "depthwise.cuh"
#include "depthwise_shares.cuh"
#include "reduce.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;

template <int kTaps_, int kStride_>
struct WeightPlanes {
  static constexpr int kTaps = kTaps_, kStride = kStride_;
  // As many rows as 128 registers hold.
  static constexpr int kRows = kTaps == 7 ? (kStride == 2 ? 2 : 4) : (kStride == 2 ? 4 : 8);
  static constexpr Tile kTile = {kRows, 4};
  using Rows = Pattern<kTaps, kStride, kTile.rows, false>;
  using Columns = Pattern<kTaps, kStride, kTile.columns, false>;
  static constexpr int kAhead = kTaps == 3 ? 4 : 2;  // rows of inputs that are under way together
};

// Block b has part b % parts of the channels, and group b / parts of the steps. A channel has some
// whole warps of the block, `threads` of them in all.
struct PlanesWalk {
  int32_t channels, in_channels, in[3], out[3], pad[3];
  int32_t lanes, threads, parts, groups, steps, per_group;
  int64_t weights, numbers;
  Divisor<int32_t> by_column, by_strip, by_depth, by_multiplier;
  const void* grad;
  const void* x;
  bool with_bias;

  template <class S>
  static PlanesWalk make(const DepthwiseBackward& call, Tile tile) {
    PlanesWalk w = {};
    w.channels = int32_t(call.out_channels());
    w.in_channels = int32_t(call.channels);
    for (int d = 0; d < 3; ++d) {
      w.in[d] = int32_t(call.in[d]);
      w.out[d] = int32_t(call.out[d]);
      w.pad[d] = int32_t(call.pad[d]);
    }
    const int64_t strips = ceil_div(call.out[1], tile.rows);
    const int64_t across = ceil_div(call.out[2], tile.columns);
    w.steps = int32_t(call.samples * call.out[0] * strips * across);
    // Several channels a block where a channel has few steps a thread, and blocks are enough.
    w.lanes = 1;
    while (w.lanes < kWarps && w.steps < kThreads / w.lanes * 4 &&
           w.channels >= w.lanes * 2 * multiprocessors())
      w.lanes *= 2;
    w.threads = kThreads / w.lanes;
    w.parts = int32_t(ceil_div(w.channels, w.lanes));
    w.weights = call.out_channels() * call.taps();
    w.numbers = w.weights + call.out_channels();
    const int64_t groups =
        share_groups<S>(call, w.parts, ceil_div(w.steps, int64_t(w.threads) * 4));
    w.per_group = int32_t(ceil_div(w.steps, groups));
    w.groups = int32_t(ceil_div(w.steps, w.per_group));
    w.by_column = Divisor<int32_t>(across);
    w.by_strip = Divisor<int32_t>(strips);
    w.by_depth = Divisor<int32_t>(call.out[0]);
    w.by_multiplier = Divisor<int32_t>(call.multiplier);
    w.grad = call.grad;
    w.x = call.x;
    w.with_bias = call.grad_bias != nullptr;
    return w;
  }
};

// A step of a thread: a tile of gradients and the inputs that it has seen.
template <class S, class P>
struct Step {
  const S* grad;  // first one of the tile
  const S* x;     // plane
  int32_t rows, columns, first_row, first_column;

  __device__ __forceinline__ Step(const PlanesWalk& w, int32_t channel, int32_t step) {
    int32_t sample = step;
    const int32_t left = w.by_column.digit(sample) * P::kTile.columns;
    const int32_t top = w.by_strip.digit(sample) * P::kTile.rows;
    const int32_t depth = w.by_depth.digit(sample);
    const Volume<const S, int32_t> grads(static_cast<const S*>(w.grad), false, sample, w.channels,
                                         channel, w.out);
    const Volume<const S, int32_t> inputs(static_cast<const S*>(w.x), false, sample, w.in_channels,
                                          w.by_multiplier.quotient(channel), w.in);
    grad = grads.at(depth, top, left);
    x = inputs.at(depth, 0, 0);
    rows = w.out[1] - top;
    columns = w.out[2] - left;
    first_row = P::Rows::source(top, w.pad[1]);
    first_column = P::Columns::source(left, w.pad[2]);
  }
};

template <class P, class S, class T>
__device__ __forceinline__ void add_step(const PlanesWalk& w, int32_t channel, int32_t step,
                                         T (&sum)[P::kTaps][P::kTaps], T& bias) {
  const Step<S, P> s(w, channel, step);
  S packed[P::kTile.rows][P::kTile.columns];
#pragma unroll
  for (int p = 0; p < P::kTile.rows; ++p)
#pragma unroll
    for (int j = 0; j < P::kTile.columns; ++j)
      packed[p][j] = p < s.rows && j < s.columns ? s.grad[p * w.out[2] + j] : store_one<S>(0);
  Window<P, S> window(s.x, w.in, s.first_row, s.first_column);
  T g[P::kTile.rows][P::kTile.columns];
#pragma unroll
  for (int p = 0; p < P::kTile.rows; ++p)
#pragma unroll
    for (int j = 0; j < P::kTile.columns; ++j) {
      g[p][j] = load_one(packed[p][j]);
      bias += g[p][j];
    }
  window.walk([&](int p, int j, int k, int t, T value) { sum[k][t] += g[p][j] * value; });
}

// The sum of one tap, of gradients and inputs that exist alone.
template <class P, class S>
__device__ __forceinline__ typename Compute<S>::T exact_sum(const PlanesWalk& w, int32_t channel,
                                                            int32_t first, int32_t end, int tap) {
  typename Compute<S>::T total = 0;
  const int row_tap = tap / P::kTaps, column_tap = tap - row_tap * P::kTaps;
  for (int32_t step = first; step < end; step += w.threads) {
    const Step<S, P> s(w, channel, step);
    for (int p = 0; p < P::kTile.rows && p < s.rows; ++p) {
      const int32_t row = s.first_row + p * P::kStride + row_tap;
      if (!within(row, w.in[1])) continue;
      for (int j = 0; j < P::kTile.columns && j < s.columns; ++j) {
        const int32_t column = s.first_column + j * P::kStride + column_tap;
        if (within(column, w.in[2]))
          total += load_one(s.grad[p * w.out[2] + j]) * load_one(s.x[row * w.in[2] + column]);
      }
    }
  }
  return total;
}

template <class S, class P>
__global__ void __launch_bounds__(kThreads, kTileBlocks)
    planes_weight_kernel(const PlanesWalk w, typename Compute<S>::T* shares) {
  using T = typename Compute<S>::T;
  constexpr int kSums = P::kTaps * P::kTaps;
  // equal (the next block #1): blocks only change places
  const int32_t part = int32_t(blockIdx.x) % w.parts, group = int32_t(blockIdx.x) / w.parts;
  const int32_t lane = int32_t(threadIdx.x) / w.threads, slot = int32_t(threadIdx.x) % w.threads;
  const int32_t channel = part * w.lanes + lane, first = group * w.per_group + slot;
  // equal (<= for <): the same step
  const int32_t last = (group + 1) * w.per_group < w.steps ? (group + 1) * w.per_group : w.steps;
  const int32_t end = channel < w.channels ? last : 0;

  T sum[P::kTaps][P::kTaps] = {}, bias = 0;
#pragma unroll 1
  for (int32_t step = first; step < end; step += w.threads)
    add_step<P, S>(w, channel, step, sum, bias);
  // Elements that do not exist were zeros, and zero times infinity is none.
  bool is_number = true;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const T& one = sum[i / P::kTaps][i % P::kTaps];
    is_number &= one == one;
  }
  if (!is_number) {
#pragma unroll 1
    for (int tap = 0; tap < kSums; ++tap) {
      const T exact = exact_sum<P, S>(w, channel, first, end, tap);
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        if (i == tap) sum[i / P::kTaps][i % P::kTaps] = exact;
    }
  }

  __shared__ T scratch[(kSums + 1) * kWarps];
  // equal (the next thread #2): only lane 0 of a warp writes
  const int in_warp = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int i = 0; i <= kSums; ++i) {
    const T total = warp_sum(i < kSums ? sum[i / P::kTaps % P::kTaps][i % P::kTaps] : bias);
    if (in_warp == 0) scratch[i * kWarps + warp] = total;
  }
  __syncthreads();
  const int warps = kWarps / w.lanes;
  for (int i = threadIdx.x; i < (kSums + 1) * w.lanes; i += kThreads) {
    const int number = i / w.lanes;
    const int32_t to = part * w.lanes + i % w.lanes;
    if (to >= w.channels || (number == kSums && !w.with_bias)) continue;
    T total = 0;
    for (int k = 0; k < warps; ++k) total += scratch[number * kWarps + i % w.lanes * warps + k];
    shares[group * w.numbers + (number == kSums ? w.weights + to : int64_t(to) * kSums + number)] =
        total;
  }
}

// Calls f with the stored type and the shape of the kernel, where there is one for the call.
template <class F>
bool with_planes(const DepthwiseBackward& call, const F& f) {
  const int64_t size = call.kernel[1], stride = call.stride[1];
  if (call.grad_weight == nullptr || call.last || !is_small(call) || !is_flat(call) ||
      call.dtype == Dtype::kFloat64 || call.kernel[2] != size || call.stride[2] != stride ||
      stride > 2 || (size != 3 && size != 5 && size != 7) || call.dilation[1] != 1 ||
      call.dilation[2] != 1 || call.samples == 0)
    return false;
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    if constexpr (sizeof(S) < 8) {
      const auto strided = [&](auto taps) {
        constexpr int kTaps = decltype(taps)::value;
        return stride == 1 ? f(S(), WeightPlanes<kTaps, 1>()) : f(S(), WeightPlanes<kTaps, 2>());
      };
      if (size == 3) return strided(std::integral_constant<int, 3>());
      if (size == 5) return strided(std::integral_constant<int, 5>());
      return strided(std::integral_constant<int, 7>());
    }
  });
  return true;
}

}  // namespace

int64_t depthwise_planes_shares(const DepthwiseBackward& call) {
  int64_t count = 0;
  with_planes(call, [&](auto stored, auto shape) {
    const auto w = PlanesWalk::make<decltype(stored)>(call, shape.kTile);
    count = w.groups * w.numbers;  // equal (times two): the workspace only gets larger
  });
  return count;
}

bool depthwise_weight_planes(const DepthwiseBackward& call, void* stream) {
  return with_planes(call, [&](auto stored, auto shape) {
    using S = decltype(stored);
    const PlanesWalk w = PlanesWalk::make<S>(call, shape.kTile);
    launch(&planes_weight_kernel<S, decltype(shape)>, int64_t(w.parts) * w.groups, kThreads, stream,
           0, w, shares_in<S>(call.shares));
    add_group_shares<S>(call, w.groups, stream);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
