// A register of floats as a number of formulas that are templates of their number:
// csrc/state_codes.h and, with AVX-512, csrc/optimizer_rules.h. For loops that the compiler's own
// vectors do not make well enough.
#pragma once

#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../../host_device.h"
#include "../../vecmath.h"

FT_BEGIN_NAMESPACE

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define FT_LANES 16

struct Lanes {
  __m512 all;
  FT_METHOD Lanes(__m512 x) : all(x) {}
  FT_METHOD Lanes(float x) : all(_mm512_set1_ps(x)) {}
  FT_METHOD static Lanes load(const float* from) { return _mm512_loadu_ps(from); }
  FT_METHOD void store(float* to) const { _mm512_storeu_ps(to, all); }
};
struct IntLanes {
  __m512i all;
  FT_METHOD static IntLanes load(const int8_t* from) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }
  FT_METHOD static IntLanes load(const uint8_t* from) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }
};

FT_METHOD Lanes operator+(Lanes a, Lanes b) { return _mm512_add_ps(a.all, b.all); }
FT_METHOD Lanes operator-(Lanes a, Lanes b) { return _mm512_sub_ps(a.all, b.all); }
FT_METHOD Lanes operator*(Lanes a, Lanes b) { return _mm512_mul_ps(a.all, b.all); }
FT_METHOD Lanes operator/(Lanes a, Lanes b) { return _mm512_div_ps(a.all, b.all); }
FT_METHOD Lanes& operator+=(Lanes& a, Lanes b) { return a = a + b; }
FT_METHOD Lanes product(Lanes a, Lanes b) { return a * b; }
FT_METHOD Lanes quotient(Lanes a, Lanes b) { return _mm512_div_ps(a.all, b.all); }
// k is an integer up to 127, b = 254 - k. The bits of k / b for any estimate within 2^-14 of 1 / b
// (all were tried). Loading momenta, ns an element, Intel Xeon: 0.18 with a division, 0.13 so.
FT_METHOD Lanes quotient_of_code(Lanes k, Lanes b) {
  __m512 inverse = _mm512_rcp14_ps(b.all);
  const __m512 error = _mm512_fnmadd_ps(b.all, inverse, _mm512_set1_ps(1.0f));
  inverse = _mm512_fmadd_ps(inverse, error, inverse);
  const __m512 q = _mm512_mul_ps(k.all, inverse);
  return _mm512_fmadd_ps(inverse, _mm512_fnmadd_ps(b.all, q, k.all), q);
}
FT_METHOD Lanes root(Lanes x) { return _mm512_sqrt_ps(x.all); }
FT_METHOD Lanes magnitude(Lanes x) { return _mm512_abs_ps(x.all); }
FT_METHOD IntLanes truncated(Lanes x) { return {_mm512_cvttps_epi32(x.all)}; }
FT_METHOD Lanes number(IntLanes n) { return _mm512_cvtepi32_ps(n.all); }
FT_METHOD IntLanes one_more_where_less(IntLanes n, Lanes a, Lanes b) {
  const __mmask16 less = _mm512_cmp_ps_mask(a.all, b.all, _CMP_LT_OQ);
  return {_mm512_mask_add_epi32(n.all, less, n.all, _mm512_set1_epi32(1))};
}
FT_METHOD Lanes one_at_most(Lanes x) { return _mm512_min_ps(x.all, _mm512_set1_ps(1.0f)); }

namespace math {

// Within 1 ULP, of all x. Beside a division, whose unit takes IEEE's root as well: Adam takes 0.40
// ns an element with that root, in cache, and 0.24 so (Intel Xeon).
FT_METHOD Lanes sqrt(Lanes x) {
  const __m512 inverse = _mm512_rsqrt14_ps(x.all), r = _mm512_mul_ps(x.all, inverse);
  const __m512 error = _mm512_fnmadd_ps(r, inverse, _mm512_set1_ps(1.0f));
  const __m512 root = _mm512_fmadd_ps(_mm512_mul_ps(r, _mm512_set1_ps(0.5f)), error, r);
  return _mm512_fixupimm_ps(root, x.all, _mm512_set1_epi32(0x00100100), 0);  // 0 and inf: x itself
}
FT_METHOD Lanes at_least(Lanes x, Lanes low) { return _mm512_max_ps(low.all, x.all); }
FT_METHOD Lanes largest(Lanes a, Lanes b) {
  const __mmask16 nan = _mm512_cmp_ps_mask(a.all, a.all, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(_mm512_max_ps(a.all, b.all), nan, a.all);
}

}  // namespace math

#elif defined(__AVX2__)
#define FT_LANES 8

struct Lanes {
  __m256 all;
  FT_METHOD Lanes(__m256 x) : all(x) {}
  FT_METHOD Lanes(float x) : all(_mm256_set1_ps(x)) {}
  FT_METHOD static Lanes load(const float* from) { return _mm256_loadu_ps(from); }
  FT_METHOD void store(float* to) const { _mm256_storeu_ps(to, all); }
};
struct IntLanes {
  __m256i all;
  FT_METHOD static IntLanes load(const int8_t* from) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)))};
  }
  FT_METHOD static IntLanes load(const uint8_t* from) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)))};
  }
};

FT_METHOD Lanes operator+(Lanes a, Lanes b) { return _mm256_add_ps(a.all, b.all); }
FT_METHOD Lanes operator-(Lanes a, Lanes b) { return _mm256_sub_ps(a.all, b.all); }
FT_METHOD Lanes operator*(Lanes a, Lanes b) { return _mm256_mul_ps(a.all, b.all); }
FT_METHOD Lanes product(Lanes a, Lanes b) { return a * b; }
FT_METHOD Lanes quotient(Lanes a, Lanes b) { return _mm256_div_ps(a.all, b.all); }
FT_METHOD Lanes quotient_of_code(Lanes k, Lanes b) { return quotient(k, b); }
FT_METHOD Lanes root(Lanes x) { return _mm256_sqrt_ps(x.all); }
FT_METHOD Lanes magnitude(Lanes x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.all); }
FT_METHOD IntLanes truncated(Lanes x) { return {_mm256_cvttps_epi32(x.all)}; }
FT_METHOD Lanes number(IntLanes n) { return _mm256_cvtepi32_ps(n.all); }
// Masks are -1 where true.
FT_METHOD IntLanes one_more_where_less(IntLanes n, Lanes a, Lanes b) {
  const __m256i less = _mm256_castps_si256(_mm256_cmp_ps(a.all, b.all, _CMP_LT_OQ));
  return {_mm256_sub_epi32(n.all, less)};
}
FT_METHOD Lanes one_at_most(Lanes x) { return _mm256_min_ps(x.all, _mm256_set1_ps(1.0f)); }
#endif

FT_END_NAMESPACE
