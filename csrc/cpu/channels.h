// The walks over a tensor with channels, and the sums over all but these.
#pragma once

#include <algorithm>
#include <vector>

#include "../ops/channels.h"
#include "cut.h"
#include "formats.h"

namespace fusedtrain {
namespace cpu {
namespace {

// So many tasks a tensor is cut into, and so many shares their sums.
inline int64_t tasks_of(const Channels& shape) {
  return shape.samples * Cut{shape.rows, shape.channels, shape.inner}.tasks();
}
inline int64_t shares_of(const Channels& shape) {
  return shape.samples * Cut{shape.rows, shape.channels, shape.inner}.shares();
}

// Calls visit(i, n, coefficient, step, share) for the runs of a range of tasks.
template <class Visit>
void each_run(const Channels& shape, int64_t first, int64_t last, const Visit& visit,
              int64_t longest = kTile) {
  const Cut cut{shape.rows, shape.channels, shape.inner};
  const int64_t tasks = cut.tasks(), size = shape.rows * shape.channels * shape.inner;
  for (int64_t task = first; task < last; ++task) {
    const int64_t sample = task / tasks;
    cut.visit(task % tasks, longest, [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t s) {
      visit(sample * size + i, n, sample * shape.channels + c, step, sample * cut.shares() + s);
    });
  }
}

// In the order of the shares: the same bits for any number of threads.
template <class T>
void add_shares(const Channels& shape, const double* shares, T* sums) {
  const Cut cut{shape.rows, shape.channels, shape.inner};
  const int64_t count = cut.shares();
  std::vector<double> totals(shape.channels);
  for (int64_t sample = 0; sample < shape.samples; ++sample, shares += count) {
    std::fill(totals.begin(), totals.end(), 0.0);
    for (int64_t i = 0; i < count; ++i) totals[cut.channel_of_share(i)] += shares[i];
    for (int64_t c = 0; c < shape.channels; ++c) *sums++ = T(totals[c]);
  }
}

// Runs a call whose `sums`, one value a sample and channel of the type computed in, come from its
// shares; no sums where `sums` is null. run(call, first, last) does a range of tasks.
template <class Call, class Run>
void run_with_sums(Call call, void* sums, Parallel parallel, const Run& run) {
  std::vector<double> shares(sums ? shares_of(call.shape) : 0, 0.0);
  call.shares = shares.data();
  in_parts(parallel, tasks_of(call.shape), 2,
           [&](int64_t first, int64_t last) { run(call, first, last); });
  if (sums == nullptr) return;
  if (call.dtype == Dtype::kFloat64)
    add_shares(call.shape, call.shares, static_cast<double*>(sums));
  else
    add_shares(call.shape, call.shares, static_cast<float*>(sums));
}

}  // namespace
}  // namespace cpu
}  // namespace fusedtrain
