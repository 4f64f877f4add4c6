// Depthwise convolutions in channels_last, with kernels of 5 or 7 squared and a stride of 1: a
// block keeps a tile of what it reads in shared memory, so that each element is loaded once.
//
// A thread has a column of the tile and four channels. With a stride of 1 the gradient of the input
// is a forward with the kernel turned around.
#include "depthwise_tile.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

template <class S, int kTaps_>
struct Tiles {
  static constexpr int kTaps = kTaps_, kRows = 8, kColumns = 8;
  static constexpr int kSourceRows = kRows + kTaps - 1, kSourceColumns = kColumns + kTaps - 1;
  static constexpr int kThreads = kQuads<S> * kColumns;
  // Neighbouring taps are a multiple of 16 bytes apart, of few banks.
  static constexpr int kPitch = kPositionChannels<S> + kQuad;
};

struct TileWalk {
  int32_t channels, from[2], to[2], pad[2];  // rows and columns
  int32_t parts, groups, tiles;
  Divisor<int32_t> by_column, by_row;
  bool turned;
  const void* source;
  const void* weight;
  const void* bias;
  void* target;
};

// Block b has channels b % parts, and every groups-th tile from b / parts on.
template <class S, class P>
__global__ void __launch_bounds__(P::kThreads, 512 / P::kThreads) tiles_kernel(const TileWalk w) {
  using T = typename Compute<S>::T;
  constexpr int kTaps = P::kTaps;
  __shared__ uint4 tile[P::kSourceRows * P::kSourceColumns * kPositionVectors];
  __shared__ Quad<T> weights[kTaps * kTaps * P::kPitch / kQuad];

  const int32_t part = int32_t(blockIdx.x) % w.parts, group = int32_t(blockIdx.x) / w.parts;
  const int32_t first_channel = part * kPositionChannels<S>;
  const int32_t left = w.channels - first_channel;
  const int32_t channels = left < kPositionChannels<S> ? left : kPositionChannels<S>;
  const S* const of_part = static_cast<const S*>(w.weight) + first_channel * (kTaps * kTaps);
  for (int32_t i = threadIdx.x; i < channels * (kTaps * kTaps); i += P::kThreads) {
    const int32_t channel = i / (kTaps * kTaps), k = i - channel * (kTaps * kTaps);
    const int32_t tap = w.turned ? kTaps * kTaps - 1 - k : k;
    reinterpret_cast<T*>(weights)[tap * P::kPitch + channel] = load_one(of_part[i]);
  }

  // equal (the next thread #1): quads only change places
  const int quad = threadIdx.x % kQuads<S>, column = threadIdx.x / kQuads<S>;
  const int32_t channel = first_channel + quad * kQuad;
  T bias[kQuad];
#pragma unroll
  for (int l = 0; l < kQuad; ++l)
    bias[l] = w.bias != nullptr && channel < w.channels
                  ? load_one(static_cast<const S*>(w.bias)[channel + l])
                  : T(0);
#pragma unroll 1
  for (int32_t at = group; at < w.tiles; at += w.groups) {
    int32_t sample = at;
    const int32_t to_column = w.by_column.digit(sample) * P::kColumns;
    const int32_t to_row = w.by_row.digit(sample) * P::kRows;
    const int32_t from_row = to_row - w.pad[0], from_column = to_column - w.pad[1];
    const S* const source = static_cast<const S*>(w.source) +
                            sample * w.from[0] * w.from[1] * w.channels + first_channel;
    __syncthreads();  // the tile before, and the weights
    load_tile<P::kSourceRows, P::kSourceColumns, P::kThreads>(tile, source, from_row, from_column,
                                                              w.from, w.channels, channels);
    __syncthreads();
    if (channel >= w.channels || to_column + column >= w.to[1]) continue;

    T sum[P::kRows][kQuad];
#pragma unroll
    for (int p = 0; p < P::kRows; ++p)
#pragma unroll
      for (int l = 0; l < kQuad; ++l) sum[p][l] = bias[l];
    const Quad<S>* values = reinterpret_cast<const Quad<S>*>(tile) + column * kQuads<S> + quad;
    const auto* taps = weights + quad;
#pragma unroll 1
    for (int x = 0; x < kTaps; ++x) {
      Quad<T> weight[kTaps];
#pragma unroll
      for (int k = 0; k < kTaps; ++k) weight[k] = taps[k * kTaps * (P::kPitch / kQuad)];
#pragma unroll
      for (int q = 0; q < P::kSourceRows; ++q) {
        const Quad<S> packed = values[q * P::kSourceColumns * kQuads<S>];
        T value[kQuad];
        unpack<S>(packed.lane, value);
#pragma unroll
        for (int p = 0; p < P::kRows; ++p) {
          if (q < p || q - p >= kTaps) continue;
#pragma unroll
          for (int l = 0; l < kQuad; ++l) sum[p][l] += weight[q - p].lane[l] * value[l];
        }
      }
      values += kQuads<S>;
      taps += P::kPitch / kQuad;
    }
    S* out = static_cast<S*>(w.target) +
             ((sample * w.to[0] + to_row) * w.to[1] + to_column + column) * w.channels + channel;
#pragma unroll
    for (int p = 0; p < P::kRows; ++p, out += w.to[1] * w.channels) {
      if (to_row + p >= w.to[0]) continue;
      Quad<S> rounded;
#pragma unroll
      for (int l = 0; l < kQuad; ++l) rounded.lane[l] = store_one<S>(sum[p][l]);
      rounded.store(out);
    }
  }
}

template <class S, int kTaps>
void run(const DepthwiseSums& call, void* stream) {
  using P = Tiles<S, kTaps>;
  TileWalk w = {};
  w.channels = int32_t(call.channels);
  for (int d = 0; d < 2; ++d) {
    w.from[d] = int32_t(call.backward ? call.out[d + 1] : call.in[d + 1]);
    w.to[d] = int32_t(call.backward ? call.in[d + 1] : call.out[d + 1]);
    w.pad[d] = int32_t(call.backward ? kTaps - 1 - call.pad[d + 1] : call.pad[d + 1]);
  }
  const int64_t rows = ceil_div(w.to[0], P::kRows), columns = ceil_div(w.to[1], P::kColumns);
  w.parts = int32_t(ceil_div(w.channels, kPositionChannels<S>));
  w.tiles = int32_t(call.samples * call.in[0] * rows * columns);
  // As many blocks as are resident, twice: each lays its weights out once.
  const int64_t groups = ceil_div(int64_t(multiprocessors()) * 8, w.parts);
  w.groups = groups < w.tiles ? int32_t(groups) : w.tiles;
  w.by_column = Divisor<int32_t>(columns);
  w.by_row = Divisor<int32_t>(rows);
  w.turned = call.backward;
  w.source = call.from;
  w.weight = call.weight;
  w.bias = call.bias;
  w.target = call.to;
  launch(&tiles_kernel<S, P>, int64_t(w.parts) * w.groups, P::kThreads, stream, 0, w);
}

}  // namespace

bool depthwise_tiles(const DepthwiseSums& call, void* stream) {
  const bool fits = call.last && is_flat(call) && call.stride[1] == 1 && call.multiplier == 1 &&
                    (call.kernel[1] == 5 || call.kernel[1] == 7);
  if (!fits) return false;
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    if constexpr (sizeof(S) < 8)
      return call.kernel[1] == 5 ? run<S, 5>(call, stream) : run<S, 7>(call, stream);
  });
  return true;
}

}  // namespace cuda
}  // namespace fusedtrain
