// Loops of batch norm over a tile: `rows` runs of n elements, each run of a tensor `stride` after
// the last. Element i of a run meets element i of the columns (mean, sums, ...), whatever channel
// that is. No formula is in here: tiles are so small that it is applied to them in the cache.
#pragma once

#include "kernels.h"

FT_BEGIN_NAMESPACE

using cpu::Run;

// sums += x - center, squares += (x - center)^2, in double: the variance is their difference, and
// loses the digits of (mean / deviation)^2. Float data need no center for that.
template <class T>
void collect(Run<const T> x, int64_t rows, int64_t n, const T* center, double* sums,
             double* squares) {
  constexpr bool kCentred = sizeof(T) == sizeof(double);
  const auto value = [&](int64_t row, int64_t i) {
    return kCentred ? double(x.data[row * x.stride + i]) - double(center[i])
                    : double(x.data[row * x.stride + i]);
  };
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const double a = value(row, i), b = value(row + 1, i);
      const double c = value(row + 2, i), d = value(row + 3, i);
      sums[i] += (a + b) + (c + d);
      squares[i] += (a * a + b * b) + (c * c + d * d);
    }
  }
  for (; row < rows; ++row) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const double a = value(row, i);
      sums[i] += a;
      squares[i] += a * a;
    }
  }
}

// out = ((x - mean) scale + bias) factor + residual
template <class T, bool kAdds>
void normalise_rows(Run<const T> x, Run<const T> residual, Run<T> out, int64_t rows, int64_t n,
                    const T* mean, const T* scale, const T* bias, T factor) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x.data + row * x.stride;
    const T* added = kAdds ? residual.data + row * residual.stride : nullptr;
    T* y = out.data + row * out.stride;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const T s = ((in[i] - mean[i]) * scale[i] + bias[i]) * factor;
      y[i] = kAdds ? s + added[i] : s;
    }
  }
}
template <class T>
void normalise(Run<const T> x, Run<const T> residual, Run<T> out, int64_t rows, int64_t n,
               const T* mean, const T* scale, const T* bias, T factor) {
  if (residual.data != nullptr)
    normalise_rows<T, true>(x, residual, out, rows, n, mean, scale, bias, factor);
  else
    normalise_rows<T, false>(x, residual, out, rows, n, mean, scale, bias, factor);
}

// sums += d factor, slopes += d factor (x - mean)
template <class T>
void reduce(Run<const T> x, Run<const T> d, int64_t rows, int64_t n, const T* mean, T factor,
            double* sums, double* slopes) {
  const auto gradient = [&](int64_t row, int64_t i) { return d.data[row * d.stride + i] * factor; };
  const auto centred = [&](int64_t row, int64_t i) { return x.data[row * x.stride + i] - mean[i]; };
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const T d0 = gradient(row, i), d1 = gradient(row + 1, i);
      const T d2 = gradient(row + 2, i), d3 = gradient(row + 3, i);
      sums[i] += (double(d0) + double(d1)) + (double(d2) + double(d3));
      slopes[i] += (double(d0 * centred(row, i)) + double(d1 * centred(row + 1, i))) +
                   (double(d2 * centred(row + 2, i)) + double(d3 * centred(row + 3, i)));
    }
  }
  for (; row < rows; ++row) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const T d0 = gradient(row, i);
      sums[i] += double(d0);
      slopes[i] += double(d0 * centred(row, i));
    }
  }
}

// out = (d factor - average) scale - (x - mean) slope; without x, the last term is 0. d and out may
// be the same.
template <class T>
void grad_input(Run<const T> x, Run<const T> d, Run<T> out, int64_t rows, int64_t n, const T* mean,
                const T* scale, const T* average, const T* slope, T factor) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x.data + row * x.stride;
    const T* g = d.data + row * d.stride;
    T* to = out.data + row * out.stride;
    if (x.data != nullptr) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i)
        to[i] = (g[i] * factor - average[i]) * scale[i] - (in[i] - mean[i]) * slope[i];
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) to[i] = g[i] * factor * scale[i];
    }
  }
}

FT_END_NAMESPACE
