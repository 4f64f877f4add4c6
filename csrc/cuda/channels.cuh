// The walks over a tensor with channels that scaled sums and bias + activation + dropout share, and
// the sums of their blocks.
//
// Where `inner` is long (channels first) a block takes a part of one sample and channel; where it
// is short (channels last, or few elements a plane) a thread keeps its columns, and the threads of
// a block that have the same ones share the rows. Sums meet in the block, and blocks leave shares
// that a second kernel adds up: their order is fixed for a device.
#pragma once

#include "../ops/channels.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "shares.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kBlocksPerMultiprocessor = 16;

// How a call is cut into blocks: block b works on part b % parts (samples x channels, or x groups
// of columns), and on group b / parts of what is summed over.
struct Plan {
  bool columns, wide;
  int across;  // threads side by side, of the columns
  int64_t parts, groups;
  int64_t per_group;  // vectors of a part, or rows
  int64_t shares;     // of a group: samples x channels, or x columns
};

// `together`: steps of a thread whose loads are under way together.
template <class S>
Plan plan_for(const Channels& c, bool aligned, int together) {
  Plan plan;
  plan.across = 0;
  constexpr int kLanes = Vec<S>::kLanes;
  const int64_t most = int64_t(multiprocessors()) * kBlocksPerMultiprocessor;
  // equal (<= for <): pointers of doubles count as not aligned
  plan.wide = aligned && c.inner % kLanes == 0 && sizeof(S) < 8;
  // equal (>= for >): the speed alone changes
  plan.columns = c.inner / (plan.wide ? kLanes : 1) < kWarp && c.channels > 1;
  int64_t steps;
  if (plan.columns) {
    plan.wide = aligned && c.channels * c.inner % kLanes == 0 && sizeof(S) < 8;
    const int64_t vectors = c.channels * c.inner / (plan.wide ? kLanes : 1);
    const int64_t parts = ceil_div(vectors, kWarp);
    plan.across = int(ceil_div(vectors, parts));
    plan.parts = c.samples * parts;
    plan.shares = c.samples * c.channels * c.inner;
    steps = ceil_div(c.rows, kThreads / plan.across);
  } else {
    plan.parts = plan.shares = c.samples * c.channels;
    steps = ceil_div(c.rows * (c.inner / (plan.wide ? kLanes : 1)), kThreads);
  }
  const int64_t wanted = ceil_div(most, plan.parts);
  plan.groups = wanted < steps ? wanted : steps;
  if (plan.groups < 1) plan.groups = 1;
  int64_t each = ceil_div(steps, plan.groups);
  if (each > together) each = ceil_div(each, together) * together;
  plan.groups = ceil_div(steps, each);
  plan.per_group = each * (plan.columns ? kThreads / plan.across : kThreads);
  return plan;
}

// A job says what is done with vectors of elements: which inputs they are fetched from, and what is
// made of them. Steps of a thread are fetched kTogether at a time, before the first is computed
// with. Blocks of 256 threads and at most 128 registers are two a multiprocessor, and 512 threads
// with four vectors of 16 bytes each have 32 KB on their way; an H100 needs 20 (0.8 us of
// bandwidth).
template <class Job>
constexpr int kTogether = 4 / Job::kInputs;

// One copy of what the job does: with kTogether of them bias + activation had 7.8 MB of code, and
// took 156 s to compile for three architectures.
template <class V, class Job>
__device__ __forceinline__ void run_steps(const Job& job, int count, int64_t (&at)[kTogether<Job>],
                                          const typename V::T (&coefficient)[V::kLanes],
                                          typename V::T (&sum)[V::kLanes]) {
  Packed<typename Job::S, V::kIsWide> in[kTogether<Job>][Job::kInputs];
#pragma unroll
  for (int j = 0; j < kTogether<Job>; ++j)
    if (j < count) job.template fetch<V>(at[j], in[j]);
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    job.template run<V>(at[0], in[0], coefficient, sum);
    // None of the arrays can be indexed by a variable: they are in registers.
#pragma unroll
    for (int i = 1; i < kTogether<Job>; ++i) {
      at[i - 1] = at[i];
#pragma unroll
      for (int k = 0; k < Job::kInputs; ++k) in[i - 1][k] = in[i][k];
    }
  }
}

template <class Job>
__device__ __forceinline__ int steps_left(int64_t left, int64_t stride) {
  int count = 0;
#pragma unroll
  for (int j = 0; j < kTogether<Job>; ++j) count += j * stride < left;
  return count;
}

