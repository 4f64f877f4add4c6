// The numbers of elements [64 first, 64 (first + steps)): Philox (csrc/philox.h), eight blocks at a
// time.
#pragma once

#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../../philox.h"
#include "kernels.h"

FT_BEGIN_NAMESPACE

#if defined(__AVX2__)

// A word of eight blocks in lanes of 64 bits, of which the low halves count. The compiler's own
// vectors of AVX2 take 2.4 ns a word, these 0.65 (AMD EPYC, Zen 3, two threads on its core).
#if defined(__AVX512F__) && defined(__AVX512BW__)

struct PhiloxLanes {
  __m512i all;
  FT_METHOD PhiloxLanes(__m512i x) : all(x) {}
  FT_METHOD PhiloxLanes(uint64_t x) : all(_mm512_set1_epi64(int64_t(x))) {}
  // Counters: the lanes of a register are in the order in which store() can write them.
  FT_METHOD static PhiloxLanes from(int64_t first) {
    return _mm512_add_epi64(_mm512_set1_epi64(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  }
  FT_METHOD PhiloxLanes high() const { return _mm512_srli_epi64(all, 32); }
  FT_METHOD PhiloxLanes raised() const { return _mm512_slli_epi64(all, 32); }
};

FT_METHOD PhiloxLanes operator*(PhiloxLanes a, PhiloxLanes b) {
  return _mm512_mul_epu32(a.all, b.all);
}
FT_METHOD PhiloxLanes operator^(PhiloxLanes a, PhiloxLanes b) {
  return _mm512_xor_si512(a.all, b.all);
}

// Writes the numbers of words 0 and 1, 2 and 3, of which the first is in the high half.
FT_METHOD void store(PhiloxLanes first, PhiloxLanes second, uint32_t* numbers) {
  const __m512i pairs[] = {_mm512_unpacklo_epi64(first.all, second.all),
                           _mm512_unpackhi_epi64(first.all, second.all)};
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int i = 0; i < 2; ++i) {
    const __m512i words = _mm512_shuffle_epi32(pairs[i], _MM_PERM_CDAB);
    const __m512i others = _mm512_rol_epi32(words, 16);
    _mm512_storeu_si512(numbers + 32 * i, _mm512_permutex2var_epi64(words, low, others));
    _mm512_storeu_si512(numbers + 32 * i + 16, _mm512_permutex2var_epi64(words, high, others));
  }
}

#else

// Two registers: their steps do not wait for one another.
struct PhiloxLanes {
  __m256i low, up;
  FT_METHOD PhiloxLanes(__m256i a, __m256i b) : low(a), up(b) {}
  FT_METHOD PhiloxLanes(uint64_t x) : low(_mm256_set1_epi64x(int64_t(x))), up(low) {}
  FT_METHOD static PhiloxLanes from(int64_t first) {
    const __m256i counter = _mm256_set1_epi64x(first);
    return {_mm256_add_epi64(counter, _mm256_setr_epi64x(0, 2, 1, 3)),
            _mm256_add_epi64(counter, _mm256_setr_epi64x(4, 6, 5, 7))};
  }
  FT_METHOD PhiloxLanes high() const {
    return {_mm256_srli_epi64(low, 32), _mm256_srli_epi64(up, 32)};
  }
  FT_METHOD PhiloxLanes raised() const {
    return {_mm256_slli_epi64(low, 32), _mm256_slli_epi64(up, 32)};
  }
};

FT_METHOD PhiloxLanes operator*(PhiloxLanes a, PhiloxLanes b) {
  return {_mm256_mul_epu32(a.low, b.low), _mm256_mul_epu32(a.up, b.up)};
}
FT_METHOD PhiloxLanes operator^(PhiloxLanes a, PhiloxLanes b) {
  return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.up, b.up)};
}

