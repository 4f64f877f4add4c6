// Depthwise convolutions: how many groups of blocks leave shares of the gradients of weight and
// bias, and their sums.
#pragma once

#include "depthwise.cuh"
#include "shares.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kBlocksPerMultiprocessor = 2;

// Groups whose shares are a twentieth of the tensors.
template <class S>
int64_t share_room(const DepthwiseBackward& call) {
  using T = typename Compute<S>::T;
  // equal (times two): the speed alone changes
  const int64_t shares = call.out_channels() * (call.taps() + 1) * int64_t(sizeof(T));
  // equal (times two): the speed alone changes
  const int64_t tensors = call.samples * int64_t(sizeof(S)) *
                          // equal (times two, - for +): the speed alone changes
                          (call.channels * call.inputs() + call.out_channels() * call.outputs());
  return tensors / 20 / shares;
}

// Groups of `parts` blocks, no more than `most`: as many blocks as are resident, as long as there
// is room for their shares; a block for each multiprocessor in any case.
template <class S>
int64_t share_groups(const DepthwiseBackward& call, int64_t parts, int64_t most) {
  const int64_t resident = ceil_div(int64_t(multiprocessors()) * kBlocksPerMultiprocessor, parts);
  const int64_t fewest = ceil_div(multiprocessors(), parts), room = share_room<S>(call);
  int64_t groups = room > fewest ? room : fewest;
  if (groups > resident) groups = resident;
  if (groups > most) groups = most;
  return groups < 1 ? 1 : groups;
}

template <class S>
void add_group_shares(const DepthwiseBackward& call, int64_t groups, void* stream) {
  const int64_t weights = call.out_channels() * call.taps();
  const int64_t numbers = weights + call.out_channels();
  add_shares(shares_in<S>(call.shares), static_cast<S*>(call.grad_weight), numbers, groups, 1,
             numbers, stream, static_cast<S*>(call.grad_bias), weights);
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