// First walk.
template <class Job, bool kWide>
__global__ void __launch_bounds__(kThreads, 2)  // without the number ptxas aims at 80 registers
    planes_kernel(const Job job, const Channels c, int64_t per_group, int,
                  typename Compute<typename Job::S>::T* shares) {
  using S = typename Job::S;
  using V = Vec<S, kWide>;
  using T = typename V::T;
  const int64_t parts = c.samples * c.channels;
  // equal (the next block #1): lanes, or blocks, only change places
  const int64_t part = blockIdx.x % parts, group = blockIdx.x / parts;
  const int64_t sample = part / c.channels, channel = part - sample * c.channels;
  const int64_t each = c.inner / V::kLanes;
  int64_t last = (group + 1) * per_group;
  if (last > c.rows * each) last = c.rows * each;

  T coefficient[V::kLanes], sum[V::kLanes];
#pragma unroll
  for (int l = 0; l < V::kLanes; ++l) {
    coefficient[l] = job.coefficient(part);
    sum[l] = T(0);
  }
  // Vector k is vector `i` of a row; a step goes `rows` rows and `rest` vectors on.
  int64_t k = group * per_group + threadIdx.x, i = k % each;
  const int64_t rows = kThreads / each, rest = kThreads % each, row_size = c.channels * c.inner;
  int64_t place = ((sample * c.rows + k / each) * c.channels + channel) * c.inner + i * V::kLanes;
  // equal (<= for <): nothing lies beyond the last element
  for (; k < last; k += kThreads * kTogether<Job>) {
    int64_t at[kTogether<Job>];
#pragma unroll
    for (int j = 0; j < kTogether<Job>; ++j) {
      at[j] = place;
      place += rows * row_size + rest * V::kLanes;
      i += rest;
      if (i < each) continue;
      i -= each;
      place += row_size - c.inner;
    }
    run_steps<V>(job, steps_left<Job>(last - k, kThreads), at, coefficient, sum);
  }
  if constexpr (Job::kSums) {
    __shared__ T scratch[kWarps];
    T total = T(0);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) total += sum[l];
    total = block_sum<kWarps>(total, scratch);
    if (threadIdx.x == 0) shares[group * parts + part] = total;
  }
}

// Second walk.
template <class Job, bool kWide>
__global__ void __launch_bounds__(kThreads, 2)
    columns_kernel(const Job job, const Channels c, int64_t per_group, int across,
                   typename Compute<typename Job::S>::T* shares) {
  using S = typename Job::S;
  using V = Vec<S, kWide>;
  using T = typename V::T;
  const int64_t columns = c.channels * c.inner;
  const uint32_t of_sample = uint32_t((columns / V::kLanes + across - 1) / across);
  const uint32_t parts = uint32_t(c.samples) * of_sample;
  // equal (the next block #1): lanes, or blocks, only change places
  const uint32_t part = blockIdx.x % parts, sample = part / of_sample;
  const int64_t group = blockIdx.x / parts;
  const int rows = kThreads / across, row_of_block = threadIdx.x / across;
  const int lane = threadIdx.x - row_of_block * across;
  const int64_t first_column = int64_t(part - sample * of_sample) * across * V::kLanes;
  const int64_t column = first_column + lane * V::kLanes;
  const bool exists = column < columns && row_of_block < rows;
  int64_t last = (group + 1) * per_group;
  if (last > c.rows) last = c.rows;

  T coefficient[V::kLanes], sum[V::kLanes];
#pragma unroll
  for (int l = 0; l < V::kLanes; ++l) {
    const int64_t at = exists ? column + l : 0;
    coefficient[l] = job.coefficient(sample * c.channels + (c.inner == 1 ? at : at / c.inner));
    sum[l] = T(0);
  }
  if (exists) {
    for (int64_t row = group * per_group + row_of_block; row < last; row += rows * kTogether<Job>) {
      int64_t at[kTogether<Job>];
#pragma unroll
      for (int j = 0; j < kTogether<Job>; ++j)
        at[j] = (sample * c.rows + row + j * rows) * columns + column;
      run_steps<V>(job, steps_left<Job>(last - row, rows), at, coefficient, sum);
    }
  }
  if constexpr (Job::kSums) {
    __shared__ T scratch[V::kLanes][kThreads];
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) scratch[l][threadIdx.x] = sum[l];
    __syncthreads();
    for (int i = threadIdx.x; i < across * V::kLanes; i += kThreads) {
      const int l = i / across, of = i - l * across;
      const int64_t to = first_column + of * V::kLanes + l;
      T total = T(0);
#pragma unroll 8
      for (int r = 0; r < rows; ++r) total += scratch[l][r * across + of];
      if (to < columns) shares[(group * c.samples + sample) * columns + to] = total;
    }
  }
}

template <class Job, bool kWide>
void run_walk(const Job& job, const Plan& plan, const Channels& c, double* workspace, void* sums,
              void* stream) {
  using T = typename Compute<typename Job::S>::T;
  T* const shares = shares_in<T>(workspace);
  launch(plan.columns ? &columns_kernel<Job, kWide> : &planes_kernel<Job, kWide>,
         plan.parts * plan.groups, kThreads, stream, 0, job, c, plan.per_group, plan.across,
         shares);
  if (!Job::kSums) return;
  const int64_t count = c.samples * c.channels;
  add_shares(shares, static_cast<T*>(sums), count, plan.groups, plan.shares / count, plan.shares,
             stream);
}

// A job in vectors where they fit.
template <class Job>
void run_job(const Job& job, const Channels& c, bool aligned, double* workspace, void* sums,
             void* stream) {
  using S = typename Job::S;
  const Plan plan = plan_for<S>(c, aligned, kTogether<Job>);
  if constexpr (sizeof(S) < 8)
    if (plan.wide) return run_walk<Job, true>(job, plan, c, workspace, sums, stream);
  run_walk<Job, false>(job, plan, c, workspace, sums, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
