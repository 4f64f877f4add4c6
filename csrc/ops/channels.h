// Tensors with channels.
#pragma once

#include "common.h"

namespace fusedtrain {

// A dense tensor as samples x rows x channels x inner, in memory order.
struct Channels {
  int64_t samples, rows, channels, inner;
  int64_t numel() const { return samples * rows * channels * inner; }
};

namespace cuda {
// Doubles for the shares of a sum, none of which need be set.
int64_t chain_shares(const Channels& shape);
}  // namespace cuda

}  // namespace fusedtrain
