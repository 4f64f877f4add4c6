// Loops over dense data: y = f(x) and gx = g f'(saved). 16-bit data are converted in registers.
#pragma once

#include "convert.h"
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

// One block of the 16-bit kernels.
template <class Format, class Formula>
FT_METHOD void block_forward(const Formula& formula, const uint16_t* x, uint16_t* y) {
  alignas(64) float block[kLanes];
  Format::load(x, block);
  for (int i = 0; i < kLanes; ++i) block[i] = formula.forward(block[i]);
  Format::store(block, y);
}

template <class Format, class Formula>
FT_METHOD void block_backward(const Formula& formula, const uint16_t* g, const uint16_t* saved,
                              uint16_t* gx) {
  alignas(64) float grad[kLanes], kept[kLanes];
  Format::load(g, grad);
  Format::load(saved, kept);
  for (int i = 0; i < kLanes; ++i) grad[i] = formula.backward(grad[i], kept[i]);
  Format::store(grad, gx);
}

template <template <class> class Formula, class Format>
void pointwise_forward_16bit(const uint16_t* x, uint16_t* y, int64_t n, const double* parameters) {
  const Formula<float> formula(parameters);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) block_forward<Format>(formula, x + i, y + i);
  if (i == n) return;
  uint16_t tail[kLanes] = {};
  for (int64_t k = 0; k < n - i; ++k) tail[k] = x[i + k];
  block_forward<Format>(formula, tail, tail);
  for (int64_t k = 0; k < n - i; ++k) y[i + k] = tail[k];
}

template <template <class> class Formula, class Format>
void pointwise_backward_16bit(const uint16_t* g, const uint16_t* saved, uint16_t* gx, int64_t n,
                              const double* parameters) {
  const Formula<float> formula(parameters);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) block_backward<Format>(formula, g + i, saved + i, gx + i);
  if (i == n) return;
  uint16_t grad[kLanes] = {}, kept[kLanes] = {};
  for (int64_t k = 0; k < n - i; ++k) {
    grad[k] = g[i + k];
    kept[k] = saved[i + k];
  }
  block_backward<Format>(formula, grad, kept, grad);
  for (int64_t k = 0; k < n - i; ++k) gx[i + k] = grad[k];
}

FT_END_NAMESPACE
