// How the kernels of batch norm walk over a tensor of rows x channels x inner.
//
// A line is a sequence of vectors whose lanes keep their channels, so that a thread holds what
// belongs to these in registers. Where `inner` is long and a multiple of a vector (channels first)
// a line is a channel. Else it is a vector of each row, at the same place in all of them: where
// `inner` is short (channels last), and where planes begin at odd addresses, but rows do not (14x14
// and 7x7 in 16 bits). A block walks over a share of a few lines side by side.
#pragma once

#include "launch.cuh"
#include "reduce.cuh"
#include "../ops/batch_norm.h"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
// One to two times what fits. With 8 a block's beginning, its end and the merging of shares weigh
// more: forward and backward of BN + SiLU (bfloat16, channels_last, NVIDIA H200, 2026-11-28) took
// 330 us with 8 and 309 with 4 at [256, 64, 56, 56], 198 and 176 at [128, 240, 28, 28].
constexpr int kBlocksPerMultiprocessor = 4;
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
    // equal (<= for <): the quotient is exact below 2^61 all the same
    while (int64_t(1) << shift < value) ++shift;
    // equal (+ for -): the quotient is exact below 2^61 all the same
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
  int across;                       // lines of a block: a power of two, unless it has all vectors
  Divisor block_columns;            // of these lines
  int team;                         // threads that add up a block's columns of a channel
  bool wide;                        // 16 bytes at a time
  bool adjacent;                    // the values of a vector's channels are neighbours and aligned
};

// Lines side by side in a block: enough for whole cache lines, few of them left over.
inline int across_for(int64_t lines, int fewest) {
  int best = 1;
  while (best < kWarp && best < lines) best *= 2;  // equal (never): the speed alone changes
  // equal (> for >=): the speed alone changes
  for (int fewer = best / 2; fewer >= fewest; fewer /= 2)
    // equal (times two #1): the speed alone changes
    if (ceil_div(lines, fewer) * fewer < ceil_div(lines, best) * best) best = fewer;
  return best;
}

// Walk over at least one element. `lanes` of 16 bytes. `whole`: a block has that many lines, and
// all of their vectors.
inline Walk walk_for(const BatchNorm& n, int lanes, bool aligned, int whole = 0) {
  Walk w = {};
  const int64_t pitch = n.channels * n.inner;
  w.wide = aligned && n.inner % lanes == 0;
  // equal (<= for <, >= for >): the speed alone changes
  bool columns = n.channels > 1 && n.inner / (w.wide ? lanes : 1) < kWarp;
  // Columns may also be the way to whole vectors. Fewer rows leave most threads without one.
  columns |= aligned && !w.wide && pitch % lanes == 0 && n.rows >= 2 * kFewestVectors;
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
  w.across = whole > 0 ? whole : columns ? across_for(lines, w.wide ? 8 : 16) : 1;
  w.block_columns = Divisor(w.across * lanes);
  w.team = 1;  // of four columns or more each
  while (w.team < kWarp && w.team * 4 < w.of_channel.value) w.team *= 2;
  w.parts = Divisor(ceil_div(lines, w.across));

  const int64_t threads = kThreads / w.across, steps = ceil_div(w.vectors, threads);
  const int64_t most = int64_t(multiprocessors()) * kBlocksPerMultiprocessor;
  // No more blocks than that: a few blocks of another round take as long as a whole one.
  int64_t groups = most / w.parts.value;
  if (groups < 1) groups = 1;
  if (groups > ceil_div(steps, kFewestVectors)) groups = ceil_div(steps, kFewestVectors);
  if (groups < ceil_div(steps, kMostVectors)) groups = ceil_div(steps, kMostVectors);
  if (whole > 0) groups = 1;  // equal (>= for >): the speed alone changes
  w.per_group = ceil_div(steps, groups) * threads;
  w.groups = ceil_div(w.vectors, w.per_group);
  w.step_in_run = threads % run;
  w.step = threads / run * pitch + w.step_in_run * lanes;
  w.wrap = pitch - run * lanes;
  return w;
}

// A block: a group of vectors of a part of the lines.
struct Block {
  int64_t group, part;
  int64_t first_column;
  int columns;

  __device__ __forceinline__ explicit Block(const Walk& w) {
    group = int64_t(blockIdx.x) / w.parts;
    part = blockIdx.x - group * w.parts.value;
    first_column = part * w.block_columns.value;
    const int64_t left = w.width - first_column;
    columns = int(left < w.block_columns.value ? left : w.block_columns.value);
  }
  // Vectors of a line.
  __device__ __forceinline__ int vectors(const Walk& w) const {
    const int64_t left = w.vectors - group * w.per_group;
    return int(left < w.per_group ? left : w.per_group);
  }
};

// A thread's way through its line.
template <int kLanes>
struct Position {
  int64_t column;  // of lane 0; the block's first one where there is no line for the thread
  int64_t at;      // the element that is next
  int64_t in_run;
  int left;  // vectors

  __device__ __forceinline__ explicit Position(const Walk& w) {
    const Block block(w);
    const int threads = kThreads / w.across, thread = threadIdx.x / w.across;
    const int in_block = threadIdx.x % w.across * kLanes, vectors = block.vectors(w);
    const bool exists = in_block < block.columns && thread < threads;
    column = block.first_column + (exists ? in_block : 0);
    left = exists && thread < vectors ? (vectors - thread + threads - 1) / threads : 0;
    const int64_t begin = block.group * w.per_group + thread, row = begin / w.run;
    in_run = begin - row * w.run.value;
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

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
