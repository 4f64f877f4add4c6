// A run of elements in steps of a constant length, which stay in registers; 16-bit data are
// converted there. The rest of a run goes through the same code.
#pragma once

#include "convert.h"
#include "kernels.h"

FT_BEGIN_NAMESPACE

template <class P>
FT_INLINE P smaller(P x, P high) {
  return x < high ? x : high;
}
template <class P>
FT_INLINE P larger(P x, P low) {
  return x > low ? x : low;
}
FT_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// n numbers where they are, or by way of a buffer.
template <class Format, class T>
FT_INLINE const T* numbers(const typename Format::Stored* p, int64_t n, T* buffer) {
  if constexpr (sizeof(*p) == sizeof(T)) {
    return p;
  } else {
    from_16bit<Format>(p, buffer, n);
    return buffer;
  }
}

// Numbers that are stored as they are computed.
template <class T>
struct Plain {
  using Number = T;
  using Stored = T;
};

// A step of a run: all of its elements, or the last n of the run.
constexpr int kStep = cpu::kNormStep;
struct Whole {
  static constexpr int64_t n = kStep;
};
struct Rest {
  int64_t n;
};

template <class F>
FT_METHOD void each_step(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) f(i, Whole());
  if (i < n) f(i, Rest{n - i});
}

// The n < kStep elements of a rest and zeros, and back. Planes of 7 x 7 are mostly rest, and a loop
// over it takes as long as all the others.
template <class S>
FT_METHOD void load_rest(const S* in, int64_t n, S* out) {
  for (int lane = 0; lane < kStep; ++lane) out[lane] = lane < n ? in[lane] : S(0);
}
template <class S>
FT_METHOD void store_rest(const S* in, int64_t n, S* out) {
  for (int lane = 0; lane < n; ++lane) out[lane] = in[lane];
}
#if defined(__AVX512F__) && defined(__AVX512BW__)
FT_METHOD void load_rest(const float* in, int64_t n, float* out) {
  const uint32_t mask = (uint32_t(1) << n) - 1;
  _mm512_storeu_ps(out, _mm512_maskz_loadu_ps(__mmask16(mask), in));
  _mm512_storeu_ps(out + 16, _mm512_maskz_loadu_ps(__mmask16(mask >> 16), in + 16));
}
FT_METHOD void store_rest(const float* in, int64_t n, float* out) {
  const uint32_t mask = (uint32_t(1) << n) - 1;
  _mm512_mask_storeu_ps(out, __mmask16(mask), _mm512_loadu_ps(in));
  _mm512_mask_storeu_ps(out + 16, __mmask16(mask >> 16), _mm512_loadu_ps(in + 16));
}
FT_METHOD void load_rest(const uint16_t* in, int64_t n, uint16_t* out) {
  const __mmask32 mask = (uint32_t(1) << n) - 1;
  _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(mask, in));
}
FT_METHOD void store_rest(const uint16_t* in, int64_t n, uint16_t* out) {
  const __mmask32 mask = (uint32_t(1) << n) - 1;
  _mm512_mask_storeu_epi16(out, mask, _mm512_loadu_si512(in));
}
#elif defined(__AVX2__)
// A masked store is some 20 operations on AMD: one at most. n is the same for run after run, so the
// branches are foreseen. (Products of 32 x 672 planes of 14 x 14, one thread: 3.0 to 3.9 ms with
// four masked stores, 2.1 to 2.3 so; torch's take 2.0 to 2.2.)
FT_METHOD __m256i first_lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FT_METHOD void load_rest(const float* in, int64_t n, float* out) {
  for (int i = 0; i < kStep; i += 8) {
    __m256 lanes = _mm256_setzero_ps();
    if (n >= i + 8)
      lanes = _mm256_loadu_ps(in + i);
    else if (n > i)
      lanes = _mm256_maskload_ps(in + i, first_lanes(n - i));
    _mm256_storeu_ps(out + i, lanes);
  }
}
FT_METHOD void store_rest(const float* in, int64_t n, float* out) {
  for (int i = 0; i < kStep && n > i; i += 8) {
    if (n >= i + 8)
      _mm256_storeu_ps(out + i, _mm256_loadu_ps(in + i));
    else
      _mm256_maskstore_ps(out + i, first_lanes(n - i), _mm256_loadu_ps(in + i));
  }
}
// There are no masks for 16 bits: eights, then four, two and one.
FT_METHOD void copy_lanes(const uint16_t* in, int64_t n, uint16_t* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) __builtin_memcpy(out + i, in + i, 16);
  if (n & 4) __builtin_memcpy(out + i, in + i, 8);
  i += n & 4;
  if (n & 2) __builtin_memcpy(out + i, in + i, 4);
  i += n & 2;
  if (n & 1) out[i] = in[i];
}
FT_METHOD void load_rest(const uint16_t* in, int64_t n, uint16_t* out) {
  for (int lane = 0; lane < kStep; ++lane) out[lane] = 0;
  copy_lanes(in, n, out);
}
FT_METHOD void store_rest(const uint16_t* in, int64_t n, uint16_t* out) { copy_lanes(in, n, out); }
#endif

