// Loops between states in 8-bit codes and the floats that rules compute with.
#pragma once

#include "lanes.h"  // before the formulas, which call its functions

#include "../../optimizer_step.h"
#include "../../state_codes.h"
#include "kernels.h"

FT_BEGIN_NAMESPACE

template <class Codes>
FT_METHOD void load_group(const typename Codes::Code* codes, float scale, float* x) {
#ifdef FT_LANES
  for (int i = 0; i < kGroup; i += FT_LANES)
    Codes::value(number(IntLanes::load(codes + i)), Lanes(scale)).store(x + i);
#else
#pragma GCC ivdep
  for (int lane = 0; lane < kGroup; ++lane) x[lane] = Codes::value(number(codes[lane]), scale);
#endif
}

// Loads elements that begin with a group.
template <class Codes>
void load_codes(const void* from, const float* scales, float* x, int64_t n) {
  const auto* const codes = static_cast<const typename Codes::Code*>(from);
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) load_group<Codes>(codes + i, scales[i / kGroup], x + i);
  for (; i < n; ++i) x[i] = Codes::value(number(codes[i]), scales[i / kGroup]);
}

FT_METHOD float scale_of(const float* x) {
  uint32_t most = 0;
  for (int lane = 0; lane < kGroup; ++lane) {
    const uint32_t bits = magnitude_bits(x[lane]);
    most = bits > most ? bits : most;
  }
  return group_scale(most);
}

constexpr int kGroups = kSharedBy;  // whose scales and factors are computed at once

#ifdef FT_LANES
// The largest magnitudes of eight columns of a group: integers, in which NaN is the largest.
FT_METHOD __m256i largest_of_columns(const float* x) {
#if FT_LANES == 16
  const __m512i most = _mm512_max_epu32(_mm512_castps_si512(magnitude(Lanes::load(x)).all),
                                        _mm512_castps_si512(magnitude(Lanes::load(x + 16)).all));
  return _mm256_max_epu32(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
#else
  __m256i most = _mm256_setzero_si256();
  for (int i = 0; i < kGroup; i += FT_LANES)
    most = _mm256_max_epu32(most, _mm256_castps_si256(magnitude(Lanes::load(x + i)).all));
  return most;
#endif
}

// Columns of neighbouring groups are halved together: 21 operations for eight groups, not 64.
FT_METHOD void scales_of_groups(const float* x, float* scales) {
  __m256i most[kGroups];
  for (int k = 0; k < kGroups; ++k) most[k] = largest_of_columns(x + k * kGroup);
  for (int k = 0; k < kGroups; k += 2)
    most[k / 2] = _mm256_max_epu32(_mm256_unpacklo_epi32(most[k], most[k + 1]),
                                   _mm256_unpackhi_epi32(most[k], most[k + 1]));
  for (int k = 0; k < kGroups / 2; k += 2)
    most[k / 2] = _mm256_max_epu32(_mm256_unpacklo_epi64(most[k], most[k + 1]),
                                   _mm256_unpackhi_epi64(most[k], most[k + 1]));
  const __m256i all = _mm256_max_epu32(_mm256_permute2x128_si256(most[0], most[1], 0x20),
                                       _mm256_permute2x128_si256(most[0], most[1], 0x31));
  // group_scale of each; the highest bit is clear, so signed comparisons do
  const __m256i least = _mm256_set1_epi32(kLeastScale), beyond = _mm256_set1_epi32(kMostScale - 1);
  const __m256i normal = _mm256_andnot_si256(_mm256_cmpgt_epi32(least, all), all);
  const __m256i bits =
      _mm256_blendv_epi8(normal, _mm256_set1_epi32(kNanScale), _mm256_cmpgt_epi32(all, beyond));
  _mm256_storeu_ps(scales, _mm256_castsi256_ps(bits));
}

// Magnitudes of four registers with the signs of x, as bytes. Packing goes by 128 bits.
template <class Code>
FT_METHOD void store_bytes(const float* x, const IntLanes* n, Code* codes) {
  const bool is_signed = Code(-1) < 0;
#if FT_LANES == 16
  const auto packed = [](__m512i a, __m512i b, __m512i c,
                         __m512i d) __attribute__((always_inline)) {
    return _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
  };
  const auto at = [&](int i) __attribute__((always_inline)) { return _mm512_loadu_si512(x + i); };
  __m512i bytes = _mm512_packus_epi16(_mm512_packs_epi32(n[0].all, n[1].all),
                                      _mm512_packs_epi32(n[2].all, n[3].all));
  if (is_signed)  // saturated, the integers that x consists of keep their signs
    bytes = _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(packed(at(0), at(16), at(32), at(48))),
                                 _mm512_setzero_si512(), bytes);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(codes, _mm512_permutexvar_epi32(order, bytes));
#else
  const auto at = [&](int i) __attribute__((always_inline)) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
  };
  __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(n[0].all, n[1].all),
                                      _mm256_packs_epi32(n[2].all, n[3].all));
  if (is_signed)  // saturated, the integers that x consists of keep their signs
    bytes = _mm256_sign_epi8(bytes, _mm256_packs_epi16(_mm256_packs_epi32(at(0), at(8)),
                                                       _mm256_packs_epi32(at(16), at(24))));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(bytes, order));
