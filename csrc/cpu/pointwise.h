// Loops over dense data, float and double: y = f(x) and gx = g f'(saved).
#pragma once

#include "kernels.h"

FT_BEGIN_NAMESPACE

// ivdep instead of restrict: input and output may be the same buffer, never shifted ones.
template <template <class> class Formula, class T>
void pointwise_forward(const T* x, T* y, int64_t n, const double* parameters) {
  const Formula<T> formula(parameters);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = formula.forward(x[i]);
}

template <template <class> class Formula, class T>
void pointwise_backward(const T* g, const T* saved, T* gx, int64_t n, const double* parameters) {
  const Formula<T> formula(parameters);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) gx[i] = formula.backward(g[i], saved[i]);
}

FT_END_NAMESPACE