// The numbers of a step, in place where they are stored as such.
template <class Format>
struct In {
  using T = typename Format::Number;
  using S = typename Format::Stored;
  static constexpr bool kPlain = sizeof(T) == sizeof(S);
  alignas(64) T buffer[kStep];
  const T* lane;

  FT_METHOD In(const S* from, Whole) {
    if constexpr (kPlain) {
      lane = from;
    } else {
      Format::template load<kStep>(from, buffer);
      lane = buffer;
    }
  }
  FT_METHOD In(const S* from, Rest rest) : lane(buffer) {
    if constexpr (kPlain) {
      load_rest(from, rest.n, buffer);
    } else {
      alignas(64) S padded[kStep];
      load_rest(from, rest.n, padded);
      Format::template load<kStep>(padded, buffer);
    }
  }
};

template <class Format>
struct Out {
  using T = typename Format::Number;
  using S = typename Format::Stored;
  static constexpr bool kPlain = sizeof(T) == sizeof(S);
  alignas(64) T buffer[kStep];
  T* lane;

  FT_METHOD Out(S* to, Whole) {
    if constexpr (kPlain)
      lane = to;
    else
      lane = buffer;
  }
  FT_METHOD Out(S*, Rest) : lane(buffer) {}
  FT_METHOD void finish(S* to, Whole) const {
    if constexpr (!kPlain) Format::template store<kStep>(buffer, to);
  }
  FT_METHOD void finish(S* to, Rest rest) const {
    if constexpr (kPlain) {
      store_rest(buffer, rest.n, to);
    } else {
      alignas(64) S padded[kStep];
      Format::template store<kStep>(buffer, padded);
      store_rest(padded, rest.n, to);
    }
  }
};

// One number for all lanes.
template <class T>
struct Same {
  T value;
  FT_METHOD T operator[](int) const { return value; }
};

// The sum over the lanes of a step. Halves are added to halves: of a plane of 7 x 7 its two totals
// took half of the time as loops over arrays (0.45 ns an element for the statistics, 0.24 so).
template <class T>
FT_METHOD T total(const T* lanes) {
  typedef T All __attribute__((vector_size(kStep * sizeof(T))));
  typedef T Half __attribute__((vector_size(kStep / 2 * sizeof(T))));
  typedef T Quarter __attribute__((vector_size(kStep / 4 * sizeof(T))));
  typedef T Eighth __attribute__((vector_size(kStep / 8 * sizeof(T))));
  union {
    All sum;
    Half part[2];
  } a;
  __builtin_memcpy(&a, lanes, sizeof(a));
  union {
    Half sum;
    Quarter part[2];
  } b = {a.part[0] + a.part[1]};
  union {
    Quarter sum;
    Eighth part[2];
  } c = {b.part[0] + b.part[1]};
  const Eighth d = c.part[0] + c.part[1];
  return (d[0] + d[1]) + (d[2] + d[3]);
}

FT_END_NAMESPACE
