// Depthwise convolutions in channels_last: the gradients of weight and bias, for kernels of 5 or 7
// squared with a stride of 1. A block keeps tiles of gradients and inputs in shared memory.
//
// A thread has the sums of a column of the kernel and four channels, and goes over half of the
// columns of each tile.
#include "depthwise_shares.cuh"
#include "depthwise_tile.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

template <class S, int kTaps_>
struct WeightTiles {
  static constexpr int kTaps = kTaps_, kRows = 8, kColumns = 8, kHalf = kColumns / 2;
  static constexpr int kSourceRows = kRows + kTaps - 1, kSourceColumns = kColumns + kTaps - 1;
  static constexpr int kThreads = kQuads<S> * kTaps * 2;
};

// Block b has channels b % parts, and every groups-th tile from b / parts on.
struct WeightTileWalk {
  int32_t channels, in[2], out[2], pad[2];  // rows and columns
  int32_t parts, groups, tiles;
  int64_t weights, numbers;
  Divisor<int32_t> by_column, by_row;
  const void* grad;
  const void* x;
  bool with_bias;

  template <class S>
  static WeightTileWalk make(const DepthwiseBackward& call, int rows, int columns) {
    WeightTileWalk w = {};
    w.channels = int32_t(call.channels);
    for (int d = 0; d < 2; ++d) {
      w.in[d] = int32_t(call.in[d + 1]);
      w.out[d] = int32_t(call.out[d + 1]);
      w.pad[d] = int32_t(call.pad[d + 1]);
    }
    const int64_t down = ceil_div(w.out[0], rows), across = ceil_div(w.out[1], columns);
    w.tiles = int32_t(call.samples * call.out[0] * down * across);
    w.parts = int32_t(ceil_div(w.channels, kPositionChannels<S>));
    w.groups = int32_t(share_groups<S>(call, w.parts, w.tiles));
    w.weights = call.channels * call.taps();
    w.numbers = w.weights + call.channels;
    w.by_column = Divisor<int32_t>(across);
    w.by_row = Divisor<int32_t>(down);
    w.grad = call.grad;
    w.x = call.x;
    w.with_bias = call.grad_bias != nullptr;
    return w;
  }
};

// A tile of gradients: its image, and its first position.
struct TilePlace {
  int32_t sample, row, column;

  template <class P>
  static __device__ __forceinline__ TilePlace make(const WeightTileWalk& w, int32_t at) {
    TilePlace place;
    place.column = w.by_column.digit(at) * P::kColumns;
    place.row = w.by_row.digit(at) * P::kRows;
    place.sample = at;
    return place;
  }
};

// The sum of one tap of a channel over a thread's columns, of elements that exist alone.
template <class P, class S>
__device__ __forceinline__ typename Compute<S>::T exact_sum(const WeightTileWalk& w,
                                                            int32_t channel, int32_t group,
                                                            int first_column, int row_tap,
                                                            int column_tap) {
  typename Compute<S>::T total = 0;
  for (int32_t at = group; at < w.tiles; at += w.groups) {
    const TilePlace place = TilePlace::make<P>(w, at);
    for (int p = 0; p < P::kRows; ++p) {
      const int32_t row = place.row + p, y = row - w.pad[0] + row_tap;
      if (row >= w.out[0] || !within(y, w.in[0])) continue;
      for (int j = first_column; j < first_column + P::kHalf; ++j) {
        const int32_t column = place.column + j, x = column - w.pad[1] + column_tap;
        if (column >= w.out[1] || !within(x, w.in[1])) continue;
        const int32_t to = (place.sample * w.out[0] + row) * w.out[1] + column;
        const int32_t from = (place.sample * w.in[0] + y) * w.in[1] + x;
        total += load_one(static_cast<const S*>(w.grad)[to * w.channels + channel]) *
                 load_one(static_cast<const S*>(w.x)[from * w.channels + channel]);
      }
    }
  }
  return total;
}

