// Loops of the scaled sums (cpu/scale_add.cpp).
#pragma once

#include "steps.h"

FT_BEGIN_NAMESPACE

// y = x scale + residual (or null). step 0: one coefficient; 1: one for each element, and room for
// a step more.
template <class Format, class S, class T>
void scale_forward(const S* x, const T* scale, int64_t step, const S* residual, S* y, int64_t n) {
  const auto run = [&](auto scale_of) __attribute__((always_inline)) {
    each_step(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
      const In<Format> from(x + i, part);
      Out<Format> out(y + i, part);
      if (residual == nullptr) {
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane)
          out.lane[lane] = from.lane[lane] * scale_of(i + lane);
      } else {
        const In<Format> other(residual + i, part);
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane)
          out.lane[lane] = from.lane[lane] * scale_of(i + lane) + other.lane[lane];
      }
      out.finish(y + i, part);
    });
  };
  const T first = scale[0];
  if (step == 0)
    run([&](int64_t) __attribute__((always_inline)) { return first; });
  else
    run([&](int64_t i) __attribute__((always_inline)) { return scale[i]; });
}

// gx = g scale, where gx is wanted. Where x is given, the sum of g x is added to sums[0], or that
// of each element to its own, and room for a step more.
template <class Format, class S, class T>
void scale_backward(const S* g, const S* x, const T* scale, int64_t step, S* gx, T* sums,
                    int64_t n) {
  alignas(64) T lanes[kStep] = {};
  const T first = scale[0];
  const auto run = [&](auto scale_of, auto sums_of) __attribute__((always_inline)) {
    each_step(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
      const In<Format> grad(g + i, part);
      if (x != nullptr) {
        const In<Format> from(x + i, part);
        T* sum = sums_of(i);
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane) sum[lane] += grad.lane[lane] * from.lane[lane];
      }
      if (gx != nullptr) {
        Out<Format> out(gx + i, part);
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane)
          out.lane[lane] = grad.lane[lane] * scale_of(i + lane);
        out.finish(gx + i, part);
      }
    });
  };
  if (step == 0) {
    run([&](int64_t) __attribute__((always_inline)) { return first; },
        [&](int64_t) __attribute__((always_inline)) { return lanes; });
    if (x != nullptr) sums[0] += total(lanes);
  } else {
    run([&](int64_t i) __attribute__((always_inline)) { return scale[i]; },
        [&](int64_t i) __attribute__((always_inline)) { return sums + i; });
  }
}

FT_END_NAMESPACE
