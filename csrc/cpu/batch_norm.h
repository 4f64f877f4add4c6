// Loops of batch norm over a tile: `rows` runs of n elements, each run of a tensor `stride` after
// the last. No formula is in here: tiles are so small that it is applied to them in the cache.
//
// Column: element i of every run has the i-th mean, scale, sum, ... (channels last). Row: run r has
// the r-th of them (channels first).
#pragma once

#include "convert.h"
#include "kernels.h"

FT_BEGIN_NAMESPACE

using cpu::Run;

// x - center in double, in which sums of squares are exact enough: the variance is a difference,
// and loses the digits of (mean / deviation)^2. Float data need no center for that.
template <class T>
FT_METHOD double centred(T x, const T* center, int64_t i) {
  return sizeof(T) == sizeof(double) ? double(x) - double(center[i]) : double(x);
}

struct Column {
  // sums += x - center, squares += (x - center)^2
  template <class T>
  static void collect(Run<const T> x, int64_t rows, int64_t n, const T* center, double* sums,
                      double* squares) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
      const T* in = x.data + row * x.stride;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        const double a = centred(in[i], center, i);
        const double b = centred(in[i + x.stride], center, i);
        const double c = centred(in[i + 2 * x.stride], center, i);
        const double d = centred(in[i + 3 * x.stride], center, i);
        sums[i] += (a + b) + (c + d);
        squares[i] += (a * a + b * b) + (c * c + d * d);
      }
    }
    for (; row < rows; ++row) {
      const T* in = x.data + row * x.stride;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        const double a = centred(in[i], center, i);
        sums[i] += a;
        squares[i] += a * a;
      }
    }
  }

  // sums += d factor, slopes += d factor (x - mean)
  template <class T>
  static void reduce(Run<const T> x, Run<const T> d, int64_t rows, int64_t n, const T* mean,
                     T factor, double* sums, double* slopes) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
      const T* in = x.data + row * x.stride;
      const T* g = d.data + row * d.stride;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        const T d0 = g[i] * factor, d1 = g[i + d.stride] * factor;
        const T d2 = g[i + 2 * d.stride] * factor, d3 = g[i + 3 * d.stride] * factor;
        const T x0 = in[i] - mean[i], x1 = in[i + x.stride] - mean[i];
        const T x2 = in[i + 2 * x.stride] - mean[i], x3 = in[i + 3 * x.stride] - mean[i];
        sums[i] += double((d0 + d1) + (d2 + d3));
        slopes[i] += double((d0 * x0 + d1 * x1) + (d2 * x2 + d3 * x3));
      }
    }
    for (; row < rows; ++row) {
      const T* in = x.data + row * x.stride;
      const T* g = d.data + row * d.stride;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        const T d0 = g[i] * factor;
        sums[i] += double(d0);
        slopes[i] += double(d0 * (in[i] - mean[i]));
      }
    }
  }

  static FT_METHOD int64_t of(int64_t, int64_t i) { return i; }
};

struct Row {
  static constexpr int kLanes = 32;

  // The last n < kLanes elements and zeros: planes of 7 x 7 are mostly rest, and a loop over it
  // takes as long as all the others.
  template <class T>
  static FT_METHOD void rest_of(const T* in, int64_t n, T* out) {
    for (int lane = 0; lane < kLanes; ++lane) out[lane] = lane < n ? in[lane] : T(0);
  }
#if defined(__AVX512F__)
  static FT_METHOD void rest_of(const float* in, int64_t n, float* out) {
    const uint32_t mask = (uint32_t(1) << n) - 1;
    _mm512_storeu_ps(out, _mm512_maskz_loadu_ps(__mmask16(mask), in));
    _mm512_storeu_ps(out + 16, _mm512_maskz_loadu_ps(__mmask16(mask >> 16), in + 16));
  }
#elif defined(__AVX2__)
  static FT_METHOD void rest_of(const float* in, int64_t n, float* out) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (int i = 0; i < kLanes; i += 8) {
      const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n) - i), lanes);
      _mm256_storeu_ps(out + i, _mm256_maskload_ps(in + i, mask));
    }
  }