template <class S, class P>
__global__ void __launch_bounds__(P::kThreads, 2)
    tiles_weight_kernel(const WeightTileWalk w, typename Compute<S>::T* shares) {
  using T = typename Compute<S>::T;
  constexpr int kTaps = P::kTaps;
  constexpr int kSources = P::kSourceRows * P::kSourceColumns * kPositionVectors;
  __shared__ uint4 sources[kSources], grads[P::kRows * P::kColumns * kPositionVectors];

  const int32_t part = int32_t(blockIdx.x) % w.parts, group = int32_t(blockIdx.x) / w.parts;
  const int32_t first_channel = part * kPositionChannels<S>, left = w.channels - first_channel;
  const int32_t exist = left < kPositionChannels<S> ? left : kPositionChannels<S>;
  const int quad = threadIdx.x % kQuads<S>, rest = threadIdx.x / kQuads<S>;
  const int column_tap = rest / 2, half = rest % 2, first_column = half * P::kHalf;
  const int32_t channel = first_channel + quad * kQuad;

  T sum[kTaps][kQuad] = {}, bias[kQuad] = {};
#pragma unroll 1
  for (int32_t at = group; at < w.tiles; at += w.groups) {
    const TilePlace place = TilePlace::make<P>(w, at);
    __syncthreads();  // the tiles before
    load_tile<P::kSourceRows, P::kSourceColumns, P::kThreads>(
        sources,
        static_cast<const S*>(w.x) + place.sample * w.in[0] * w.in[1] * w.channels + first_channel,
        place.row - w.pad[0], place.column - w.pad[1], w.in, w.channels, exist);
    load_tile<P::kRows, P::kColumns, P::kThreads>(
        grads,
        static_cast<const S*>(w.grad) + place.sample * w.out[0] * w.out[1] * w.channels +
            first_channel,
        place.row, place.column, w.out, w.channels, exist);
    __syncthreads();
    const Quad<S>* g = reinterpret_cast<const Quad<S>*>(grads) + first_column * kQuads<S> + quad;
    const Quad<S>* x =
        reinterpret_cast<const Quad<S>*>(sources) + (first_column + column_tap) * kQuads<S> + quad;
#pragma unroll 1
    for (int j = 0; j < P::kHalf; ++j, g += kQuads<S>, x += kQuads<S>) {
      T gradient[P::kRows][kQuad];
#pragma unroll
      for (int p = 0; p < P::kRows; ++p)
        unpack<S>(g[p * P::kColumns * kQuads<S>].lane, gradient[p]);
      if (column_tap == 0) {
#pragma unroll
        for (int p = 0; p < P::kRows; ++p)
#pragma unroll
          for (int l = 0; l < kQuad; ++l) bias[l] += gradient[p][l];
      }
#pragma unroll
      for (int q = 0; q < P::kSourceRows; ++q) {
        T value[kQuad];
        unpack<S>(x[q * P::kSourceColumns * kQuads<S>].lane, value);
#pragma unroll
        for (int p = 0; p < P::kRows; ++p) {
          if (q < p || q - p >= kTaps) continue;
#pragma unroll
          for (int l = 0; l < kQuad; ++l) sum[q - p][l] += gradient[p][l] * value[l];
        }
      }
    }
  }
  // Elements that do not exist were zeros, and zero times infinity is none.
#pragma unroll
  for (int l = 0; l < kQuad; ++l) {
    bool is_number = true;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) is_number &= sum[k][l] == sum[k][l];
    if (is_number || channel + l >= w.channels) continue;
#pragma unroll 1
    for (int tap = 0; tap < kTaps; ++tap) {
      const T exact = exact_sum<P, S>(w, channel + l, group, first_column, tap, column_tap);
#pragma unroll
      for (int k = 0; k < kTaps; ++k)
        if (k == tap) sum[k][l] = exact;
    }
  }

  // The second half's sums meet the first one's.
  // equal (times two): sums only change places
  T* const scratch = reinterpret_cast<T*>(sources) + (column_tap * kQuads<S> + quad);
  constexpr int kStep = kTaps * kQuads<S>;
  static_assert(kStep * (kTaps + 1) * kQuad * sizeof(T) <= sizeof sources, "too many sums");
  __syncthreads();
  if (half == 1) {
#pragma unroll
    for (int l = 0; l < kQuad; ++l) {
#pragma unroll
      for (int k = 0; k < kTaps; ++k) scratch[(k * kQuad + l) * kStep] = sum[k][l];
      scratch[(kTaps * kQuad + l) * kStep] = bias[l];
    }
  }
  __syncthreads();
  if (half == 1) return;
  T* const share = shares + group * w.numbers;
#pragma unroll
  for (int l = 0; l < kQuad; ++l) {
    if (channel + l >= w.channels) continue;
#pragma unroll
    for (int k = 0; k < kTaps; ++k)
      share[int64_t(channel + l) * (kTaps * kTaps) + k * kTaps + column_tap] =
          sum[k][l] + scratch[(k * kQuad + l) * kStep];
    if (w.with_bias && column_tap == 0)
      share[w.weights + channel + l] = bias[l] + scratch[(kTaps * kQuad + l) * kStep];
  }
}

// Calls f with the stored type and the shape of the kernel, where there is one for the call.
template <class F>
bool with_tiles(const DepthwiseBackward& call, const F& f) {
  const int64_t size = call.kernel[1];
  // equal (never): the speed alone changes
  bool fits = call.grad_weight != nullptr && call.last && is_small(call) && is_flat(call) &&
              call.dtype != Dtype::kFloat64 && call.multiplier == 1 && call.samples > 0 &&
              call.kernel[2] == size && (size == 5 || size == 7) &&
              aligned(static_cast<const char*>(call.grad), static_cast<const char*>(call.x));
  for (int d = 1; d < 3; ++d) fits = fits && call.stride[d] == 1 && call.dilation[d] == 1;
  if (!fits) return false;
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    if (!(fits = call.channels % Vec<S>::kLanes == 0)) return;
    if constexpr (sizeof(S) < 8)
      return size == 5 ? f(S(), WeightTiles<S, 5>()) : f(S(), WeightTiles<S, 7>());
  });
  return fits;
}

}  // namespace

int64_t depthwise_tiles_shares(const DepthwiseBackward& call) {
  int64_t count = 0;
  with_tiles(call, [&](auto stored, auto shape) {
    const auto w = WeightTileWalk::make<decltype(stored)>(call, shape.kRows, shape.kColumns);
    count = w.groups * w.numbers;  // equal (times two): the workspace only gets larger
  });
  return count;
}

bool depthwise_weight_tiles(const DepthwiseBackward& call, void* stream) {
  return with_tiles(call, [&](auto stored, auto shape) {
    using S = decltype(stored);
    const auto w = WeightTileWalk::make<S>(call, shape.kRows, shape.kColumns);
    launch(&tiles_weight_kernel<S, decltype(shape)>, int64_t(w.parts) * w.groups, shape.kThreads,
           stream, 0, w, shares_in<S>(call.shares));
    add_group_shares<S>(call, w.groups, stream);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
