// Activations whose derivative is kept in few bits (../few_bit.h), a block of codes at a time.
#pragma once

#include "../../bits.h"
#include "../../few_bit.h"
#include "kernels.h"
#include "steps.h"

FT_BEGIN_NAMESPACE

static_assert(kStep == kBitStep, "a step of a loop is a step of a block");

// A number that the compiler knows.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls f with the size of codes as such a number.
template <class F>
FT_METHOD void with_bits(int bits, const F& f) {
  if (bits == 1) return f(Constant<1>());
  if (bits == 2) return f(Constant<2>());
  if (bits == 3) return f(Constant<3>());
  if (bits == 4) return f(Constant<4>());
  f(Constant<8>());
}

// Eight codes at once: none is shifted out of its byte.
typedef uint64_t Eight;
constexpr int kEights = kBitStep / 8;
constexpr Eight each_byte(unsigned mask) { return Eight(0x0101010101010101) * mask; }

template <int kBits>
FT_METHOD void pack(const Eight* codes, Eight* packed) {
  constexpr int kLow = low_bits(kBits);
  for (int run = 0; run < kLow; ++run)
    for (int i = 0; i < kEights; ++i) {
      Eight sum = 0;
      for (int step = run; step < kBitSteps; step += kLow)
        sum |= (codes[step * kEights + i] & each_byte((1 << kLow) - 1)) << shift_of(step, kBits);
      packed[run * kEights + i] = sum;
    }
  if constexpr (kBits == 3)
    for (int i = 0; i < kEights; ++i) {
      Eight sum = 0;
      for (int step = 0; step < kBitSteps; ++step)
        sum |= (codes[step * kEights + i] >> 2 & each_byte(1)) << step;
      packed[2 * kEights + i] = sum;
    }
}

template <int kBits>
FT_METHOD void unpack(const Eight* packed, int step, Eight* codes) {
  constexpr int kLow = low_bits(kBits);
  const Eight* run = packed + run_of(step, kBits) * kEights;
  for (int i = 0; i < kEights; ++i) {
    codes[i] = run[i] >> shift_of(step, kBits) & each_byte((1 << kLow) - 1);
    if constexpr (kBits == 3) codes[i] |= (packed[2 * kEights + i] >> step & each_byte(1)) << 2;
  }
}

// Units of n slopes of a block to its packed codes. Not inlined: five sizes of codes in each loop
// were half of the time to compile this file (20 and 9 s).
template <int kBits, class T>
__attribute__((noinline)) void encode(const T* units, int64_t n, uint8_t* packed,
                                      const Slopes<T>& given) {
  const Slopes<T> slopes = given;  // which no store to code can change
  alignas(64) uint8_t code[kBitBlock];
  for (int i = 0; i < kBitBlock; ++i) code[i] = uint8_t(int(units[i]));
  if constexpr (kBits < 8)
    for (int i = 0; i < kBitBlock; ++i) code[i] = code_of<kBits>(code[i], slopes);
  for (int64_t i = n; i < kBitBlock; ++i) code[i] = 0;
  alignas(64) Eight words[kBitBlock / 8];
  __builtin_memcpy(words, code, sizeof words);
  alignas(64) Eight out[kBits * kEights];
  pack<kBits>(words, out);
  __builtin_memcpy(packed, out, sizeof out);
}

// n elements from the first of a block on; y may be x.
template <template <class> class Formula, bool kByOutput, class Format, class S, class T>
void few_bit_forward(const S* x, S* y, uint8_t* packed, int64_t n, int bits,
                     const Slopes<T>& given) {
  const Formula<T> formula(nullptr);
  alignas(64) T units[kBitBlock] = {};
  const Slopes<T> slopes = given;
  for (int64_t begin = 0; begin < n; begin += kBitBlock, packed += kBitStep * bits) {
    const int64_t here = n - begin < kBitBlock ? n - begin : kBitBlock;
    each_step(here, [&](int64_t i, auto part) __attribute__((always_inline)) {
      const In<Format> in(x + begin + i, part);
      Out<Format> out(y + begin + i, part);
#pragma GCC ivdep
      for (int lane = 0; lane < kStep; ++lane) {
        T value, slope;
        value_and_slope<kByOutput>(formula, in.lane[lane], value, slope);
        units[i + lane] = units_of(slope, slopes);
        out.lane[lane] = value;
      }
      out.finish(y + begin + i, part);
    });
    with_bits(bits, [&](auto constant) {
      encode<decltype(constant)::value>(units, here, packed, slopes);
    });
  }
}

// The levels of a step.
template <int kBits, class T>
FT_METHOD void levels_of_step(const uint8_t* code, const Slopes<T>& slopes, T* level) {
  for (int lane = 0; lane < kStep; ++lane) level[lane] = level_of<kBits>(code[lane], slopes);
}
// A table in a register, instead of a load for every lane.
#if defined(__AVX512F__) && defined(__AVX512BW__)
template <int kBits>
FT_METHOD void levels_of_step(const uint8_t* code, const Slopes<float>& slopes, float* level) {
  if constexpr (kBits == 8) return levels_of_step<8, float>(code, slopes, level);
  const __m512 table = _mm512_loadu_ps(slopes.level);
  for (int i = 0; i < kStep; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(code + i));
    _mm512_storeu_ps(level + i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(bytes), table));
  }
}
#elif defined(__AVX2__)
template <int kBits>
FT_METHOD void levels_of_step(const uint8_t* code, const Slopes<float>& slopes, float* level) {
  if constexpr (kBits == 8) return levels_of_step<8, float>(code, slopes, level);
  const __m256 lower = _mm256_loadu_ps(slopes.level), upper = _mm256_loadu_ps(slopes.level + 8);
  for (int i = 0; i < kStep; i += 8) {
    const __m256i at =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(code + i)));
    const __m256 from_upper = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28));  // bit 3 as the sign
    _mm256_storeu_ps(level + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(lower, at),
                                                 _mm256_permutevar8x32_ps(upper, at), from_upper));
  }
}
#endif

template <int kBits, class Format, class S, class T>
void few_bit_backward_of(const S* g, const uint8_t* packed, S* gx, int64_t n,
                         const Slopes<T>& given) {
  const Slopes<T> slopes = given;
  for (int64_t begin = 0; begin < n; begin += kBitBlock, packed += kBitStep * kBits) {
    const int64_t here = n - begin < kBitBlock ? n - begin : kBitBlock;
    alignas(64) Eight words[kBits * kEights];
    __builtin_memcpy(words, packed, sizeof words);
    each_step(here, [&](int64_t i, auto part) __attribute__((always_inline)) {
      alignas(64) Eight eights[kEights];
      alignas(64) uint8_t code[kStep];
      alignas(64) T level[kStep];
      unpack<kBits>(words, int(i / kBitStep), eights);
      __builtin_memcpy(code, eights, sizeof code);
      levels_of_step<kBits>(code, slopes, level);
      const In<Format> grad(g + begin + i, part);
      Out<Format> out(gx + begin + i, part);
#pragma GCC ivdep
      for (int lane = 0; lane < kStep; ++lane) out.lane[lane] = grad.lane[lane] * level[lane];
      out.finish(gx + begin + i, part);
    });
  }
}

template <class Format, class S, class T>
void few_bit_backward(const S* g, const uint8_t* packed, S* gx, int64_t n, int bits,
                      const Slopes<T>& slopes) {
  with_bits(bits, [&](auto constant) {
    few_bit_backward_of<decltype(constant)::value, Format>(g, packed, gx, n, slopes);
  });
}

FT_END_NAMESPACE
