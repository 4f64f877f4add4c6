// Scaled sums.
#pragma once

#include "channels.h"

namespace fusedtrain {

// y = x scale + residual, scale being one value of the tensor's dtype a sample and channel.
struct ScaleForward {
  Dtype dtype;
  Channels shape;
  const void* x;
  const void* scale;
  const void* residual;  // or null
  void* y;
};
// grad_input = grad scale (or null); grad_scale, the sum of grad x, of the type computed in (or
// null, as x then).
struct ScaleBackward {
  Dtype dtype;
  Channels shape;
  const void* grad;
  const void* x;
  const void* scale;
  void* grad_input;
  void* grad_scale;
  double* shares;  // workspace of cuda::, chain_shares() of them
};

FT_ENTRIES(ScaleForward)
FT_ENTRIES(ScaleBackward)

}  // namespace fusedtrain
