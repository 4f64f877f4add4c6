// Activations with a parameter for each channel.
#pragma once

#include "common.h"

namespace fusedtrain {

// A tensor as rows x channels x inner, in memory order. parameters[k] points at one value a
// channel, of the tensor's dtype.
struct ChannelwiseForward {
  int op;  // counts the lines of FT_CHANNELWISE
  Dtype dtype;
  int64_t rows, channels, inner;
  const void* x;
  void* y;
  const void* parameters[kMaxParameters];
};

// Also sums the gradients of the parameters.
struct ChannelwiseBackward {
  int op;
  Dtype dtype;
  int64_t rows, channels, inner;
  const void* grad;
  const void* x;
  void* grad_input;
  const void* parameters[kMaxParameters];
  int parameter_count;
  void* grad_parameters[kMaxParameters];  // one value a channel, of the tensor's dtype
  double* shares;                         // workspace of cuda::, channelwise_shares() of them
};

namespace cuda {
// Doubles that the shares take; none of them need be set.
int64_t channelwise_shares(const ChannelwiseBackward& call);
}  // namespace cuda

FT_ENTRIES(ChannelwiseForward)
FT_ENTRIES(ChannelwiseBackward)

}  // namespace fusedtrain
