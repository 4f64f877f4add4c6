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
};

// A sum of all tasks, in their order.
double sum_shares(const BatchNorm& n, const Sums& work, int64_t which, int64_t channel) {
  double sum = 0;
  for (int64_t task = 0; task < work.count; ++task)
    sum += work.shares[(2 * task + which) * n.channels + channel];
  return sum;
}

template <class T>
void write(void* p, int64_t i, double value) {
  if (p != nullptr) static_cast<T*>(p)[i] = static_cast<T>(value);
}

// What the data of the channels are centred by, a guess of their mean: the median of three elements
// from where an image has no border.
template <class Read>
void guess_means(const BatchNorm& n, double* means, const Read& read) {
  static constexpr double kProbes[] = {0.29, 0.53, 0.83};
  int64_t index[3];  // of channel 0
  for (int i = 0; i < 3; ++i) {
    const int64_t k = int64_t(kProbes[i] * double(n.rows * n.inner));
    index[i] = k / n.inner * n.channels * n.inner + k % n.inner;
  }
  for (int64_t c = 0; c < n.channels; ++c) {
    const double x = read(index[0] + c * n.inner), y = read(index[1] + c * n.inner);
    const double z = read(index[2] + c * n.inner);
    const double low = x < y ? x : y, high = x < y ? y : x;
    const double median = z < low ? low : z > high ? high : z;
    means[c] = median - median == 0 ? median : 0;
  }
}

// Whether the guess of a mean was so far from it that the variance, a difference, lost digits: then
// a second look, with the mean that was found, mends it.
bool is_far(double distance, double variance) { return distance * distance > 64 * variance; }

template <class T>
void settle_channels(const BatchNorm& n, const BatchNormStatistics& s, const Sums& work) {
  const double count = double(n.rows) * double(n.inner);
  for (int64_t c = 0; c < n.channels; ++c) {
    const double sum = sum_shares(n, work, 0, c), squares = sum_shares(n, work, 1, c);
    const double average = sum / count, variance = squares / count - average * average;
    s.average[c] += average;
    s.variance[c] = variance < 0 ? 0 : variance;
    if (n.mean == nullptr) continue;
    write<T>(n.mean, c, s.average[c]);
    write<T>(n.invstd, c, 1 / sqrt(s.variance[c] + s.eps));
    if (s.running_mean == nullptr) continue;
    const double keep = 1 - s.momentum, unbiased = s.variance[c] * (count / (count - 1));
    write<T>(s.running_mean, c,
             keep * double(value<T>(s.running_mean, c)) + s.momentum * s.average[c]);
    write<T>(s.running_var, c, keep * double(value<T>(s.running_var, c)) + s.momentum * unbiased);
  }
}

template <class T>
void settle_channels(const BatchNorm& n, const BatchNormBackward& b, const Sums& work) {
  for (int64_t c = 0; c < n.channels; ++c) {
    b.sums[c] = sum_shares(n, work, 0, c);
    b.sums[n.channels + c] = sum_shares(n, work, 1, c) * double(value<T>(n.invstd, c));
    write<T>(b.grad_bias, c, b.sums[c]);
    write<T>(b.grad_weight, c, b.sums[n.channels + c]);
  }
}

// What the sums of a call tell.
template <class What>
void settle(const BatchNorm& n, const What& what, const Sums& work) {
  if (n.dtype == Dtype::kFloat64)
    settle_channels<double>(n, what, work);
  else
    settle_channels<float>(n, what, work);
}

// s.average becomes what the sums are centred by.
void guess(const BatchNorm& n, const BatchNormStatistics& s) {
  if (n.dtype == Dtype::kFloat64)
    return guess_means(n, s.average, [&](int64_t i) { return value<double>(n.x, i); });
  if (n.dtype == Dtype::kFloat32)
    return guess_means(n, s.average, [&](int64_t i) { return double(value<float>(n.x, i)); });
  const Format& format = format_of(n.dtype);
  guess_means(n, s.average, [&](int64_t i) {
    float number;
    format.load(static_cast<const uint16_t*>(n.x) + i, &number, 1);
    return double(number);
  });
}

// Mends the guesses that were bad. False: there were none.
bool guess_again(const BatchNorm& n, const BatchNormStatistics& s, const Sums& work) {
  const double count = double(n.rows) * double(n.inner);
  bool any = false;
  for (int64_t c = 0; c < n.channels; ++c) {
    const double distance = sum_shares(n, work, 0, c) / count;
    const double variance = sum_shares(n, work, 1, c) / count - distance * distance;
    if (!is_far(distance, variance)) continue;
    s.average[c] += distance;
    any = true;
  }
  return any;
}

}  // namespace

void statistics(const BatchNorm& n, const BatchNormStatistics& s, Parallel parallel) {
  Sums work(n, parallel);
  const auto sum = [&] {
    work.run(
        n, false, [&](auto& worker) { worker.fill_centers(s); },
        [&](auto& worker, int64_t task) { worker.statistics(work.of(n, task)); });
  };
  guess(n, s);
  sum();
  if (guess_again(n, s, work)) sum();
  settle(n, s, work);
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
  for (int64_t c = 0; c < n.channels; ++c) {
    if (n.dtype == Dtype::kFloat64) {
      write<double>(n.mean, c, value<double>(s.running_mean, c));
      write<double>(n.invstd, c, 1 / sqrt(value<double>(s.running_var, c) + s.eps));
    } else {
      write<float>(n.mean, c, double(value<float>(s.running_mean, c)));
      write<float>(n.invstd, c, 1 / sqrt(double(value<float>(s.running_var, c)) + s.eps));
    }
  }
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
      n, false, [](auto& worker) { worker.fill_reduce(); },
      [&](auto& worker, int64_t task) { worker.reduce(b, work.of(n, task)); });
  settle(n, b, work);
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
