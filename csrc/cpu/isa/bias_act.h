// Loops of bias + activation + dropout (cpu/bias_act.cpp). Formulas are called in turns, by the
// table of pointwise.h.
#pragma once

#include "../../formulas.h"
#include "philox.h"

FT_BEGIN_NAMESPACE

// The sum of a run, in an order that does not depend on the instruction set.
template <class T, class Term>
FT_METHOD double sum_of(int64_t n, const Term& term) {
  constexpr int kSums = 32;
  T sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums)
    for (int lane = 0; lane < kSums; ++lane) sums[lane] += term(i + lane);
  double total = 0;
  for (; i < n; ++i) total += term(i);
  for (int lane = 0; lane < kSums; ++lane) total += sums[lane];
  return total;
}

template <class T>
void bias_add(const T* x, const T* bias, int64_t step, T* z, int64_t n) {
  if (step == 0) {
    const T b = bias[0];
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) z[i] = x[i] + b;
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) z[i] = x[i] + bias[i];
  }
}

// step 0: the sum of a run to sums[0]; 1: each element to its own.
template <class T>
void bias_sum(const T* gx, int64_t step, T* sums, int64_t n) {
  if (step == 0) {
    sums[0] += sum_of<T>(n, [&](int64_t i) { return gx[i]; });
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) sums[i] += gx[i];
  }
}

// y = clamp(gain x), dropped where the number is below the threshold, else times keep. No numbers:
// nothing is dropped. A negative clamp is none.
template <class T, class Finish>
void finish_forward(const T* x, T* y, int64_t n, const Finish& given, const uint32_t* numbers) {
  const Finish f = given;  // which no store to y can change
  const T bound = f.clamp;
  if (bound >= T(0)) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = math::clamp(x[i] * f.gain, -bound, bound);
    x = y;
  }
  const T factor = (bound >= T(0) ? T(1) : f.gain) * (numbers == nullptr ? T(1) : f.keep);
  if (numbers != nullptr) {
    const uint32_t threshold = f.threshold;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const T kept = x[i] * factor;
      y[i] = numbers[i] < threshold ? T(0) : kept;
    }
  } else if (factor != T(1) || x != y) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factor;
  }
}

// The gradient of f(z): that of y, where y was not dropped and |edge| is below the limit (negative:
// no limit).
template <class T, class Finish>
void finish_backward(const T* g, const T* edge, T limit, T* out, int64_t n, const Finish& f,
                     const uint32_t* numbers) {
  const T factor = f.gain * f.keep;
  const uint32_t threshold = f.threshold;
  if (numbers != nullptr) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const T kept = g[i] * factor;
      out[i] = numbers[i] < threshold ? T(0) : kept;
    }
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = g[i] * factor;
  }
  if (limit < T(0)) return;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const T kept = out[i];
    out[i] = math::abs(edge[i]) < limit ? kept : T(0);
  }
}

FT_END_NAMESPACE
