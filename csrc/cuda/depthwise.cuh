// Depthwise convolutions: the walk over positions that the forward and the gradient of the input
// share.
//
// Both are sums of products over the taps of a kernel: an output sees inputs, and an input sees the
// gradients of the outputs that saw it. With a stride of s the latter are every s-th tap alone, of
// which the first one depends on the input's position: no zeros are read or multiplied.
#pragma once

#include "../ops/depthwise.h"
#include "divisor.cuh"
#include "launch.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {

// The forward, or (`backward`) the gradient of the input.
struct DepthwiseSums : Depthwise {
  bool backward;
  const void* from;
  const void* weight;
  const void* bias;  // or null
  void* to;
};

// Runs kernels that keep a strip of rows a thread; false where there is none for the call.
bool depthwise_strips(const DepthwiseSums& call, void* stream);

// The same for planes and kernels of 3, 5 or 7 squared with a stride of 1 or 2.
bool depthwise_planes(const DepthwiseSums& call, void* stream);

// The same for wide channels_last and kernels of 5 or 7 squared with a stride of 1.
bool depthwise_tiles(const DepthwiseSums& call, void* stream);

void depthwise_weight(const DepthwiseBackward& call, void* stream);

// The same for planes, and for channels_last as above; no shares where there is none for the call.
bool depthwise_weight_planes(const DepthwiseBackward& call, void* stream);
bool depthwise_weight_tiles(const DepthwiseBackward& call, void* stream);
int64_t depthwise_planes_shares(const DepthwiseBackward& call);
int64_t depthwise_tiles_shares(const DepthwiseBackward& call);

namespace {

constexpr int kThreads = 256;

// From sm_100 on the compiler takes up to 168 registers, and with two blocks it would spill some.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kTileBlocks = 1;
#else
constexpr int kTileBlocks = 2;
#endif

// Rows and columns of `to` that a thread has.
struct Tile {
  int rows, columns;
};

// Reads every position of `to`, a tile at a time, in the order of its memory.
template <class I>
struct Walk {
  bool last;
  I multiplier, channels, from_channels, samples;  // channels of `to`
  I to[3], from[3], kernel[3], stride[3], dilation[3], pad[3], taps;
  I tap_step[3], from_step[3];  // of neighbouring taps that a position of `to` sees
  I shift, side;                // rows and columns of the first tile that lie in front of `to`
  I count;                      // threads; where they are wide, threads of a vector of channels
  I vectors, lanes, groups;     // of channels: all, of a block, blocks that differ in nothing else
  Divisor<I> by_channel, by_column, by_strip, by_depth, by_tap, by_multiplier;
  const void* source;
  const void* weight;
  const void* bias;
  void* target;

  Walk(const DepthwiseSums& call, Tile tile) : last(call.last) {
    const bool back = call.backward;
    multiplier = I(call.multiplier);
    channels = I(back ? call.channels : call.out_channels());
    from_channels = I(back ? call.out_channels() : call.channels);
    samples = I(call.samples);
    for (int d = 0; d < 3; ++d) {
      to[d] = I(back ? call.in[d] : call.out[d]);
      from[d] = I(back ? call.out[d] : call.in[d]);
      kernel[d] = I(call.kernel[d]);
      stride[d] = I(call.stride[d]);
      dilation[d] = I(call.dilation[d]);
      pad[d] = I(call.pad[d]);
      int64_t a = call.stride[d], b = call.dilation[d];
      while (b) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
      }
      tap_step[d] = back ? I(call.stride[d] / a) : 1;
      from_step[d] = back ? -I(call.dilation[d] / a) : I(call.dilation[d]);
    }
    taps = I(call.taps());
    shift = back && tile.rows > 1 ? I(call.pad[1] % call.stride[1]) : 0;
    side = back && tile.columns > 1 ? I(call.pad[2] % call.stride[2]) : 0;
    const int64_t strips = ceil_div(to[1] + shift, tile.rows);
    const int64_t across = ceil_div(to[2] + side, tile.columns);
    count = I(samples * to[0] * strips * across);
    by_channel = Divisor<I>(channels);
    by_column = Divisor<I>(across);
    by_strip = Divisor<I>(strips);
    by_depth = Divisor<I>(to[0]);
    by_tap = Divisor<I>(taps);
    by_multiplier = Divisor<I>(multiplier);
    vectors = lanes = groups = 0;
    source = call.from;
    weight = call.weight;
    bias = call.bias;
    target = call.to;
  }
};

