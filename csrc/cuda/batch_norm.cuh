// How the kernels of batch norm walk over a tensor of rows x channels x inner.
//
// A line is a sequence of vectors whose lanes keep their channels, so that a thread holds what
// belongs to these in registers. Where `inner` is long (channels first) a line is a channel; where
// it is short (channels last) it is a vector of each row. A block walks over a share of a few lines
// side by side.
#pragma once

#include <type_traits>

#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kBlocksPerMultiprocessor = 8;  // two to four times what fits: evens out the end
// Vectors that a thread takes at least, where there are enough: what a block begins and ends with
// costs as much as a few of them. And at most: so many floats are added in float.
constexpr int kFewestVectors = 4, kMostVectors = 256;

// Division by a number that is known beforehand, of numbers from 0: 8 instructions, where a
// division of 64 bits takes 70, more than all else in most of these kernels.
struct Divisor {
  int64_t value;
  uint64_t magic;  // 2^(62 + shift) / value, rounded up: exact for numbers below 2^62
  int shift;       // 2^shift >= value

  Divisor() = default;
  explicit Divisor(int64_t value) : value(value), shift(0) {
    while (int64_t(1) << shift < value) ++shift;
    magic = uint64_t((((unsigned __int128)(1) << (62 + shift)) + value - 1) / value);
  }
};

__device__ __forceinline__ int64_t operator/(int64_t a, const Divisor& d) {
  return int64_t(__umul64hi(uint64_t(a) << 2, d.magic) >> d.shift);
}

struct Walk {
  int64_t channels;
  int64_t width;                    // columns of all lines; a line has one for each lane
  Divisor of_channel;               // neighbouring columns of a channel
  int64_t line_pitch;               // elements from a line to the next
  int64_t vectors;                  // of a line
  Divisor run;                      // vectors of a line that follow each other without a gap
  int64_t step, step_in_run, wrap;  // elements and vectors to a thread's next vector
  Divisor parts;                    // of lines, and ...
  int64_t groups, per_group;        // ... of the vectors of a line; a block has one each
  Divisor of_sample;                // elements
  int across;                       // lines of a block: a power of two
  bool wide;                        // 16 bytes at a time
  bool adjacent;                    // the values of a vector's channels are neighbours and aligned
};

// Lines side by side in a block: enough for whole cache lines, few of them left over.
inline int across_for(int64_t lines, int fewest) {
  int best = 1;
  while (best < kWarp && best < lines) best *= 2;
  for (int fewer = best / 2; fewer >= fewest; fewer /= 2)
    if (ceil_div(lines, fewer) * fewer < ceil_div(lines, best) * best) best = fewer;
  return best;
}

// Of at least one element. `lanes` of 16 bytes; `sums`: the blocks leave shares, one for each group
// and column.
inline Walk walk_for(const BatchNorm& n, int lanes, bool aligned, bool sums) {
  Walk w = {};
  const int64_t pitch = n.channels * n.inner;
  w.wide = aligned && n.inner % lanes == 0;
  bool columns = n.channels > 1 && n.inner / (w.wide ? lanes : 1) < kWarp;
  // Where no shares are left, columns may also be the way to whole vectors.
  columns |= aligned && !w.wide && !sums && pitch % lanes == 0 && n.rows >= 2 * kFewestVectors;
  if (columns) w.wide = aligned && pitch % lanes == 0;
  if (!w.wide) lanes = 1;

  const int64_t lines = columns ? pitch / lanes : n.channels;
  w.channels = n.channels;
  w.width = lines * lanes;
  w.of_channel = Divisor(columns ? n.inner : lanes);
  w.line_pitch = columns ? lanes : n.inner;
  const int64_t run = columns ? 1 : n.inner / lanes;
  w.run = Divisor(run);
  w.vectors = n.rows * run;
  w.of_sample = Divisor(n.rows_a_sample * pitch);
  w.across = columns ? across_for(lines, w.wide ? 8 : 16) : 1;
  w.parts = Divisor(ceil_div(lines, w.across));

  const int64_t threads = kThreads / w.across, steps = ceil_div(w.vectors, threads);
  const int64_t most = int64_t(multiprocessors()) * kBlocksPerMultiprocessor;
  int64_t groups = ceil_div(most, w.parts.value);
  if (groups > ceil_div(steps, kFewestVectors)) groups = ceil_div(steps, kFewestVectors);
  if (groups < ceil_div(steps, kMostVectors)) groups = ceil_div(steps, kMostVectors);
  w.per_group = ceil_div(steps, groups) * threads;
  w.groups = ceil_div(w.vectors, w.per_group);
  w.step_in_run = threads % run;
  w.step = threads / run * pitch + w.step_in_run * lanes;
  w.wrap = pitch - run * lanes;
  return w;
}

// A thread's way through its line.
template <int kLanes>
struct Position {
  int64_t first_column;  // of the block
  int64_t group;
  int64_t column;  // of lane 0
  int64_t at;      // the element that is next
  int64_t in_run;
  int in_group;  // vectors of a line in this group
  int left;      // of them this thread's

