// 16-bit floats to float and back, round to nearest even, NaN kept (quiet).
#pragma once

#include <stdint.h>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "../../host_device.h"

FT_BEGIN_NAMESPACE

FT_INLINE float bits_to_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
FT_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

FT_INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  // The exponent is re-biased by a multiplication, which also normalises the denormals.
  const float scaled = bits_to_float(magnitude) * 0x1p112f;
  const uint32_t special = magnitude | 0x7f800000u;
  return bits_to_float(sign | (magnitude >= 0x0f800000u ? special : float_to_bits(scaled)));
#endif
}

FT_INLINE uint16_t float_to_half(float value) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: re-bias and round. Denormal ones: let a float addition do the rounding.
  const uint32_t rounded = magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u);
  const uint32_t denormal = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = magnitude >= 0x477ff000u ? 0x7c00u : rounded >> 13;
  const uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
  return static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? 0x7e00u : finite));
#endif
}

FT_INLINE float bfloat16_to_float(uint16_t b) {
  return bits_to_float(static_cast<uint32_t>(b) << 16);
}

FT_INLINE uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

// A format: blocks of numbers to float and back. The loops over a block have a constant length, a
// multiple of 16, so that the compiler keeps it in registers between load, formula and store.
constexpr int kLanes = 64;

struct Half {
  using Number = float;
  using Stored = uint16_t;

  template <int kCount = kLanes>
  static FT_METHOD void load(const uint16_t* in, float* out) {
#if defined(__AVX512F__)
    for (int i = 0; i < kCount; i += 16)
      _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(in + i))));
#elif defined(__F16C__)
    for (int i = 0; i < kCount; i += 8)
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(in + i))));
#else
    for (int i = 0; i < kCount; ++i) out[i] = half_to_float(in[i]);
#endif
  }
  template <int kCount = kLanes>
  static FT_METHOD void store(const float* in, uint16_t* out) {
#if defined(__AVX512F__)
    for (int i = 0; i < kCount; i += 16)
      _mm256_storeu_si256((__m256i*)(out + i),
                          _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (int i = 0; i < kCount; i += 8)
      _mm_storeu_si128((__m128i*)(out + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kCount; ++i) out[i] = float_to_half(in[i]);
#endif
  }
};

struct BFloat16 {
  using Number = float;
  using Stored = uint16_t;

  template <int kCount = kLanes>
  static FT_METHOD void load(const uint16_t* in, float* out) {
    for (int i = 0; i < kCount; ++i) out[i] = bfloat16_to_float(in[i]);
  }
  template <int kCount = kLanes>
  static FT_METHOD void store(const float* in, uint16_t* out) {
#if defined(__AVX512F__)
    for (int i = 0; i < kCount; i += 16) {
      const __m512 value = _mm512_loadu_ps(in + i);
      const __m512i bits = _mm512_castps_si512(value);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
      const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
      const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
      const __m512i kept = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
      _mm256_storeu_si256((__m256i*)(out + i), _mm512_cvtepi32_epi16(kept));
    }
#elif defined(__AVX2__)
    for (int i = 0; i < kCount; i += 16) {
      const __m256i low = rounded(in + i), high = rounded(in + i + 8);
      const __m256i packed = _mm256_packus_epi32(low, high);
      _mm256_storeu_si256((__m256i*)(out + i), _mm256_permute4x64_epi64(packed, 0xd8));
    }
#else
    for (int i = 0; i < kCount; ++i) out[i] = float_to_bfloat16(in[i]);
#endif
  }
#if defined(__AVX2__)
  static FT_METHOD __m256i rounded(const float* in) {
    const __m256 value = _mm256_loadu_ps(in);
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(nearest, _mm256_set1_epi32(0x7fc0), nan);
  }
#endif
};

// Any number of elements; the tail goes through a block too, so every element sees the same code.
template <class Format>
void from_16bit(const uint16_t* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Format::load(in + i, out + i);
  if (i == n) return;
  uint16_t narrow[kLanes] = {};
  float wide[kLanes];
  for (int64_t k = 0; k < n - i; ++k) narrow[k] = in[i + k];
  Format::load(narrow, wide);
  for (int64_t k = 0; k < n - i; ++k) out[i + k] = wide[k];
}
template <class Format>
void to_16bit(const float* in, uint16_t* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Format::store(in + i, out + i);
  if (i == n) return;
  float wide[kLanes] = {};
  uint16_t narrow[kLanes];
  for (int64_t k = 0; k < n - i; ++k) wide[k] = in[i + k];
  Format::store(wide, narrow);
  for (int64_t k = 0; k < n - i; ++k) out[i + k] = narrow[k];
}

FT_END_NAMESPACE
