// Loops of batch norm over a tile: `rows` runs of n elements, each run of a tensor `stride` after
// the last. 16-bit data are converted in registers.
//
// Column: element i of every run has the i-th mean, scale, sum, ... (channels last). Row: run r has
// the r-th of them (channels first).
#pragma once

#include "../../formulas.h"
#include "kernels.h"
#include "steps.h"

FT_BEGIN_NAMESPACE

using cpu::NormTile;
using cpu::Run;

// The formulas that are compiled together with the norm. The others take turns with it on the tile,
// which keeps memory waiting: ReLU's backward of 8 x 512 x 28 x 28 took 1.3 ns an element in turns
// and takes 0.7 in one loop.
template <template <class> class Formula>
constexpr bool kWithNorm = false;
template <>
constexpr bool kWithNorm<Relu> = true;
template <>
constexpr bool kWithNorm<Relu6> = true;
template <>
constexpr bool kWithNorm<LeakyRelu> = true;
template <>
constexpr bool kWithNorm<Silu> = true;
template <>
constexpr bool kWithNorm<Hardswish> = true;

template <class T>
struct Identity : NoParameters {
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const { return x; }
  FT_METHOD T backward(T g, T) const { return g; }
};

struct Column {
  // Values of the lanes from element i of a run on.
  template <class T>
  static FT_METHOD const T* of(const T* list, int64_t, int64_t i) {
    return list + i;
  }

  // firsts[] and seconds[] += what f(row, i, part, first, second) adds to the sums of a step. The
  // rows meet in registers.
  template <class T, class F>
  static FT_METHOD void add_up(int64_t rows, int64_t n, T* firsts, T* seconds, const F& f) {
    if (rows == 1)
      return each_step(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
        f(0, i, part, firsts + i, seconds + i);
      });
    each_step(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
      alignas(64) T first[kStep] = {}, second[kStep] = {};
      for (int64_t row = 0; row < rows; ++row) f(row, i, part, first, second);
#pragma GCC ivdep
      for (int lane = 0; lane < kStep; ++lane) {
        firsts[i + lane] += first[lane];
        seconds[i + lane] += second[lane];
      }
    });
  }
};

struct Row {
  template <class T>
  static FT_METHOD Same<T> of(const T* list, int64_t row, int64_t) {
    return {list[row]};
  }

  template <class T, class F>
  static FT_METHOD void add_up(int64_t rows, int64_t n, T* firsts, T* seconds, const F& f) {
    for (int64_t row = 0; row < rows; ++row) {
      alignas(64) T first[kStep] = {}, second[kStep] = {};
      each_step(n, [&](int64_t i, auto part)
                       __attribute__((always_inline)) { f(row, i, part, first, second); });
      firsts[row] += total(first);
      seconds[row] += total(second);
    }
  }
};

template <class S>
FT_METHOD S* at(Run<S> run, int64_t row, int64_t i) {
  return run.data + row * run.stride + i;
}

// Adds sums to others in double, and starts them again.
template <class T>
void move_sums(T* from, double* to, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    to[i] += double(from[i]);
    from[i] = T(0);
  }
}

// sums += x - mean, slopes += (x - mean)^2, where the mean is a guess of it
template <class By, class Format, class Tile>
void norm_collect(const Tile& t) {
  using T = typename Format::Number;
  By::add_up(t.rows, t.n, t.sums, t.slopes,
             [&](int64_t row, int64_t i, auto part, T* sum, T* square)
                 __attribute__((always_inline)) {
                   const In<Format> in(at(t.x, row, i), part);
                   const auto center = By::of(t.mean, row, i);
                   alignas(64) T distance[kStep];
#pragma GCC ivdep
                   for (int lane = 0; lane < kStep; ++lane)
                     distance[lane] = lane < part.n ? in.lane[lane] - center[lane] : T(0);
#pragma GCC ivdep
                   for (int lane = 0; lane < kStep; ++lane) {
                     sum[lane] += distance[lane];
                     square[lane] += distance[lane] * distance[lane];
                   }
                 });
}

// out = f(((x - mean) scale + bias) factor + residual)
template <class By, class Format, template <class> class Formula, bool kAdds, class Tile>
FT_METHOD void norm_forward_runs(const Tile& t) {
  using T = typename Format::Number;
  const Formula<T> formula(t.parameters);
  for (int64_t row = 0; row < t.rows; ++row)
    each_step(t.n, [&](int64_t i, auto part) __attribute__((always_inline)) {
      const In<Format> in(at(t.x, row, i), part);
      const In<Format> added(kAdds ? at(t.saved, row, i) : at(t.x, row, i), part);
      Out<Format> out(at(t.out, row, i), part);
      const auto mean = By::of(t.mean, row, i), scale = By::of(t.scale, row, i);
      const auto bias = By::of(t.bias, row, i);
      const T factor = t.factor;
#pragma GCC ivdep
      for (int lane = 0; lane < kStep; ++lane) {
        const T s = ((in.lane[lane] - mean[lane]) * scale[lane] + bias[lane]) * factor;
        out.lane[lane] = formula.forward(kAdds ? s + added.lane[lane] : s);
      }
      out.finish(at(t.out, row, i), part);
    });
}
template <class By, class Format, template <class> class Formula, class Tile>
void norm_forward(const Tile& t) {
  if (t.saved.data != nullptr)
    norm_forward_runs<By, Format, Formula, true>(t);
  else
    norm_forward_runs<By, Format, Formula, false>(t);
}