  __device__ __forceinline__ explicit Position(const Walk& w) {
    group = int64_t(blockIdx.x) / w.parts;
    const int64_t line = (blockIdx.x - group * w.parts.value) * w.across;
    first_column = line * kLanes;
    column = first_column + threadIdx.x % w.across * kLanes;
    const bool exists = column < w.width;
    if (!exists) column = 0;
    const int64_t begin = group * w.per_group, thread = threadIdx.x / w.across;
    in_group = int(w.vectors - begin < w.per_group ? w.vectors - begin : w.per_group);
    const int threads = kThreads / w.across;
    left = exists && thread < in_group ? int((in_group - thread + threads - 1) / threads) : 0;
    const int64_t row = (begin + thread) / w.run;
    in_run = begin + thread - row * w.run.value;
    at = column / kLanes * w.line_pitch + row * (w.wrap + w.run.value * kLanes) + in_run * kLanes;
  }

  // The element of the vector that is next, and on to the one after it.
  __device__ __forceinline__ int64_t next(const Walk& w) {
    const int64_t here = at;
    at += w.step;
    in_run += w.step_in_run;
    if (in_run >= w.run.value) {
      in_run -= w.run.value;
      at += w.wrap;
    }
    return here;
  }
};

// Of vectors of values, one a channel: those of a vector's lanes.
template <int kLanes>
struct Channels {
  int64_t first;
  int after[kLanes];  // channel of a lane - first
  bool adjacent;

  __device__ __forceinline__ Channels(const Walk& w, int64_t column) {
    first = column / w.of_channel;
    int64_t in_channel = column - first * w.of_channel.value;
    int channel = 0;
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      after[k] = channel;
      if (++in_channel == w.of_channel.value) {
        in_channel = 0;
        ++channel;
      }
    }
    adjacent = w.adjacent;
  }

  template <class T>
  __device__ __forceinline__ void get(const T* values, T (&lane)[kLanes]) const {
    constexpr int kPiece = Vec<T>::kLanes;
    if constexpr (kLanes % kPiece == 0) {
      if (adjacent) {
#pragma unroll
        for (int k = 0; k < kLanes; k += kPiece) {
          Vec<T> piece;
          piece.load(values + first + k);
#pragma unroll
          for (int i = 0; i < kPiece; ++i) lane[k + i] = piece.lane[i];
        }
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < kLanes; ++k) lane[k] = values[first + after[k]];
  }
};

// The pointers to elements of a call, and to vectors of what is computed in.
template <class S>
struct Tensors {
  using T = typename Compute<S>::T;
  const S* x;
  const S* other;  // the residual, or what was saved in its place
  const S* grad;
  S* out;
  S* grad_residual;
  const T *branch_scale, *weight, *bias, *mean, *invstd;

  explicit Tensors(const BatchNorm& n)
      : x(static_cast<const S*>(n.x)),
        other(nullptr),
        grad(nullptr),
        out(nullptr),
        grad_residual(nullptr),
        branch_scale(static_cast<const T*>(n.branch_scale)),
        weight(static_cast<const T*>(n.weight)),
        bias(static_cast<const T*>(n.bias)),
        mean(static_cast<const T*>(n.mean)),
        invstd(static_cast<const T*>(n.invstd)) {}

  Walk walk(const BatchNorm& n, bool sums) const {
    // No vectors of doubles: fewer kernels to compile, for a type that nobody trains in.
    const bool wide = sizeof(S) < 8 && aligned(x, other, grad, out, grad_residual);
    Walk w = walk_for(n, 16 / sizeof(S), wide, sums);
    w.adjacent = w.wide && w.of_channel.value == 1 && aligned(weight, bias, mean, invstd);
    return w;
  }

  // branch_scale of the sample that an element is of.
  __device__ __forceinline__ T scale_of(const Walk& w, int64_t at) const {
    return branch_scale == nullptr ? T(1) : branch_scale[at / w.of_sample];
  }
};

// z = (x - mean) scale + bias, for the lanes of a vector.
template <class T, int kLanes>
struct Affine {
  T mean[kLanes], scale[kLanes], bias[kLanes];

  template <class S>
  __device__ __forceinline__ Affine(const Tensors<S>& t, const Channels<kLanes>& channels) {
    channels.get(t.mean, mean);
    channels.get(t.invstd, scale);
    T weight[kLanes];
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      weight[k] = T(1);
      bias[k] = T(0);
    }
    if (t.weight != nullptr) channels.get(t.weight, weight);
    if (t.bias != nullptr) channels.get(t.bias, bias);
#pragma unroll
    for (int k = 0; k < kLanes; ++k) scale[k] *= weight[k];
  }

  __device__ __forceinline__ T operator()(T x, int k) const {
    return (x - mean[k]) * scale[k] + bias[k];
  }
};

// Calls f with each vector of a thread, while the next one is on its way: as many bytes in flight
// as two vectors at a time have, with one copy of what f does.
template <class Loaded, class S, int kLanes, class F>
__device__ __forceinline__ void for_vectors(const Walk& w, const Tensors<S>& t, Position<kLanes>& p,
                                            F f) {
  Loaded loaded, next;
  if (p.left > 0) loaded.load(w, t, p.next(w));
#pragma unroll 1
  for (; p.left > 0; --p.left) {
    if (p.left > 1) next.load(w, t, p.next(w));
    f(loaded);
    loaded = next;
  }
}

// Calls f with a null pointer of the stored type and whether vectors are wide.
template <class F>
void by_kind(Dtype dtype, F f) {
  by_dtype(dtype, [&](auto* null) {
    f(null, std::false_type());
    if constexpr (sizeof *null < 8) f(null, std::true_type());
  });
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
