// Batch norm over the tasks and tiles of a tensor. A tile is a few runs of elements in the cache:
// the loops of isa/batch_norm.h go over it.
#include <math.h>

#include "batch_norm_worker.h"

namespace fusedtrain {
namespace cpu {
namespace {

// The tasks of a call. Neither the tasks nor the order of their sums depends on the number of
// threads.
struct Tasks {
  int64_t count;
  Parallel parallel;
  Tasks(const BatchNorm& n, Parallel parallel) : count(Task(n).tasks()), parallel(parallel) {}

  // Calls fill with a worker of each thread, then f with it on each of its tasks and the task's
  // number, in the order that is asked for.
  template <class Fill, class F>
  void run(const BatchNorm& n, bool backwards, const Fill& fill, const F& f) const {
    by_dtype(n.dtype, kernels().norm, [&](const auto& layouts) {
      in_parts(parallel, count, 1, [&](int64_t first, int64_t last) {
        Worker worker(n, layouts);
        fill(worker);
        for (int64_t i = first; i < last; ++i) {
          const int64_t number = backwards ? first + last - 1 - i : i;
          worker.task.take(number);
          f(worker, number);
        }
      });
    });
  }
};

// Tasks that each leave a share of two sums a channel.
struct Sums : Tasks {
  std::vector<double> shares;  // [count, 2, channels]
  Sums(const BatchNorm& n, Parallel parallel)
      : Tasks(n, parallel), shares(2 * count * n.channels) {}

