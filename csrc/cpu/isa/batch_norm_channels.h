// Steps of batch norm once a channel, over arrays with a number for each. Where channels are many
// and elements few they are most of a call: with loops for every instruction set, and columns that
// are written once, BN+ReLU of 2 x 2048 x 1 x 1 takes 25 us forward where it took 48, and 75 us
// forward and backward where it took 114.
#pragma once

#include "convert.h"
#include "kernels.h"
#include "steps.h"

FT_BEGIN_NAMESPACE

template <class T>
FT_METHOD double number_of(Plain<T>, T stored) {
  return static_cast<double>(stored);
}
FT_METHOD double number_of(Half, uint16_t stored) { return half_to_float(stored); }
FT_METHOD double number_of(BFloat16, uint16_t stored) { return bfloat16_to_float(stored); }

// means[c] is the median of x[index[k] + c inner], or 0 where that is not finite.
template <class Format>
void norm_guess(const typename Format::Stored* x, const int64_t* index, int64_t inner,
                double* means, int64_t n) {
  const auto *a = x + index[0], *b = x + index[1], *c = x + index[2];
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const double p = number_of(Format(), a[i * inner]), q = number_of(Format(), b[i * inner]);
    const double r = number_of(Format(), c[i * inner]);
    const double low = p < q ? p : q, high = p < q ? q : p;
    const double median = r < low ? low : r > high ? high : r;
    means[i] = median - median == 0 ? median : 0;
  }
}

// Sums of the distances from a guess of the mean, and of their squares, become the mean distance
// and the variance. Returns whether a guess was so far off that the variance, a difference, lost
// digits.
inline bool norm_moments(double* sums, const double* squares, double count, double* variance,
                         int64_t n) {
  int64_t far = 0;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const double distance = sums[i] / count, square = distance * distance;
    const double difference = squares[i] / count - square;
    far |= square > cpu::kFarVariances * difference ? 1 : 0;
    sums[i] = distance;
    variance[i] = difference;
  }
  return far != 0;
}

// average += distance; variances are not negative.
inline void norm_center(const double* distance, double* average, double* variance, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    average[i] += distance[i];
    variance[i] = variance[i] < 0 ? 0 : variance[i];
  }
}

template <class T>
void norm_settle(const double* average, const double* variance, double eps, T* mean, T* invstd,
                 int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    mean[i] = static_cast<T>(average[i]);
    invstd[i] = static_cast<T>(1 / __builtin_sqrt(variance[i] + eps));
  }
}

// running = (1 - momentum) running + momentum scale value
template <class T>
void norm_track(T* running, const double* value, double scale, double momentum, int64_t n) {
  const double keep = 1 - momentum;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i)
    running[i] =
        static_cast<T>(keep * static_cast<double>(running[i]) + momentum * (value[i] * scale));
}

FT_END_NAMESPACE
