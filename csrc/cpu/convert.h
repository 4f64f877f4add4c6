// 16-bit floats to float and back, round to nearest even, NaN kept (quiet).
#pragma once

#include <stdint.h>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "../host_device.h"

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

// GCC does not vectorise the two F16C conversions by itself.
inline void from_half(const uint16_t* in, float* out, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(in + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(in + i))));
#endif
  for (; i < n; ++i) out[i] = half_to_float(in[i]);
}
inline void to_half(const float* in, uint16_t* out, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i*)(out + i),
                        _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i*)(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) out[i] = float_to_half(in[i]);
}
inline void from_bfloat16(const uint16_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = bfloat16_to_float(in[i]);
}
inline void to_bfloat16(const float* in, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = float_to_bfloat16(in[i]);
}

FT_END_NAMESPACE