// Row (or column) p of a strip sees row q of what it reads with tap(p, q) of the kernel.
template <int kTaps_, int kStride, int kStrip, bool kBackward>
struct Pattern {
  static constexpr int kTaps = kTaps_;
  static constexpr int kBefore = (kTaps - 1) / kStride;  // rows that the first one sees, backward
  static constexpr int kSources =
      kBackward ? (kStrip - 1) / kStride + kBefore + 1 : (kStrip - 1) * kStride + kTaps;
  static constexpr int kColumns = kBackward ? kBefore + 1 : kTaps;

  static __device__ __forceinline__ constexpr int tap(int p, int q) {
    return kBackward ? p + kStride * (kBefore - q) : q - p * kStride;
  }
  // Row 0 of those that the strip from row `first` on reads.
  template <class I>
  static __host__ __device__ __forceinline__ constexpr I source(I first, I pad) {
    return kBackward ? (first + pad) / kStride - kBefore : first * kStride - pad;
  }
};

// The taps of a dimension that a position of `to` sees: `count` of them, from `tap` at `source` on.
// kStride: where the dilation is 1 and the stride is known; else 0.
template <class I, bool kBackward, int kStride>
struct Line {
  I tap, tap_step, source, source_step, count;

  __device__ __forceinline__ Line(const Walk<I>& w, int d, I position) {
    if constexpr (!kBackward) {
      tap = 0;
      tap_step = 1;
      source = position * (kStride ? kStride : w.stride[d]) - w.pad[d];
      source_step = kStride ? 1 : w.dilation[d];
      count = w.kernel[d];
    } else if constexpr (kStride > 0) {
      const I padded = position + w.pad[d];
      tap = padded % kStride;
      tap_step = kStride;
      source = padded / kStride;
      source_step = -1;
      count = (w.kernel[d] - tap + kStride - 1) / kStride;
    } else {
      const I padded = position + w.pad[d], stride = w.stride[d];
      const I step = w.dilation[d] % stride;
      I rest = padded % stride;
      tap = 0;
      tap_step = w.tap_step[d];
      for (; rest != 0 && tap < w.kernel[d]; ++tap) rest -= rest < step ? step - stride : step;
      source = (padded - tap * w.dilation[d]) / stride;
      source_step = w.from_step[d];
      count = rest == 0 && tap < w.kernel[d] ? (w.kernel[d] - tap - 1) / tap_step + 1 : 0;
    }
  }
};

// A thread's place in `to`: `strip` is a strip of rows, `column` one of columns.
template <class I>
struct Spot {
  I sample, channel, depth, strip, column;

  // `at`: a thread of those that the walk counts; `known`: its channel, in a wide walk.
  template <bool kWide>
  static __device__ __forceinline__ Spot make(const Walk<I>& w, I at, I known) {
    Spot s;
    s.channel = known;
    if (!kWide && w.last) s.channel = w.by_channel.digit(at);
    s.column = w.by_column.digit(at);
    s.strip = w.by_strip.digit(at);
    s.depth = w.by_depth.digit(at);
    if (!kWide && !w.last) s.channel = w.by_channel.digit(at);
    s.sample = at;
    return s;
  }
};

// A channel of a sample: element 0, and the distance of neighbouring columns.
template <class S, class I>
struct Volume {
  S* start;
  I step;
  const I* size;

  __device__ __forceinline__ Volume(S* data, bool last, I sample, I channels, I channel,
                                    const I (&size)[3])
      : step(last ? channels : 1), size(size) {
    const I all = size[0] * size[1] * size[2];
    start = data + (last ? sample * all * channels + channel : (sample * channels + channel) * all);
  }
  __device__ __forceinline__ S* at(I depth, I row, I column) const {
    return start + ((depth * size[1] + row) * size[2] + column) * step;
  }
};