// Words 0 to 3 of two blocks: their numbers, and those with exchanged halves.
FT_METHOD void store_two(__m256i pairs, uint32_t* numbers) {
  const __m256i exchange = _mm256_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13, 2,
                                            3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  const __m256i words = _mm256_shuffle_epi32(pairs, _MM_SHUFFLE(2, 3, 0, 1));
  const __m256i others = _mm256_shuffle_epi8(words, exchange);
  auto* to = reinterpret_cast<__m128i*>(numbers);
  _mm_storeu_si128(to, _mm256_castsi256_si128(words));
  _mm_storeu_si128(to + 1, _mm256_castsi256_si128(others));
  _mm_storeu_si128(to + 2, _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(to + 3, _mm256_extracti128_si256(others, 1));
}
FT_METHOD void store(PhiloxLanes first, PhiloxLanes second, uint32_t* numbers) {
  store_two(_mm256_unpacklo_epi64(first.low, second.low), numbers);
  store_two(_mm256_unpackhi_epi64(first.low, second.low), numbers + 16);
  store_two(_mm256_unpacklo_epi64(first.up, second.up), numbers + 32);
  store_two(_mm256_unpackhi_epi64(first.up, second.up), numbers + 48);
}

#endif

inline void philox_numbers(const int64_t* seed, int64_t first, int64_t steps, uint32_t* numbers) {
  const uint32_t key0 = uint32_t(seed[0]), key1 = uint32_t(uint64_t(seed[0]) >> 32);
  const uint32_t high0 = uint32_t(seed[1]), high1 = uint32_t(uint64_t(seed[1]) >> 32);
  for (int64_t i = 0; i < steps; ++i, numbers += cpu::kPhiloxStep) {
    const int64_t block = (first + i) * (cpu::kPhiloxStep / 8);
    uint32_t k0 = key0, k1 = key1;
    // Two turns, of which half is the same for all blocks: a sixth of the time.
    const uint64_t same = Philox::product(Philox::kSecond, high0);
    const uint32_t high_half = uint32_t(same >> 32) ^ uint32_t(uint64_t(block) >> 32) ^ k0;
    PhiloxLanes a = PhiloxLanes::from(block) * Philox::kFirst;
    PhiloxLanes b = (a.high() ^ uint64_t(high1 ^ k1)) * Philox::kSecond;
    k0 += Philox::kStep0;
    k1 += Philox::kStep1;
    const uint64_t next = Philox::product(Philox::kFirst, high_half);
    PhiloxLanes w0 = b.high() ^ uint64_t(uint32_t(same) ^ k0), w1 = b;
    PhiloxLanes w2 = a ^ uint64_t(uint32_t(next >> 32) ^ k1), w3 = next;
#pragma GCC unroll 7
    for (int turn = 2; turn < 9; ++turn) {
      k0 += Philox::kStep0;
      k1 += Philox::kStep1;
      a = w0 * Philox::kFirst;
      b = w2 * Philox::kSecond;
      w0 = b.high() ^ (w1 ^ uint64_t(k0));
      w1 = b;
      w2 = a.high() ^ (w3 ^ uint64_t(k1));
      w3 = a;
    }
    // The last: two words of a block in one lane.
    k0 += Philox::kStep0;
    k1 += Philox::kStep1;
    a = w0 * Philox::kFirst;
    b = w2 * Philox::kSecond;
    store(b ^ (w1 ^ uint64_t(k0)).raised(), a ^ (w3 ^ uint64_t(k1)).raised(), numbers);
  }
}

#else

inline void philox_numbers(const int64_t* seed, int64_t first, int64_t steps, uint32_t* numbers) {
  constexpr int kBlocks = cpu::kPhiloxStep / 8;
#pragma GCC ivdep
  for (int64_t i = 0; i < steps * kBlocks; ++i) {
    const Philox random(uint64_t(seed[0]), uint64_t(first * kBlocks + i), uint64_t(seed[1]));
    for (int k = 0; k < 4; ++k) {
      numbers[8 * i + k] = random.word[k];
      numbers[8 * i + 4 + k] = Philox::rotated(random.word[k], 16);
    }
  }
}

#endif

FT_END_NAMESPACE
