// Norms of rows: layer norm, RMS norm.
#pragma once

#include "common.h"

namespace fusedtrain {

// A tensor is [rows, n, inner] in memory, and a block is the n elements of one row at one inner
// place. Blocks have statistics: rows x inner of them, of the type computed in.
struct RowNorm {
  Dtype dtype;
  bool centered;     // layer norm; else RMS norm, which has no mean and no bias
  bool wide_affine;  // weight and bias are of the type computed in, not of the tensor's
  int64_t rows, n, inner;
  const void* weight;  // n of them, or null
  const void* bias;    // as weight
};
// y = (x - mean) rstd weight + bias, where x is the sum of input and residual if there is one.
struct RowNormForward : RowNorm {
  double eps;
  const void* x;
  const void* residual;  // or null
  void* sum;             // or null, as the residual
  void* y;
  void* mean;  // null if not centered
  void* rstd;
};
// grad_input, with grad_sum (or null) added to it; grad_weight and grad_bias (or null) of the type
// computed in.
struct RowNormBackward : RowNorm {
  const void* grad;
  const void* grad_sum;
  const void* x;
  const void* mean;
  const void* rstd;
  void* grad_input;
  void* grad_weight;
  void* grad_bias;
  double* shares;  // workspace of cuda::, row_norm_shares() of them
};

FT_ENTRIES(RowNormForward)
FT_ENTRIES(RowNormBackward)

namespace cuda {
int64_t row_norm_shares(const RowNormBackward& call);
}

}  // namespace fusedtrain
