// The scalar parts of the optimizer step, on the device: sums of a tensor, what is decided of the
// step, and what each tensor's update multiplies by.
//
// Spread over the multiprocessors, a tensor a block or a thread: consumer GPUs take 25 us for the
// double powers and roots of 300 tensors in one block. What all need of all tensors, every block
// finds out for itself.
#pragma once

#include "optimizers.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kTailThreads = kWarp;

// Adds up what the chunks of each tensor left.
struct Add {
  const double* partials;  // of the launch's first chunk
  double* sums;            // of its first tensor
  double* clipped;         // sums of squares of clipped gradients; or null
  const Verdict* verdict;  // where it skips the step nothing has been left, and sums are 0; or null
};
constexpr int kAddedTensors = (kSmallArgumentBytes - sizeof(Add)) / sizeof(uint32_t) - 1;  // 1015
struct AddArgument : Add {
  uint32_t first_chunk[kAddedTensors + 1];
};
static_assert(sizeof(AddArgument) <= kSmallArgumentBytes, "");

__global__ void __launch_bounds__(kSweepThreads)
    add_kernel(const AddArgument __grid_constant__ add) {
  const bool left = add.verdict == nullptr || add.verdict->skip == 0;
  double sums[kPartials] = {};
  const uint32_t first = add.first_chunk[blockIdx.x];
  const uint32_t last = left ? add.first_chunk[blockIdx.x + 1] : first;
  for (uint32_t c = first + threadIdx.x; c < last; c += kSweepThreads) {
#pragma unroll
    for (int k = 0; k < kTensorSums; ++k) sums[k] += add.partials[int64_t(c) * kPartials + k];
    if (add.clipped != nullptr)
      sums[kTensorSums] += add.partials[int64_t(c) * kPartials + kTensorSums];
  }
  __shared__ double scratch[kPartials][kSweepWarps];
#pragma unroll
  for (int k = 0; k < kPartials; ++k) sums[k] = block_sum<kSweepWarps>(sums[k], scratch[k]);
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int k = 0; k < kTensorSums; ++k) add.sums[int64_t(blockIdx.x) * kTensorSums + k] = sums[k];
  if (add.clipped != nullptr) add.clipped[blockIdx.x] = sums[kTensorSums];
}

struct TailGroup {
  OptionGroup options;
  const void* lr;  // on the device, or null
  bool lr_in_double;
};
struct TailTensor {
  int64_t numel;
  int scalar;
  uint16_t group;  // of the launch
  bool stochastic;
};

struct Tail {
  StepOptions options;
  Verdict* verdict;
  // From the launch's first tensor on:
  Coefficients* coefficients;
  float* moments;         // two of a tensor, as they are after the step
  const double* clipped;  // null where units are not clipped
  const double* sums;
  double* unmeasured;  // sums where nobody measures, to be set to 0 by prepare_kernel; or null
  const double* trial_sums;
  // For all tensors:
  const double* all_sums;
  int64_t all;
  float* scalars;
  int64_t scalar_count;
  float* control;
  const float* scale;
  const float* found_inf;
  int rule, count;
  bool first;    // of the launches
  bool commits;  // prepare_kernel does, since nothing comes after it
};
template <int kBytes>
struct TailTable : Tail {
  static constexpr int kGroups = kBytes / 4 / sizeof(TailGroup);
  static constexpr int kTensors =
      (kBytes - sizeof(Tail) - kGroups * sizeof(TailGroup)) / sizeof(TailTensor);
  TailGroup groups[kGroups];
  TailTensor tensors[kTensors];
};
using FewTails = TailTable<kSmallArgumentBytes>;
using ManyTails = TailTable<kArgumentBytes>;
static_assert(sizeof(FewTails) <= kSmallArgumentBytes && sizeof(ManyTails) <= kArgumentBytes, "");

// Verdict on all tensors together. The whole warp must call it.
__device__ __forceinline__ Verdict judge(const Tail& tail) {
  double bad = 0, squares = 0;
  const int64_t measured = tail.unmeasured == nullptr ? tail.all : 0;
  for (int64_t t = threadIdx.x; t < measured; t += kTailThreads) {
    bad += tail.all_sums[t * kTensorSums];
    squares += tail.all_sums[t * kTensorSums + 1];
  }
  Verdict v;
  v.bad = __shfl_sync(0xffffffffu, warp_sum(bad), 0);
  v.norm = ::sqrt(__shfl_sync(0xffffffffu, warp_sum(squares), 0));
  v.clip = tail.options.max_norm == 0
               ? 1
               : formulas::clip_coefficient(v.norm, tail.options.max_norm, tail.options.norm_eps);
  bool skip = tail.found_inf != nullptr && !(*tail.found_inf == 0);
  if (static_cast<int>(tail.options.measures) & kMeasureFinite) skip |= v.bad != 0;
  v.skip = skip;
  return v;
}

