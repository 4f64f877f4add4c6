// Batch norm with what follows it.
#pragma once

#include "common.h"

namespace fusedtrain {

// Batch norm with what follows it:
//   s = (x - mean) invstd weight + bias, times branch_scale of the sample, plus the residual
//   y = f(s)
// All tensors of a call are of one layout: rows x channels x inner in memory order, row r being of
// sample r / rows_a_sample. Vectors have one value a channel (branch_scale: a sample), of the type
// that is computed in: double for kFloat64, else float.
struct BatchNorm {
  int op;  // counts the lines of FT_POINTWISE, -1: f(s) = s
  Dtype dtype;
  int64_t rows, channels, inner, rows_a_sample;
  double parameters[kMaxParameters];
  const void* x;
  const void* branch_scale;  // or null, as weight and bias
  const void* weight;
  const void* bias;
  void* mean;
  void* invstd;
};

// The statistics of x, and what is made of them.
struct BatchNormStatistics {
  double* average;     // of each channel
  double* variance;    // biased
  void* running_mean;  // both or neither; moved by `momentum`, with the unbiased variance
  void* running_var;
  double momentum, eps;
};

struct BatchNormForward {
  const void* residual;  // or null
  void* y;               // may be x
};

// Restores n.x after an output without residual and branch_scale took its place: f(s) = s from 0
// on, slope s below.
struct BatchNormRestore {
  double slope;
  double largest;  // finite number of the dtype: what was rounded beyond it is that
  void* x;
};

// g = grad f'(s), which is the gradient of the residual; d = g times branch_scale.
struct BatchNormBackward {
  const void* grad;
  // The output where the formula takes it, else the residual. Null: there was no residual, and the
  // output, where it is needed, is computed again.
  const void* saved;
  void* grad_residual;  // or null
  const void* ready;    // g where it is there already, which is gone on from then; or null
  void* grad_input;
  double* sums;       // [2, channels]: of d, and of d (x - mean) invstd
  void* grad_weight;  // or null, as grad_bias: the second and the first of them
  void* grad_bias;
  // grad_input = (d - averages[0] / count - averages[1] / count (x - mean) invstd) invstd weight;
  // null: fixed statistics, only d.
  const double* averages;
  double count;
};

namespace cpu {
// s.average and s.variance; where n.mean is not null, also n.mean, n.invstd, running statistics
void statistics(const BatchNorm& n, const BatchNormStatistics& s, Parallel parallel);
void normalise(const BatchNorm& n, const BatchNormForward& f, Parallel parallel);
// the same with s.running_mean and s.running_var; n.mean and n.invstd as well
void evaluate(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f,
              Parallel parallel);
void restore(const BatchNorm& n, const BatchNormRestore& r, Parallel parallel);
// b.sums and what depends on them, b.grad_residual; with averages null (fixed statistics) also
// b.grad_input, unless b.grad_residual is asked for
void reduce(const BatchNorm& n, const BatchNormBackward& b, Parallel parallel);
// b.grad_input, b.grad_residual
void grad_input(const BatchNorm& n, const BatchNormBackward& b, Parallel parallel);
// both, averages being the sums, or null
void backward(const BatchNorm& n, const BatchNormBackward& b, Parallel parallel);
}  // namespace cpu

namespace cuda {
// Batch norm. `workspace` has batch_norm_workspace() doubles, none of which need be set; sums have
// a fixed order for a device.
int64_t batch_norm_workspace(const BatchNorm& n);
// s.average and s.variance; where n.mean is not null, also n.mean, n.invstd, running statistics
void statistics(const BatchNorm& n, const BatchNormStatistics& s, double* workspace, void* stream);
void normalise(const BatchNorm& n, const BatchNormForward& f, void* stream);
// the same with s.running_mean and s.running_var; n.mean and n.invstd as well
void evaluate(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f,
              void* stream);
void restore(const BatchNorm& n, const BatchNormRestore& r, void* stream);
// b.sums and what depends on them, b.grad_residual; with averages null also b.grad_input
void reduce(const BatchNorm& n, const BatchNormBackward& b, double* workspace, void* stream);
// b.grad_input, b.grad_residual
void grad_input(const BatchNorm& n, const BatchNormBackward& b, void* stream);
// One launch: n.mean, n.invstd, running statistics and f.y, or all that `b` asks for, averages not
// null. False, and nothing done, where the channels of a block are too large for its shared memory.
bool train_whole(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f,
                 void* stream);
bool backward_whole(const BatchNorm& n, const BatchNormBackward& b, void* stream);
}  // namespace cuda

}  // namespace fusedtrain
