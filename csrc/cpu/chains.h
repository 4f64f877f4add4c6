// Loops of the pointwise chains (chains.cpp): products, sums, dropout. Formulas are called in
// turns, by the table of pointwise.h.
#pragma once

#include "../philox.h"
#include "kernels.h"
#include "steps.h"

FT_BEGIN_NAMESPACE

template <class T>
void multiply_into(const T* a, const T* b, T* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] * b[i];
}

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

// The gates that are compiled together with the product; the others take turns with it. SwiGLU
// of 2048 x 4096 in float32: forward 2.3 ms in turns and 1.6 so, backward 4.6 and 2.9.
template <template <class> class Formula>
constexpr bool kWithGate = false;
template <>
constexpr bool kWithGate<Silu> = true;
template <>
constexpr bool kWithGate<Gelu> = true;
template <>
constexpr bool kWithGate<GeluTanh> = true;

template <template <class> class Formula, class Format, class S>
void gated_forward(const S* gate, const S* value, S* y, int64_t n) {
  const Formula<typename Format::Number> formula(nullptr);
  each_step(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
    const In<Format> g(gate + i, part), v(value + i, part);
    Out<Format> out(y + i, part);
#pragma GCC ivdep
    for (int lane = 0; lane < kStep; ++lane)
      out.lane[lane] = formula.forward(g.lane[lane]) * v.lane[lane];
    out.finish(y + i, part);
  });
}

template <template <class> class Formula, class Format, class S>
void gated_backward(const S* grad, const S* gate, const S* value, S* grad_gate, S* grad_value,
                    int64_t n) {
  using T = typename Format::Number;
  const Formula<T> formula(nullptr);
  each_step(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
    const In<Format> d(grad + i, part), g(gate + i, part), v(value + i, part);
    Out<Format> to_gate(grad_gate + i, part), to_value(grad_value + i, part);
#pragma GCC ivdep
    for (int lane = 0; lane < kStep; ++lane) {
      T opened, slope;
      formula.both(g.lane[lane], opened, slope);
      const T product = d.lane[lane] * v.lane[lane];
      to_value.lane[lane] = d.lane[lane] * opened;
      to_gate.lane[lane] = product * slope;
    }
    to_gate.finish(grad_gate + i, part);
    to_value.finish(grad_value + i, part);
  });
}

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

// Words [4 first, 4 (first + blocks)) of the stream of a seed.
inline void philox_words(const int64_t* seed, int64_t first, int64_t blocks, uint32_t* words) {
  const uint64_t key = uint64_t(seed[0]), high = uint64_t(seed[1]);
  int64_t i = 0;
#if defined(__AVX512F__)
  // In lanes of 64 bits, whose low halves count: GCC's own vectors of 32 bits take 1.5 times as
  // long (0.94 instead of 0.61 ns a word, Zen 4).
  constexpr int kBlocks = 8;
  constexpr uint64_t kLow = 0xffffffffu;
  for (; i + kBlocks <= blocks; i += kBlocks) {
    uint64_t w0[kBlocks], w1[kBlocks], w2[kBlocks], w3[kBlocks];
    for (int l = 0; l < kBlocks; ++l) {
      w0[l] = uint64_t(first + i + l);
      w1[l] = w0[l] >> 32;
      w2[l] = high;
      w3[l] = high >> 32;
    }
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma GCC unroll 10
    for (int turn = 0; turn < 10; ++turn) {
      for (int l = 0; l < kBlocks; ++l) {
        const uint64_t a = Philox::kFirst * (w0[l] & kLow), b = Philox::kSecond * (w2[l] & kLow);
        w0[l] = (b >> 32) ^ w1[l] ^ k0;
        w1[l] = b;
        w2[l] = (a >> 32) ^ w3[l] ^ k1;
        w3[l] = a;
      }
      k0 += Philox::kStep0;
      k1 += Philox::kStep1;
    }
    for (int l = 0; l < kBlocks; ++l) {
      words[4 * (i + l)] = uint32_t(w0[l]);
      words[4 * (i + l) + 1] = uint32_t(w1[l]);
      words[4 * (i + l) + 2] = uint32_t(w2[l]);
      words[4 * (i + l) + 3] = uint32_t(w3[l]);
    }
  }
#endif
#pragma GCC ivdep
  for (; i < blocks; ++i) {
    const Philox random(key, uint64_t(first + i), high);
    words[4 * i] = random.word[0];
    words[4 * i + 1] = random.word[1];
    words[4 * i + 2] = random.word[2];
    words[4 * i + 3] = random.word[3];
  }
}

// y = clamp(gain x), dropped where the word is below the threshold, else times keep. No words:
// nothing is dropped. A negative clamp is none.
template <class T, class Finish>
void finish_forward(const T* x, T* y, int64_t n, const Finish& given, const uint32_t* words) {
  const Finish f = given;  // which no store to y can change
  const T bound = f.clamp;
  if (bound >= T(0)) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = math::clamp(x[i] * f.gain, -bound, bound);
    x = y;
  }
  const T factor = (bound >= T(0) ? T(1) : f.gain) * (words == nullptr ? T(1) : f.keep);
  if (words != nullptr) {
    const uint32_t threshold = f.threshold;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const T kept = x[i] * factor;
      y[i] = words[i] < threshold ? T(0) : kept;
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
                     const uint32_t* words) {
  const T factor = f.gain * f.keep;
  const uint32_t threshold = f.threshold;
  if (words != nullptr) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const T kept = g[i] * factor;
      out[i] = words[i] < threshold ? T(0) : kept;
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
