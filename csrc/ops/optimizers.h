// The optimizer step, and what surrounds it.
#pragma once

#include "common.h"

namespace fusedtrain {

// The optimizer step. The options of a parameter group (fusedtrain/optim/_engine.py fills a row of
// float64 numbers in this order).
struct OptionGroup {
  double lr;
  double lr_index;  // of the tensor that holds the rate instead, or -1
  double weight_decay;
  double sign;       // -1: maximize
  double max_lr;     // for "corrected" weight decay, or 0
  double cautious;   // 1: directions that disagree with the gradient's sign are dropped
  double option[8];  // of the rule (optimizer_rules.h)
};

// Options of one step for all tensors; the first row of the same table.
struct StepOptions {
  double measures;  // kMeasure... of what the gradient sweep must find out
  double max_norm;  // of all gradients together, or 0
  double norm_eps;
  double unit_factor;  // of adaptive (unit-wise) clipping, or 0
  double unit_eps;
  double average_weight;  // of the new parameter in its moving average, or 0
  double write_back;      // to gradients: 0 nothing, 1 the unscaled and clipped ones, 2 zeros
  double stochastic;      // 1: bfloat16 parameters, or the 24 bits of a split weight, are rounded
                          // stochastically
  double seed;            // an integer below 2^53
  double trial;           // 1: the rule needs sums over a trial of the update
  double seed_high;       // an integer below 2^32: the stream's seed is seed + 2^32 seed_high
  double masters_follow;  // 1: float32 masters take what others have written to 16-bit parameters
  double unused[2];
};
static_assert(sizeof(OptionGroup) == 14 * sizeof(double) &&
              sizeof(StepOptions) == sizeof(OptionGroup));
constexpr int kMeasureFinite = 1, kMeasureGradients = 2, kMeasureParameters = 4;

// Factors in the update of one tensor at one step.
struct Coefficients {
  double gradient;    // stored gradient: 1 / scale, clipping, sign
  double keep, size;  // p' = keep p - size u
  double late_decay;  // u += late_decay p
  double caution;     // u *= caution
  double cautious;
  double average;    // average += average (p' - average)
  double key;        // of stochastic rounding: a 32-bit integer, or -1 for rounding to nearest
  double state_key;  // of the rounding of codes: a 32-bit integer
  double c[8];       // of the rule
};

constexpr int kMaxStates = 3;
constexpr int kTensorSums = 3;     // number of non-finite gradients, sum of g^2, sum of p^2
constexpr int kTrialSums = 3;      // see TrialFacts
constexpr int kTensorScalars = 3;  // step, two second moments
// Report of the last step: skipped?, skipped steps, norm of all gradients, clip coefficient, number
// of non-finite gradients, applied steps.
constexpr int kControls = 8;

// One parameter with what belongs to it. All are dense and of the parameter's layout.
struct OptimizerTensor {
  void* param;
  void* grad;
  void* state[kMaxStates];    // null where there is none
  float* scales[kMaxStates];  // of a state in codes (state_codes.h); else null
  void* master;               // float32, or the correction of split_weights.h; or null
  void* average;              // or null
  Dtype param_dtype, grad_dtype, state_dtype[kMaxStates], average_dtype;
  bool squares[kMaxStates];  // of states in codes: SquareCodes, else SignedCodes
  int correction_bits;       // 16 or 8 where `master` is a correction, else 0
  bool follows;              // `master` is float32 and follows `param` (split_weights.h)
  int64_t numel;
  int64_t units, inner;  // element i in memory is of unit i / inner % units
  int group;
  int scalar;  // its column of `scalars`
};

struct OptimizerCall {
  int rule;    // counts the lines of FT_RULES
  int states;  // highest number of states of a tensor
  int64_t count;
  const OptimizerTensor* tensors;
  int64_t group_count;
  const OptionGroup* groups;
  const StepOptions* options;
  const void* const* lrs;  // on the device
  const Dtype* lr_dtypes;
  int64_t scalar_count;    // columns of `scalars`
  float* scalars;          // [kTensorScalars, scalar_count]
  float* control;          // [kControls]
  const float* scale;      // of the loss, or null
  const float* found_inf;  // not 0: skip; or null
  double* sums;            // [count, kTensorSums]
  double* trial_sums;      // [count, kTrialSums]
};

// torch's GradScaler.update, with hysteresis and bounds; all pointers are to one number.
struct ScaleUpdate {
  float* scale;
  int32_t* growth_tracker;
  int32_t* hysteresis_tracker;
  const float* found_inf;
  double growth_factor, backoff_factor;
  int64_t growth_interval, hysteresis;
  double min_scale, max_scale;
};

// Memory to set to 0.
struct ZeroRange {
  void* data;
  int64_t bytes;
};

namespace cpu {
// call.sums
void measure(const OptimizerCall& call, Parallel parallel);
// call.trial_sums, from call.sums
void try_update(const OptimizerCall& call, Parallel parallel);
// `measures`, `tries`: call.sums and call.trial_sums are to be found out first.
void optimizer_step(const OptimizerCall& call, bool measures, bool tries, Parallel parallel);
void update_scale(const ScaleUpdate& update);
void zero(const ZeroRange* ranges, int64_t count, Parallel parallel);
}  // namespace cpu

namespace cuda {
// The optimizer step; the pointers of a call are the device's. Nothing but kernel launches: a CUDA
// graph may capture it. `workspace` has optimizer_workspace() doubles, none of which need be set.
int64_t optimizer_workspace(const OptimizerCall& call);
// call.sums
void measure(const OptimizerCall& call, double* workspace, void* stream);
// call.trial_sums, from call.sums
void try_update(const OptimizerCall& call, double* workspace, void* stream);
// `measures`, `tries`: call.sums and call.trial_sums are to be found out first.
void optimizer_step(const OptimizerCall& call, bool measures, bool tries, double* workspace,
                    void* stream);
void update_scale(const ScaleUpdate& update, void* stream);
void zero(const ZeroRange* ranges, int64_t count, void* stream);
}  // namespace cuda

}  // namespace fusedtrain