template <class I>
__device__ __forceinline__ bool within(I place, I size) {
  return place >= 0 && place < size;
}

// The rows of a plane that a thread's tile sees, P::kAhead of them under way together.
template <class P, class S>
struct Window {
  static constexpr int kRows = P::Rows::kSources, kColumns = P::Columns::kSources;
  const S* line;
  int32_t first_row, rows, step;
  bool exists[kColumns];
  S loaded[P::kAhead][kColumns];

  __device__ __forceinline__ Window(const S* plane, const int32_t (&size)[3], int32_t row,
                                    int32_t column)
      : first_row(row), rows(size[1]), step(size[2]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) exists[c] = within(column + c, size[2]);
    // Rows outside are loaded from the nearest one, and left out of the sums: so loads depend on
    // the conditions of columns alone.
    // equal (<= for <): the same row
    const int32_t begin = row < 0 ? 0 : (row < rows - 1 ? row : rows - 1);
    line = plane + begin * step + column;
#pragma unroll
    for (int q = 0; q < P::kAhead - 1; ++q) load(q);
  }

  __device__ __forceinline__ void load(int q) {
    // equal (> for >=): nobody reads the row
    if (q >= kRows) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      loaded[q % P::kAhead][c] = exists[c] ? line[c] : store_one<S>(0);
    if (within(first_row + q, rows - 1)) line += step;
  }

  // add(p, j, k, t, value) for each output [p, j] of the tile and each tap [k, t] of it.
  template <class F>
  __device__ __forceinline__ void walk(F add) {
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      load(q + P::kAhead - 1);
      if (!within(first_row + q, rows)) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const auto value = load_one(loaded[q % P::kAhead][c]);
#pragma unroll
        for (int p = 0; p < P::kTile.rows; ++p) {
          const int k = P::Rows::tap(p, q);
          if (k < 0 || k >= P::kTaps) continue;
#pragma unroll
          for (int j = 0; j < P::kTile.columns; ++j) {
            const int t = P::Columns::tap(j, c);
            if (t >= 0 && t < P::kTaps) add(p, j, k, t, value);
          }
        }
      }
    }
  }
};

// Weights as a thread reads them: its channel's, or (wide) those of a block's channels, laid out in
// shared memory as taps x channels, with a vector between two taps: they are in different banks.
// All threads of a block must make one.
template <class S, bool kWide, class I>
struct Weights {
  using V = Vec<S, kWide>;
  const S* start = nullptr;
  I step = 1;

  __device__ __forceinline__ Weights(const Walk<I>& w, I group, I lane) {
    if constexpr (kWide) {
      FT_DYNAMIC_SHARED(memory);
      S* const laid = reinterpret_cast<S*>(memory);
      const I first = group * w.lanes * V::kLanes;
      step = (w.lanes + 1) * V::kLanes;
      const I left = w.channels - first, most = w.lanes * V::kLanes;
      const I channels = left < most ? left : most;
      const S* const from = static_cast<const S*>(w.weight) + first * w.taps;
      for (I i = threadIdx.x; i < channels * w.taps; i += kThreads) {
        I channel = i;
        const I tap = w.by_tap.digit(channel);
        laid[tap * step + channel] = from[i];
      }
      __syncthreads();
      start = laid + lane * V::kLanes;
    }
  }
  __device__ __forceinline__ void choose(const Walk<I>& w, I channel) {
    if constexpr (!kWide) start = static_cast<const S*>(w.weight) + channel * w.taps;
  }
  __device__ __forceinline__ V operator[](I tap) const {
    V v;
    v.load(start + tap * step);
    return v;
  }
};

template <class V, class S, class I>
__device__ __forceinline__ V first_sum(const Walk<I>& w, I channel) {
  V sum;
#pragma unroll
  for (int l = 0; l < V::kLanes; ++l)
    sum.lane[l] =
        w.bias == nullptr ? typename V::T(0) : load_one(static_cast<const S*>(w.bias)[channel + l]);
  return sum;
}

