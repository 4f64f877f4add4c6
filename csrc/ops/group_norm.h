// Group norm: vectors that batch norm's loops take, with a number for each sample and channel.
#pragma once

#include "common.h"

namespace fusedtrain {

//   factor = weight (1 + scale), offset = bias (1 + scale) + shift
// Numbers of samples and channels are [samples, channels], in the type that is computed in.
struct GroupNorm {
  Dtype dtype;
  bool wide_affine;  // weight and bias are of the type computed in, not of the input's
  int64_t samples, groups, channels;
  const void* weight;  // [channels], or null
  const void* bias;    // as weight
  const void* scale;   // [samples, channels] of the dtype, or null
  const void* shift;   // as scale
};
struct GroupNormVectors : GroupNorm {
  double eps;
  const double* average;  // of each sample and channel
  const double* variance;
  void* mean;  // of the group, as invstd
  void* invstd;
  void* factor;
  void* offset;
};
// Batch norm's last pass takes averages of a channel, and multiplies them by its factor. Those of a
// group are divided by `factors`: the factors, but none so small that the quotient overflows.
struct GroupNormAverages : GroupNorm {
  const void* factor;
  const double* sums;  // [2, samples, channels]: of d, and of d times the normalised input
  double* averages;    // as sums
  void* factors;
};
struct GroupNormGradients : GroupNorm {
  int64_t samples_a_part;
  const double* sums;  // [samples / samples_a_part, 2, samples_a_part, channels]
  void* grad_weight;   // or null, as the others; of the dtype of what it is the gradient of
  void* grad_bias;
  void* grad_scale;
  void* grad_shift;
};
// A factor that is a smaller part of the largest of its group is replaced: the gradient of the
// input is off by so small a part.
constexpr double kLeastFactor = 0x1p-64;

FT_ENTRIES(GroupNormVectors)
FT_ENTRIES(GroupNormAverages)
FT_ENTRIES(GroupNormGradients)

}  // namespace fusedtrain