#endif
}
#else
FT_METHOD void scales_of_groups(const float* x, float* scales) {
  for (int k = 0; k < kGroups; ++k) scales[k] = scale_of(x + k * kGroup);
}
#endif

FT_METHOD void clear(void* codes) { __builtin_memset(codes, 0, kGroup); }

// Codes of some groups, from their scales and factors.
#ifdef FT_LANES
constexpr int kTogether = 4 * FT_LANES / kGroup;

template <class Codes>
FT_METHOD void round_groups(const float* x, typename Codes::Code* codes, const float* scales,
                            const float* factors, const float* chances) {
  IntLanes rounded[4];
  for (int i = 0; i < 4; ++i) {
    const int at = i * FT_LANES, group = at / kGroup;
    rounded[i] =
        Codes::code_of_magnitude(magnitude(Lanes::load(x + at)), Lanes(scales[group]),
                                 Lanes(factors[group]), Lanes::load(chances + at % kGroup));
  }
  store_bytes(x, rounded, codes);
  for (int k = 0; k < kTogether; ++k)
    if (!(scales[k] > 0)) clear(codes + k * kGroup);
}
#else
constexpr int kTogether = 1;

template <class Codes>
FT_METHOD void round_groups(const float* x, typename Codes::Code* codes, const float* scales,
                            const float* factors, const float* chances) {
  if (!(scales[0] > 0)) return clear(codes);
  int32_t rounded[kGroup];
  for (int lane = 0; lane < kGroup; ++lane)
    rounded[lane] = Codes::code(x[lane], scales[0], factors[0], chances[lane]);
  for (int lane = 0; lane < kGroup; ++lane)
    codes[lane] = static_cast<typename Codes::Code>(rounded[lane]);
}
#endif

// The codes and scales of eight groups that share their random bits. Scales first: what follows a
// group's largest number waits for nothing then (0.72 and 0.81 ns an element in one pass, AMD EPYC,
// AVX2).
template <class Codes>
FT_METHOD void store_groups(const float* x, typename Codes::Code* codes, float* scales,
                            uint32_t random) {
  alignas(64) float chances[kGroup], factors[kGroups];
  for (int lane = 0; lane < kGroup; ++lane)
    chances[lane] = rounding_chance(random, static_cast<uint32_t>(lane));
  scales_of_groups(x, scales);
  for (int k = 0; k < kGroups; ++k) factors[k] = Codes::factor(scales[k]);
  for (int k = 0; k < kGroups; k += kTogether)
    round_groups<Codes>(x + k * kGroup, codes + k * kGroup, scales + k, factors + k, chances);
}

// `group`: the number of the first in its tensor, a multiple of kSharedBy. The rest goes through a
// buffer of whole groups.
template <class Codes>
void store_codes(const float* x, void* to, float* scales, int64_t n, uint32_t group, int state,
                 uint32_t key) {
  using Code = typename Codes::Code;
  constexpr int kPiece = kGroups * kGroup;
  Code* const codes = static_cast<Code*>(to);
  const auto random_at = [&](int64_t i) __attribute__((always_inline)) {
    return random_bits(random_index(group + static_cast<uint32_t>(i / kGroup), state), key);
  };
  int64_t i = 0;
  for (; i + kPiece <= n; i += kPiece)
    store_groups<Codes>(x + i, codes + i, scales + i / kGroup, random_at(i));
  if (i == n) return;
  float last[kPiece] = {}, last_scales[kGroups];
  Code last_codes[kPiece];
  for (int64_t j = i; j < n; ++j) last[j - i] = x[j];
  store_groups<Codes>(last, last_codes, last_scales, random_at(i));
  for (int64_t j = i; j < n; ++j) codes[j] = last_codes[j - i];
  for (int64_t k = i / kGroup; k * kGroup < n; ++k) scales[k] = last_scales[k - i / kGroup];
}

FT_END_NAMESPACE
