// Second stage of sums: blocks of another kernel left shares, in the type that they compute in, and
// these are added up in double, in a fixed order.
//
// Many threads share a sum. With a warp a sum, and no load in advance, this stage took 59 of 276 us
// of a residual branch's scale (bfloat16, [445, 196, 768]), with a thread a sum 96 of 932 us of a
// depthwise layer ([256, 144, 56, 56], channels_last). NVIDIA H200, torch 2.11.0, 2026-11-28.
#pragma once

#include "launch.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kSharesThreads = 256, kMostTeam = 64;

// A workspace, which has room for as many doubles.
template <class S>
__host__ __device__ __forceinline__ typename Compute<S>::T* shares_in(double* workspace) {
  return reinterpret_cast<typename Compute<S>::T*>(workspace);
}

// Sum `at` has `columns` neighbouring shares in each of the groups, which are `of_group` apart.
// Threads side by side have neighbouring sums, of `team` threads each. Sums from `split` on belong
// to `rest`; either place may be null.
template <class S>
__global__ void __launch_bounds__(kSharesThreads)
    add_shares_kernel(const typename Compute<S>::T* shares, S* sums, int64_t count, uint32_t groups,
                      uint32_t columns, int64_t of_group, int team, S* rest, int64_t split) {
  __shared__ double scratch[kSharesThreads];
  const int side = kSharesThreads / team;
  const int64_t at = int64_t(blockIdx.x) * side + threadIdx.x % side;
  S* const to = at < split ? sums : rest;
  const bool exists = at < count && to != nullptr;
  double sum = 0;
  if (exists) {
#pragma unroll 4
    for (uint32_t i = threadIdx.x / side; i < groups * columns; i += team) {
      const uint32_t group = columns == 1 ? i : i / columns;
      sum += shares[group * of_group + at * columns + (i - group * columns)];
    }
  }
  scratch[threadIdx.x] = sum;
  for (int half = kSharesThreads / 2; half >= side; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
  }
  if (threadIdx.x < side && exists)
    to[at < split ? at : at - split] = store_one<S>(typename Compute<S>::T(scratch[threadIdx.x]));
}

template <class S>
void add_shares(const typename Compute<S>::T* shares, S* sums, int64_t count, int64_t groups,
                int64_t columns, int64_t of_group, void* stream, S* rest = nullptr,
                int64_t split = INT64_MAX) {
  int team = 1;
  // equal (<= for <): the speed alone changes
  while (team < kMostTeam && team < groups * columns) team *= 2;
  launch(&add_shares_kernel<S>, ceil_div(count, kSharesThreads / team), kSharesThreads, stream, 0,
         shares, sums, count, uint32_t(groups), uint32_t(columns), of_group, team, rest, split);
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
