// Loops of bias + activation + dropout (cpu/bias_act.cpp). Formulas are called in turns, by the
// table of pointwise.h.
#pragma once

#include "../../formulas.h"
#include "../../philox.h"

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