// Writes the report to the caller. One thread of all does it.
__device__ __forceinline__ void commit_control(const Tail& tail, const Verdict& v) {
  const bool measured = tail.options.measures != 0, skipped = v.skip != 0;
  float* control = tail.control;
  control[0] = skipped ? 1.0f : 0.0f;
  control[1] += skipped ? 1.0f : 0.0f;
  control[2] = measured ? static_cast<float>(v.norm) : NAN;
  control[3] = measured ? static_cast<float>(v.clip) : 1.0f;
  control[4] = measured ? static_cast<float>(v.bad) : 0.0f;
  control[5] += skipped ? 0.0f : 1.0f;
}

__device__ __forceinline__ float* scalar_of(const Tail& tail, const TailTensor& t, int which) {
  return tail.scalars + which * tail.scalar_count + t.scalar;
}
__device__ __forceinline__ void commit_scalars(const Tail& tail, const TailTensor& t,
                                               const float* moments) {
  *scalar_of(tail, t, 0) += 1;
  *scalar_of(tail, t, 1) = moments[0];
  *scalar_of(tail, t, 2) = moments[1];
}

template <class Table>
__device__ __forceinline__ formulas::TensorFacts facts_of(const Table& tail, int i, double clip,
                                                          float* moments) {
  const TailTensor& t = tail.tensors[i];
  const TailGroup& group = tail.groups[t.group];
  double lr = group.options.lr;
  if (group.lr != nullptr)
    lr = group.lr_in_double ? *static_cast<const double*>(group.lr)
                            : double(*static_cast<const float*>(group.lr));
  const double squares =
      tail.clipped != nullptr ? tail.clipped[i] : tail.sums[int64_t(i) * kTensorSums + 1];
  return {&group.options,
          lr,
          double(*scalar_of(tail, t, 0)) + 1,
          ::sqrt(squares) * clip,
          ::sqrt(tail.sums[int64_t(i) * kTensorSums + 2]),
          moments};
}

template <class Table>
__global__ void __launch_bounds__(kTailThreads) prepare_kernel(const Table __grid_constant__ tail) {
  Verdict v = judge(tail);
  if (tail.first && blockIdx.x == 0 && threadIdx.x == 0) {
    v.applied = tail.control[5];
    *tail.verdict = v;
    if (tail.commits) commit_control(tail, v);
  }
  const int i = blockIdx.x * kTailThreads + threadIdx.x;
  if (i < tail.count && tail.unmeasured != nullptr) {
#pragma unroll
    for (int k = 0; k < kTensorSums; ++k) tail.unmeasured[i * kTensorSums + k] = 0;
  }
  if (v.skip != 0 || i >= tail.count) return;

  const TailTensor& t = tail.tensors[i];
  float moments[2] = {*scalar_of(tail, t, 1), *scalar_of(tail, t, 2)};
  const formulas::TensorFacts facts = facts_of(tail, i, v.clip, moments);
  Coefficients k = {};
  k.gradient = double(unscale(tail.scale)) * v.clip * facts.group->sign;
  k.caution = 1;
  k.cautious = facts.group->cautious;
  k.key = t.stochastic ? t.scalar : -1;  // the update makes a key of it, and of the next one
  k.state_key = t.scalar;
#define FT_PREPARE(name, Rule, least, most)    \
  case rule_##name:                            \
    formulas::Rule<double>::prepare(facts, k); \
    break;
  switch (tail.rule) { FT_RULES(FT_PREPARE) }
#undef FT_PREPARE
  tail.coefficients[i] = k;
  if (tail.commits) {
    commit_scalars(tail, t, moments);
  } else {
    tail.moments[2 * i] = moments[0];
    tail.moments[2 * i + 1] = moments[1];
  }
}

// After a trial of the update.
template <class Table>
__global__ void __launch_bounds__(kTailThreads) finish_kernel(const Table __grid_constant__ tail) {
  const Verdict v = *tail.verdict;
  if (tail.first && blockIdx.x == 0 && threadIdx.x == 0) commit_control(tail, v);
  const int i = blockIdx.x * kTailThreads + threadIdx.x;
  if (v.skip != 0 || i >= tail.count) return;

  const TailTensor& t = tail.tensors[i];
  const formulas::TensorFacts facts = facts_of(tail, i, v.clip, nullptr);
  const double* sums = tail.trial_sums + int64_t(i) * kTrialSums;
  const formulas::TrialFacts trial{sums[0], sums[1], sums[2], double(t.numel)};
  Coefficients k = tail.coefficients[i];
#define FT_FINISH(name, Rule, least, most)                  \
  case rule_##name:                                         \
    formulas::finish_step<formulas::Rule>(facts, trial, k); \
    break;
  switch (tail.rule) { FT_RULES(FT_FINISH) }
#undef FT_FINISH
  tail.coefficients[i] = k;
  commit_scalars(tail, t, tail.moments + 2 * i);
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