#endif

  template <class T>
  static void collect(Run<const T> x, int64_t rows, int64_t n, const T* center, double* sums,
                      double* squares) {
    for (int64_t row = 0; row < rows; ++row) {
      const T* in = x.data + row * x.stride;
      double sum[kLanes] = {}, square[kLanes] = {};
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) {
          const double v = centred(in[i + lane], center, row);
          sum[lane] += v;
          square[lane] += v * v;
        }
      T rest[kLanes];
      rest_of(in + i, n - i, rest);
      for (int lane = 0; lane < kLanes; ++lane) {
        const double v = i + lane < n ? centred(rest[lane], center, row) : 0;
        sum[lane] += v;
        square[lane] += v * v;
      }
      sums[row] += total(sum);
      squares[row] += total(square);
    }
  }

  template <class T>
  static void reduce(Run<const T> x, Run<const T> d, int64_t rows, int64_t n, const T* mean,
                     T factor, double* sums, double* slopes) {
    for (int64_t row = 0; row < rows; ++row) {
      const T* in = x.data + row * x.stride;
      const T* g = d.data + row * d.stride;
      // A run is short: its sums are of the type of the data.
      T sum[kLanes] = {}, slope[kLanes] = {};
      const T average = mean[row];
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) {
          const T v = g[i + lane];
          sum[lane] += v;
          slope[lane] += v * (in[i + lane] - average);
        }
      T g_rest[kLanes], x_rest[kLanes];
      rest_of(g + i, n - i, g_rest);
      rest_of(in + i, n - i, x_rest);
      for (int lane = 0; lane < kLanes; ++lane) {
        sum[lane] += g_rest[lane];
        slope[lane] += g_rest[lane] * (x_rest[lane] - average);
      }
      sums[row] += double(total(sum)) * double(factor);
      slopes[row] += double(total(slope)) * double(factor);
    }
  }

  template <class T>
  static FT_METHOD T total(const T* lanes) {
    T a[16], b[8], c[4];
    for (int i = 0; i < 16; ++i) a[i] = lanes[i] + lanes[i + 16];
    for (int i = 0; i < 8; ++i) b[i] = a[i] + a[i + 8];
    for (int i = 0; i < 4; ++i) c[i] = b[i] + b[i + 4];
    return (c[0] + c[1]) + (c[2] + c[3]);
  }
  static FT_METHOD int64_t of(int64_t row, int64_t) { return row; }
};

// out = ((x - mean) scale + bias) factor + residual
template <class By, bool kAdds, class T>
void normalise_runs(Run<const T> x, Run<const T> residual, Run<T> out, int64_t rows, int64_t n,
                    const T* mean, const T* scale, const T* bias, T factor) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x.data + row * x.stride;
    const T* added = kAdds ? residual.data + row * residual.stride : nullptr;
    T* y = out.data + row * out.stride;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const int64_t k = By::of(row, i);
      const T s = ((in[i] - mean[k]) * scale[k] + bias[k]) * factor;
      y[i] = kAdds ? s + added[i] : s;
    }
  }
}
template <class By, class T>
void normalise(Run<const T> x, Run<const T> residual, Run<T> out, int64_t rows, int64_t n,
               const T* mean, const T* scale, const T* bias, T factor) {
  if (residual.data != nullptr)
    normalise_runs<By, true>(x, residual, out, rows, n, mean, scale, bias, factor);
  else
    normalise_runs<By, false>(x, residual, out, rows, n, mean, scale, bias, factor);
}

// out = (d factor - average) scale - (x - mean) slope; without x, the last term is 0. d and out may
// be the same.
template <class By, class T>
void grad_input(Run<const T> x, Run<const T> d, Run<T> out, int64_t rows, int64_t n, const T* mean,
                const T* scale, const T* average, const T* slope, T factor) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x.data + row * x.stride;
    const T* g = d.data + row * d.stride;
    T* to = out.data + row * out.stride;
    if (x.data != nullptr) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        const int64_t k = By::of(row, i);
        to[i] = (g[i] * factor - average[k]) * scale[k] - (in[i] - mean[k]) * slope[k];
      }
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) to[i] = g[i] * factor * scale[By::of(row, i)];
    }
  }
}

FT_END_NAMESPACE