// out = (s - bias) scale + mean, s being x where that is positive, else x factor; parameters[0] at
// most.
template <class By, class Format, class Tile>
void norm_restore(const Tile& t) {
  using T = typename Format::Number;
  const T largest = T(t.parameters[0]);
  for (int64_t row = 0; row < t.rows; ++row)
    each_step(t.n, [&](int64_t i, auto part) __attribute__((always_inline)) {
      const In<Format> in(at(t.x, row, i), part);
      Out<Format> out(at(t.out, row, i), part);
      const auto mean = By::of(t.mean, row, i), scale = By::of(t.scale, row, i);
      const auto bias = By::of(t.bias, row, i);
      const T factor = t.factor;
#pragma GCC ivdep
      for (int lane = 0; lane < kStep; ++lane) {
        const T y = in.lane[lane], s = y > T(0) ? y : y * factor;
        const T x = (s - bias[lane]) * scale[lane] + mean[lane];
        const T bounded = x > largest ? largest : x;
        out.lane[lane] = bounded < -largest ? -largest : bounded;
      }
      out.finish(at(t.out, row, i), part);
    });
}

// out = grad f'(s) out_scale, sums += grad f'(s) factor, slopes += grad f'(s) factor (x - mean).
// With a residual or the output in `saved`, or nothing.
template <class By, class Format, template <class> class Formula, bool kByOutput, bool kSaved,
          class Tile>
FT_METHOD void norm_backward_runs(const Tile& t) {
  using T = typename Format::Number;
  const Formula<T> formula(t.parameters);
  By::add_up(
      t.rows, t.n, t.sums, t.slopes,
      [&](int64_t row, int64_t i, auto part, T* sum, T* slope) __attribute__((always_inline)) {
        const In<Format> in(at(t.x, row, i), part), grad(at(t.grad, row, i), part);
        const In<Format> saved(kSaved ? at(t.saved, row, i) : at(t.x, row, i), part);
        Out<Format> out(at(t.out, row, i), part);
        const auto mean = By::of(t.mean, row, i), scale = By::of(t.scale, row, i);
        const auto bias = By::of(t.bias, row, i), out_scale = By::of(t.out_scale, row, i);
        const T factor = t.factor;
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane) {
          const T g = grad.lane[lane], kept = saved.lane[lane];
          const T distance = in.lane[lane] - mean[lane];
          const T norm = (distance * scale[lane] + bias[lane]) * factor;
          const T s = kSaved ? norm + kept : norm;
          const T d = formula.backward(g, !kByOutput ? s : kSaved ? kept : formula.forward(s));
          out.lane[lane] = d * out_scale[lane];
          sum[lane] += d * factor;
          slope[lane] += d * factor * distance;
        }
        out.finish(at(t.out, row, i), part);
      });
}
template <class By, class Format, template <class> class Formula, bool kByOutput, class Tile>
void norm_backward(const Tile& t) {
  if (t.saved.data != nullptr)
    norm_backward_runs<By, Format, Formula, kByOutput, true>(t);
  else
    norm_backward_runs<By, Format, Formula, kByOutput, false>(t);
}

// The sums alone, of a gradient that is there.
template <class By, class Format, class Tile>
void norm_reduce(const Tile& t) {
  using T = typename Format::Number;
  By::add_up(t.rows, t.n, t.sums, t.slopes,
             [&](int64_t row, int64_t i, auto part, T* sum, T* slope)
                 __attribute__((always_inline)) {
                   const In<Format> in(at(t.x, row, i), part), grad(at(t.grad, row, i), part);
                   const auto mean = By::of(t.mean, row, i);
                   const T factor = t.factor;
#pragma GCC ivdep
                   for (int lane = 0; lane < kStep; ++lane) {
                     const T d = grad.lane[lane] * factor;
                     sum[lane] += d;
                     slope[lane] += d * (in.lane[lane] - mean[lane]);
                   }
                 });
}

// out = (grad factor - average) scale - (x - mean) slope; without x, the last term is 0. The
// gradient and out may be the same.
template <class By, class Format, bool kCorrected, class Tile, class T>
FT_METHOD void norm_grad_input_runs(const Tile& t, const T* average, const T* slope) {
  for (int64_t row = 0; row < t.rows; ++row)
    each_step(t.n, [&](int64_t i, auto part) __attribute__((always_inline)) {
      const In<Format> grad(at(t.grad, row, i), part);
      const In<Format> in(kCorrected ? at(t.x, row, i) : at(t.grad, row, i), part);
      Out<Format> out(at(t.out, row, i), part);
      const auto mean = By::of(t.mean, row, i), scale = By::of(t.scale, row, i);
      const auto averages = By::of(average, row, i), slopes = By::of(slope, row, i);
      const T factor = t.factor;
#pragma GCC ivdep
      for (int lane = 0; lane < kStep; ++lane) {
        const T d = grad.lane[lane] * factor, distance = in.lane[lane] - mean[lane];
        out.lane[lane] = kCorrected ? (d - averages[lane]) * scale[lane] - distance * slopes[lane]
                                    : d * scale[lane];
      }
      out.finish(at(t.out, row, i), part);
    });
}
template <class By, class Format, class Tile, class T>
void norm_grad_input(const Tile& t, const T* average, const T* slope) {
  if (t.x.data != nullptr)
    norm_grad_input_runs<By, Format, true>(t, average, slope);
  else
    norm_grad_input_runs<By, Format, false>(t, average, slope);
}

FT_END_NAMESPACE
