// Activations of one formula without a tensor of parameters.
#pragma once

#include "common.h"

namespace fusedtrain {

// y[i] = f(x[i]). op counts the lines of FT_POINTWISE.
struct PointwiseForward {
  int op;
  Dtype dtype;
  const void* x;
  void* y;
  double parameters[kMaxParameters];
};

// grad_input[i] = grad[i] f'(saved[i]).
struct PointwiseBackward {
  int op;
  Dtype dtype;
  const void* grad;
  const void* saved;
  void* grad_input;
  double parameters[kMaxParameters];
};

namespace cpu {
void compute(const PointwiseForward& call, int64_t n, Parallel parallel);
void compute(const PointwiseBackward& call, int64_t n, Parallel parallel);
}  // namespace cpu

namespace cuda {
void compute(const PointwiseForward& call, int64_t n, void* stream);
void compute(const PointwiseBackward& call, int64_t n, void* stream);
}  // namespace cuda
using cpu::compute;
using cuda::compute;

}  // namespace fusedtrain
