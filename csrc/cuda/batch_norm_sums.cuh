// Two sums for each channel, in two stages of fixed order: blocks leave shares by column, and a
// second kernel adds up those of a channel in double.
#pragma once

#include "batch_norm.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kMergeThreads = 512;
constexpr int kMergeChannels = 8;  // side by side: 64 bytes of shares
constexpr int kMergeWarps = kMergeThreads / kWarp;

// Shared memory for what the warps of a block have in each of its columns.
template <class T, int kLanes>
using Columns = T[kWarps][kWarp * kLanes];

// Adds up the lanes of all threads of a line, as far as a warp goes.
template <int kLanes, class T>
__device__ __forceinline__ void gather(T (&lane)[kLanes], int across, Columns<T, kLanes>& columns) {
  for (int offset = kWarp / 2; offset >= across; offset /= 2) {
#pragma unroll
    for (int k = 0; k < kLanes; ++k) lane[k] += __shfl_down_sync(0xffffffffu, lane[k], offset);
  }
  const int in_warp = threadIdx.x % kWarp;
  if (in_warp < across) {
#pragma unroll
    for (int k = 0; k < kLanes; ++k) columns[threadIdx.x / kWarp][in_warp * kLanes + k] = lane[k];
  }
}

// The rest of the way, after __syncthreads().
template <int kLanes, class T>
__device__ __forceinline__ T total(const Columns<T, kLanes>& columns, int column) {
  T sum = columns[0][column];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) sum += columns[warp][column];
  return sum;
}

// Shares are [2, groups, width].
inline int64_t shares_of(const Walk& w) { return 2 * w.groups * w.width; }

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

// Calls f(place, group) for each of a thread's shares of a channel.
template <class F>
__device__ __forceinline__ void for_shares(const Walk& w, int64_t channel, F f) {
  for (int64_t i = threadIdx.x / kMergeChannels; i < w.groups * w.of_channel.value;
       i += kMergeThreads / kMergeChannels) {
    const int64_t group = i / w.of_channel;
    f(group * w.width + channel * w.of_channel.value + (i - group * w.of_channel.value), group);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
