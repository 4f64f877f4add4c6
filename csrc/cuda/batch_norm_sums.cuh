// Two sums for each channel, in two stages of fixed order: a block leaves a share of each channel
// that its columns are of, and a second kernel adds up those of a channel in double.
//
// Shares by column would be as large as 8 rows of a 16-bit tensor for each group.
#pragma once

#include "batch_norm.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kMergeThreads = 512;
constexpr int kMergeChannels = 8;  // side by side: 64 bytes of shares
constexpr int kMergeWarps = kMergeThreads / kWarp;

// Shared memory for rows of sums, one a column of the block: of warps, whose threads' lines repeat
// (`across` is a power of two), else of as many threads as there are lines.
template <class T, int kLanes>
using Columns = T[kThreads * kLanes];

__device__ __forceinline__ bool repeats(int across) { return (across & (across - 1)) == 0; }

// Adds up the lanes of all threads of a line, as far as a row goes.
template <int kLanes, class T>
__device__ __forceinline__ void gather(T (&lane)[kLanes], int across, Columns<T, kLanes>& columns) {
  int at = threadIdx.x;
  if (repeats(across)) {
    for (int offset = kWarp / 2; offset >= across; offset /= 2) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) lane[k] += __shfl_down_sync(0xffffffffu, lane[k], offset);
    }
    const int in_warp = threadIdx.x % kWarp;
    if (in_warp >= across) return;
    at = int(threadIdx.x) / kWarp * across + in_warp;
  }
#pragma unroll
  for (int k = 0; k < kLanes; ++k) columns[at * kLanes + k] = lane[k];
}

// Sum over the rows, for a column.
template <int kLanes, class T>
__device__ __forceinline__ T total(const Columns<T, kLanes>& columns, int across, int column) {
  const int rows = repeats(across) ? kWarps : kThreads / across;
  T sum = columns[column];
#pragma unroll 8
  for (int row = 1; row < rows; ++row) sum += columns[row * across * kLanes + column];
  return sum;
}

// The rest of the way, after __syncthreads(), for kSums sums at once: calls f(segment, columns,
// sums) for each segment, in one thread. A segment is what a block has of a channel.
template <int kSums, int kLanes, class T, class F>
__device__ __forceinline__ void for_segments(const Walk& w, Columns<T, kLanes>* columns, F f) {
  const Block block(w);
  const int mine = threadIdx.x;
  for (int i = mine; i < block.columns; i += kThreads) {
#pragma unroll
    for (int n = 0; n < kSums; ++n) columns[n][i] = total<kLanes>(columns[n], w.across, i);
  }
  __syncthreads();
  const int64_t of_channel = w.of_channel.value, first = block.first_column / w.of_channel;
  const int64_t skipped = block.first_column - first * of_channel;
  const int segments = int((skipped + block.columns - 1) / w.of_channel) + 1;
  const int member = mine % w.team, teams = kThreads / w.team;
  for (int base = 0; base < segments; base += teams) {
    const int segment = base + mine / w.team;
    const int64_t from = segment * of_channel - skipped, to = from + of_channel;
    const int begin = from < 0 ? 0 : from < block.columns ? int(from) : block.columns;
    const int end = to < block.columns ? int(to) : block.columns;
    T sum[kSums] = {};
    for (int i = begin + member; i < end; i += w.team) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) sum[n] += columns[n][i];
    }
    for (int offset = w.team / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) sum[n] += __shfl_down_sync(0xffffffffu, sum[n], offset);
    }
    if (member == 0 && segment < segments) f(segment, end - begin, sum);
  }
}

// Shares are [2, groups, share_width]. Along the lines either the part of the lines or the channel
// goes up by one from a segment to the next, or both do: so their sum is a place of its own.
__host__ __device__ __forceinline__ int64_t share_width(const Walk& w) {
  return w.parts.value + w.channels;
}
// equal (times two #1): the workspace only gets larger
inline int64_t shares_of(const Walk& w) { return 2 * w.groups * share_width(w); }

// Where a block leaves the first number of its share of a segment.
__device__ __forceinline__ double* share_of(const Walk& w, double* shares, int segment) {
  const Block block(w);
  return shares + block.group * share_width(w) + block.part + block.first_column / w.of_channel +
         segment;
}

struct Pair {
  double a, b;
};

// In the first kMergeChannels threads: a and b added up over the threads of a channel.
__device__ __forceinline__ Pair merge(double a, double b) {
  __shared__ Pair scratch[kMergeWarps][kMergeChannels];
#pragma unroll
  for (int offset = kWarp / 2; offset >= kMergeChannels; offset /= 2) {
    a += __shfl_down_sync(0xffffffffu, a, offset);
    b += __shfl_down_sync(0xffffffffu, b, offset);
  }
  const int lane = threadIdx.x % kWarp;
  if (lane < kMergeChannels) scratch[threadIdx.x / kWarp][lane] = {a, b};
  __syncthreads();
  Pair sum = {0, 0};
  if (threadIdx.x < kMergeChannels) {
#pragma unroll
    for (int warp = 0; warp < kMergeWarps; ++warp) {
      sum.a += scratch[warp][lane].a;
      sum.b += scratch[warp][lane].b;
    }
  }
  return sum;
}

// Calls f(place, group, columns) for each of a thread's shares of a channel.
template <class F>
__device__ __forceinline__ void for_shares(const Walk& w, int64_t channel, F f) {
  const int64_t first = channel * w.of_channel.value, end = first + w.of_channel.value;
  const int64_t part = first / w.block_columns, parts = (end - 1) / w.block_columns - part + 1;
  const uint32_t count = uint32_t(w.groups * parts);  // at most the blocks of the grid
#pragma unroll 4
  // equal (-= for +=): 65 shares need more multiprocessors than the emulator's two
  for (uint32_t i = threadIdx.x / kMergeChannels; i < count; i += kMergeThreads / kMergeChannels) {
    const int64_t group = i / uint32_t(parts), p = part + i - group * parts;
    const int64_t from = p * w.block_columns.value, to = from + w.block_columns.value;
    f(group * share_width(w) + p + channel, group,
      int((to < end ? to : end) - (from > first ? from : first)));
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