  double* of(const BatchNorm& n, int64_t task) { return shares.data() + 2 * task * n.channels; }
  // Adds up the shares of all tasks, in their order, in the place of the first.
  double* total(const BatchNorm& n) {
    const int64_t size = 2 * n.channels;
    for (int64_t task = 1; task < count; ++task)
      for (int64_t i = 0; i < size; ++i) shares[i] += shares[task * size + i];
    return shares.data();
  }
};

bool is_far(double distance, double variance) {
  return distance * distance > kFarVariances * variance;
}

template <class T>
void settle_channels(const BatchNorm& n, const BatchNormBackward& b, const double* sums) {
  const T* invstd = static_cast<const T*>(n.invstd);
  for (int64_t c = 0; c < n.channels; ++c) {
    b.sums[c] = sums[c];
    b.sums[n.channels + c] = sums[n.channels + c] * double(invstd[c]);
  }
  const auto write = [&](void* to, const double* from) {
    for (int64_t c = 0; to != nullptr && c < n.channels; ++c)
      static_cast<T*>(to)[c] = static_cast<T>(from[c]);
  };
  write(b.grad_bias, b.sums);
  write(b.grad_weight, b.sums + n.channels);
}

// Mean and inverse standard deviation of running statistics.
template <class T>
void evaluate_channels(const BatchNorm& n, const BatchNormStatistics& s) {
  const T *mean = static_cast<const T*>(s.running_mean),
          *var = static_cast<const T*>(s.running_var);
  for (int64_t c = 0; c < n.channels; ++c) {
    static_cast<T*>(n.mean)[c] = mean[c];
    static_cast<T*>(n.invstd)[c] = static_cast<T>(1 / sqrt(double(var[c]) + s.eps));
  }
}

// Guesses the mean of each channel, by which its data are centred: the median of three elements
// from where an image has no border.
template <class S, class T>
void guess(const BatchNorm& n, const BatchNormStatistics& s,
           const BatchNormChannels<S, T>& kernels) {
  static constexpr double kProbes[] = {0.29, 0.53, 0.83};
  int64_t index[3];  // of channel 0
  for (int i = 0; i < 3; ++i) {
    const int64_t k = int64_t(kProbes[i] * double(n.rows * n.inner));
    index[i] = k / n.inner * n.channels * n.inner + k % n.inner;
  }
  kernels.guess(static_cast<const S*>(n.x), index, n.inner, s.average, n.channels);
}

// Average and variance. A guess that was far from the mean costs the variance digits: a second look
// from the mean that was found mends it.
template <class S, class T>
void measure(const BatchNorm& n, const BatchNormStatistics& s,
             const BatchNormChannels<S, T>& kernels, Parallel parallel) {
  Sums work(n, parallel);
  double* distance = nullptr;  // from the guesses to the means
  const auto look = [&] {
    work.run(
        n, false, [&](auto& worker) { worker.fill_centers(s); },
        [&](auto& worker, int64_t task) { worker.statistics(work.of(n, task)); });
    distance = work.total(n);
    return kernels.moments(distance, distance + n.channels, double(n.rows) * double(n.inner),
                           s.variance, n.channels);
  };
  guess(n, s, kernels);
  if (look()) {
    for (int64_t c = 0; c < n.channels; ++c)
      if (is_far(distance[c], s.variance[c])) s.average[c] += distance[c];
    look();
  }
  kernels.center(distance, s.average, s.variance, n.channels);
}

// Derives mean and invstd from the statistics, and updates running_mean and running_var.
template <class S, class T>
void settle(const BatchNorm& n, const BatchNormStatistics& s,
            const BatchNormChannels<S, T>& kernels) {
  if (n.mean == nullptr) return;
  kernels.settle(s.average, s.variance, s.eps, static_cast<T*>(n.mean), static_cast<T*>(n.invstd),
                 n.channels);
  if (s.running_mean == nullptr) return;
  const double count = double(n.rows) * double(n.inner);
  kernels.track(static_cast<T*>(s.running_mean), s.average, 1, s.momentum, n.channels);
  kernels.track(static_cast<T*>(s.running_var), s.variance, count / (count - 1), s.momentum,
                n.channels);
}

}  // namespace

void statistics(const BatchNorm& n, const BatchNormStatistics& s, Parallel parallel) {
  by_dtype(n.dtype, kernels().norm, [&](const auto& layouts) {
    measure(n, s, layouts.channels, parallel);
    settle(n, s, layouts.channels);
  });
}

// The second sweep goes backwards: what the first one read last is still in the cache.
void normalise(const BatchNorm& n, const BatchNormForward& f, Parallel parallel) {
  Tasks(n, parallel)
      .run(
          n, true, [](auto& worker) { worker.fill_forward(); },
          [&](auto& worker, int64_t) { worker.normalise(f); });
}

void evaluate(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f,
              Parallel parallel) {
  if (n.dtype == Dtype::kFloat64)
    evaluate_channels<double>(n, s);
  else
    evaluate_channels<float>(n, s);
  normalise(n, f, parallel);
}

void restore(const BatchNorm& n, const BatchNormRestore& r, Parallel parallel) {
  Tasks(n, parallel)
      .run(
          n, false, [](auto& worker) { worker.fill_restore(); },
          [&](auto& worker, int64_t) { worker.restore(r); });
}

void reduce(const BatchNorm& n, const BatchNormBackward& b, Parallel parallel) {
  Sums work(n, parallel);
  work.run(
      n, false, [&](auto& worker) { worker.fill_reduce(b); },
      [&](auto& worker, int64_t task) { worker.reduce(b, work.of(n, task)); });
  if (n.dtype == Dtype::kFloat64)
    settle_channels<double>(n, b, work.total(n));
  else
    settle_channels<float>(n, b, work.total(n));
}

void grad_input(const BatchNorm& n, const BatchNormBackward& b, Parallel parallel) {
  Tasks(n, parallel)
      .run(
          n, true, [&](auto& worker) { worker.fill_backward(b); },
          [&](auto& worker, int64_t) { worker.grad_input(b); });
}

void backward(const BatchNorm& n, const BatchNormBackward& b, Parallel parallel) {
  // grad f'(s) is computed once, and waits in grad_input where nobody asks for it.
  if (b.averages == nullptr && b.grad_residual == nullptr)
    return reduce(n, b, parallel);  // and grad_input
  BatchNormBackward sums = b, rest = b;
  if (n.op >= 0 && b.grad_residual == nullptr) sums.grad_residual = b.grad_input;
  rest.ready = sums.grad_residual;
  rest.grad_residual = nullptr;
  reduce(n, sums, parallel);
  grad_input(n, rest, parallel);
}

}  // namespace cpu
}  // namespace fusedtrain
