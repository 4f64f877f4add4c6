// Loops with parameters that differ by channel (prelu) or are tensors of one value (star_relu).
#pragma once

#include "kernels.h"

FT_BEGIN_NAMESPACE

template <template <class> class Formula, int kParameters, class T>
void channelwise_forward(const T* x, T* y, int64_t n, const T* a, const T* b, int64_t step) {
  if (step == 0) {
    const T a0 = a[0], b0 = kParameters > 1 ? b[0] : T(0);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = Formula<T>::forward(x[i], a0, b0);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i)
      y[i] = Formula<T>::forward(x[i], a[i], kParameters > 1 ? b[i] : T(0));
  }
}

// One channel: contributions go through a block in the cache, whose sum has a fixed order.
template <template <class> class Formula, int kParameters, class T>
void channel_row_backward(const T* g, const T* x, T* gx, int64_t n, T a, T b, double* sums,
                          int64_t sums_stride) {
  constexpr int kBlock = 512, kLanes = 16;
  T ga[kBlock], gb[kBlock];
  double total_a = 0, total_b = 0;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t m = n - start < kBlock ? n - start : kBlock;
#pragma GCC ivdep
    for (int64_t i = 0; i < m; ++i) {
      T da = T(0), db = T(0);
      gx[start + i] = Formula<T>::backward(g[start + i], x[start + i], a, b, da, db);
      ga[i] = da;
      gb[i] = db;
    }
    const int64_t padded = (m + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = m; i < padded; ++i) ga[i] = gb[i] = T(0);
    T lane_a[kLanes] = {}, lane_b[kLanes] = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lane_a[lane] += ga[i + lane];
      if (kParameters > 1)
        for (int lane = 0; lane < kLanes; ++lane) lane_b[lane] += gb[i + lane];
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      total_a += lane_a[lane];
      total_b += lane_b[lane];
    }
  }
  sums[0] += total_a;
  if (kParameters > 1) sums[sums_stride] += total_b;
}

template <template <class> class Formula, int kParameters, class T>
void channelwise_backward(const T* g, const T* x, T* gx, int64_t n, const T* a, const T* b,
                          int64_t step, double* sums, int64_t sums_stride) {
  if (step == 0) {
    channel_row_backward<Formula, kParameters, T>(g, x, gx, n, a[0], kParameters > 1 ? b[0] : T(0),
                                                  sums, sums_stride);
    return;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    T da = T(0), db = T(0);
    gx[i] = Formula<T>::backward(g[i], x[i], a[i], kParameters > 1 ? b[i] : T(0), da, db);
    sums[i] += da;
    if (kParameters > 1) sums[sums_stride + i] += db;
  }
}

FT_END_NAMESPACE
