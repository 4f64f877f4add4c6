// Bias, activation and dropout.
#pragma once

#include "channels.h"

namespace fusedtrain {

// z = x + bias, y = drop(clamp(gain f(z))). Samples are 1; the bias is one value of the tensor's
// dtype a channel, or null. Element i in memory is dropped where its number in the Philox stream of
// `seed` (philox.h) is below `threshold`, and else multiplied by `keep`. A residual is added last.
struct BiasAct {
  int op;
  Dtype dtype;
  Channels shape;
  double parameters[kMaxParameters];
  const void* bias;
  double gain, clamp;   // negative: none
  const int64_t* seed;  // two numbers, or null: nothing is dropped
  uint32_t threshold;
  double keep;
};
struct BiasActForward : BiasAct {
  const void* x;
  const void* residual;  // like x, or null
  void* y;
};
struct BiasActBackward : BiasAct {
  const void* grad;
  const void* saved;  // y where the formula takes the output, else x
  void* grad_input;
  void* grad_bias;  // of the type computed in, or null
  double* shares;   // workspace of cuda::, chain_shares() of them
};

FT_ENTRIES(BiasActForward)
FT_ENTRIES(BiasActBackward)

}  // namespace fusedtrain
