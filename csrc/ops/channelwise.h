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

namespace cpu {
void channelwise(const ChannelwiseForward& call, Parallel parallel);
void channelwise(const ChannelwiseBackward& call, Parallel parallel);
}  // namespace cpu

namespace cuda {
void channelwise(const ChannelwiseForward& call, void* stream);
void channelwise(const ChannelwiseBackward& call, void* stream);
// Doubles that the shares take; none of them need be set.
int64_t channelwise_shares(const ChannelwiseBackward& call);
// The gradient of parameter `which`, one value of the call's dtype a channel.
void add_shares(const ChannelwiseBackward& call, int which, void* gradient, void* stream);
}  // namespace cuda

}  // namespace fusedtrain