// A thread's number among those that the walk counts, and its vector of channels in a wide one.
template <class S, bool kWide, class I>
struct Thread {
  I group = 0, lane = 0, at;
  bool exists;

  __device__ __forceinline__ explicit Thread(const Walk<I>& w) {
    if constexpr (kWide) {
      const I slots = kThreads / w.lanes, slot = I(threadIdx.x) / w.lanes;
      lane = I(threadIdx.x) - slot * w.lanes;
      // equal (the next block): lanes, or blocks, only change places
      group = I(blockIdx.x) % w.groups;
      at = I(blockIdx.x) / w.groups * slots + slot;
      exists = slot < slots && at < w.count && group * w.lanes + lane < w.vectors;
    } else {
      at = I(blockIdx.x) * kThreads + I(threadIdx.x);
      exists = at < w.count;
    }
  }
  __device__ __forceinline__ I channel(const Walk<I>& w) const {
    return (group * w.lanes + lane) * Vec<S, kWide>::kLanes;
  }
};

// Vectors of channels of a block, in parts of about the same size; 0 where weights or channels
// cannot be had as vectors.
template <class S>
int64_t wide_lanes(const DepthwiseSums& call) {
  constexpr int64_t kMost = 16, kShared = 48 << 10, kBytes = 16;
  const bool fits = call.last && call.multiplier == 1 && call.channels % Vec<S>::kLanes == 0 &&
                    aligned(static_cast<const char*>(call.from), static_cast<char*>(call.to));
  // equal (times two): the speed alone changes
  const int64_t room = kShared / (kBytes * call.taps()) - 1;
  if (!fits || room < 1) return 0;
  const int64_t vectors = call.channels / Vec<S>::kLanes;
  return ceil_div(vectors, ceil_div(vectors, room < kMost ? room : kMost));
}

// Starts a kernel whose threads have a tile of a channel.
template <class I>
void launch_narrow(void (*kernel)(Walk<I>), Tile tile, const DepthwiseSums& call, void* stream) {
  Walk<I> w(call, tile);
  w.count *= w.channels;
  launch(kernel, ceil_div(w.count, kThreads), kThreads, stream, 0, w);
}

// Starts a kernel whose threads have a tile of a vector of channels.
template <class S, class I>
void launch_wide(void (*kernel)(Walk<I>), Tile tile, int64_t lanes, const DepthwiseSums& call,
                 void* stream) {
  Walk<I> w(call, tile);
  w.lanes = I(lanes);
  w.vectors = I(call.channels / Vec<S>::kLanes);
  w.groups = I(ceil_div(w.vectors, lanes));
  // equal (times two): blocks beyond the last group do nothing
  launch(kernel, ceil_div(w.count, kThreads / lanes) * w.groups, kThreads, stream,
         size_t(16 * (lanes + 1) * call.taps()), w);
}

// Whether positions, also those that lie in the padding, fit into 32 bits.
inline bool is_small(const Depthwise& call) {
  constexpr int64_t kMost = int64_t(1) << 29;
  // equal (<= for <, times two #1): the speed alone changes
  bool small = call.samples * call.channels * call.inputs() < kMost &&
               call.samples * call.out_channels() * call.outputs() < kMost &&
               call.out_channels() * call.taps() < kMost;
  for (int d = 0; d < 3; ++d)
    small = small && call.stride[d] < kMost && call.dilation[d] < kMost &&
            // equal (+ for -, times two): the speed alone changes
            (call.kernel[d] - 1) * call.dilation[d] < kMost && call.pad[d] < kMost &&
            // equal (times two, <= for <): the speed alone changes
            call.out[d] * call.stride[d] < kMost;
  return small;
}

// Whether a kernel has one slice, of which each image has one, too, and neither is empty.
inline bool is_flat(const Depthwise& call) {
  // equal (one more #2): a stride of 2 has the same outputs, and strips the others
  return call.kernel[0] == 1 && call.stride[0] == 1 && call.pad[0] == 0 &&
         call.in[0] == call.out[0] && call.inputs() * call.outputs() > 0;
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
