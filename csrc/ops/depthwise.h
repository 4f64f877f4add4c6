// Depthwise convolutions: every channel is convolved with kernels of its own.
#pragma once

#include "common.h"

namespace fusedtrain {

// Dimensions are depth, height, width; a convolution of fewer has ones in front. Output channel c
// is of input channel c / multiplier. In memory a tensor is samples x channels x positions, or
// samples x positions x channels where `last`; weights are channels x depth x height x width.
// Position o of the output sees positions o stride - pad + k dilation of the input, zeros outside.
// Products are added up in the type computed in (float for 16 bits) and rounded once.
struct Depthwise {
  Dtype dtype;
  bool last;
  int64_t samples, channels, multiplier;  // channels of the input
  int64_t in[3], out[3], kernel[3], stride[3], dilation[3], pad[3];
  int64_t out_channels() const { return channels * multiplier; }
  int64_t inputs() const { return in[0] * in[1] * in[2]; }  // of a channel of a sample
  int64_t outputs() const { return out[0] * out[1] * out[2]; }
  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
};
struct DepthwiseForward : Depthwise {
  const void* x;
  const void* weight;
  const void* bias;  // or null
  void* y;
};
// Null for a gradient that nobody asks for. x is read for grad_weight alone, weight for grad_input
// alone.
struct DepthwiseBackward : Depthwise {
  const void* grad;
  const void* x;
  const void* weight;
  void* grad_input;
  void* grad_weight;
  void* grad_bias;
  double* shares;  // workspace of cuda::, depthwise_shares() of them
};

namespace cuda {
// Doubles that the shares take; none of them need be set.
int64_t depthwise_shares(const DepthwiseBackward& call);
}  // namespace cuda

FT_ENTRIES(DepthwiseForward)
FT_ENTRIES(DepthwiseBackward)

}  // namespace fusedtrain
