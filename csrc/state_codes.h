// Optimizer states in 8 bits: 32 neighbouring elements in memory share a float32 scale, the largest
// magnitude among them (docs/decisions/0013-eight-bit-states.md).
//
// Codes are rounded at random, so that the mean of the stored number is the number: updates that
// are smaller than half a code are not lost. All backends give equal codes: divisions are those of
// IEEE, and a product that a sum follows is exact, so that fused multiplies change no bit.
#pragma once

#include <stdint.h>

#include "host_device.h"
#include "vecmath.h"

FT_BEGIN_NAMESPACE

constexpr int kGroup = 32;
constexpr uint32_t kLeastScale = 0x0d800000u;  // bits of 2^-100: groups below become 0
constexpr uint32_t kMostScale = 0x7b000000u;   // bits of 2^119: groups from there on become NaN
constexpr uint32_t kNanScale = 0x7fc00000u;
constexpr uint32_t kStateStream = 1u << 30;
constexpr int kSharedBy = 8;  // groups that follow each other have the same random bits

// Products and divisions that have the bits of IEEE on CUDA, too, and a root: nvcc makes sums of
// products, and is told to approximate the others (setup.py). Its exact functions call a slow path
// for 0, which is a common code. (The emulator of the tests is no nvcc.)
FT_INLINE float product(float a, float b) {
#if defined(__CUDA_ARCH__) && defined(__NVCC__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// b is normal, or the result is not used; a quotient below 2^-80 need not be the nearest number.
FT_INLINE float quotient(float a, float b) {
#if defined(__CUDA_ARCH__) && defined(__NVCC__)
  // With 1 <= b < 2, what follows the approximation is nvcc's own division.
  const float power = __uint_as_float(0x7f000000u - (__float_as_uint(b) & 0x7f800000u));
  a = __fmul_rn(a, power);
  b = __fmul_rn(b, power);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  inverse = __fmaf_rn(inverse, __fmaf_rn(-b, inverse, 1.0f), inverse);
  const float q = __fmul_rn(a, inverse);
  return __fmaf_rn(inverse, __fmaf_rn(-b, q, a), q);
#elif defined(__CUDA_ARCH__)
  return ::emulated_quotient(a, b);
#else
  return a / b;
#endif
}

// x >= 0. Within 2^-23 of itself, or below 1 where x is below 2^-100: enough for SquareCodes.
FT_INLINE float root(float x) {
#if defined(__CUDA_ARCH__) && defined(__NVCC__)
  const float a = fmaxf(x, 0x1p-100f);
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a));
  const float r = __fmul_rn(a, inverse);
  return __fmaf_rn(__fmaf_rn(-r, r, a), __fmul_rn(inverse, 0.5f), r);
#elif defined(__CUDA_ARCH__)
  return ::emulated_root(x);
#else
  return math::sqrt(x);
#endif
}

FT_INLINE uint32_t magnitude_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffffu;
}

FT_INLINE int32_t sign_bits(float x) {  // -1 below 0
  int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits >> 31;
}

// The scale of a group with that largest magnitude.
FT_INLINE float group_scale(uint32_t most) {
  const uint32_t bits = most >= kMostScale ? kNanScale : (most < kLeastScale ? 0u : most);
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return scale;
}

// From 2^-14 to 1 - 2^-14, for an element of a group with 32 random bits. The 13 bits are few
// enough that the rounding of q below decides nothing: what a code stands for has that code again.
FT_INLINE float rounding_chance(uint32_t random, uint32_t lane) {
  const uint32_t bits = (random + lane * 0x9e3779b9u) >> 19;
  return static_cast<float>(static_cast<int32_t>(2 * bits + 1)) * 0x1p-14f;
}

// Index whose hash is an element's random bits.
FT_INLINE uint32_t random_index(uint32_t group, int state) {
  return group / kSharedBy + static_cast<uint32_t>(state + 1) * kStateStream;
}

// Operations of the formulas below, on one number (cpu/isa/lanes.h: on a register full of them).
FT_INLINE float magnitude(float x) { return math::abs(x); }
FT_INLINE int32_t truncated(float x) { return static_cast<int32_t>(x); }
FT_INLINE float number(int32_t n) { return static_cast<float>(n); }
FT_INLINE float quotient_of_code(float k, float b) { return quotient(k, b); }
FT_INLINE int32_t one_more_where_less(int32_t n, float a, float b) { return n + (a < b); }
FT_INLINE float one_at_most(float x) { return x < 1.0f ? x : 1.0f; }

// The code of a magnitude is that of the upper neighbour where `chance` is below the number's share
// of the distance between both. All codes of a group whose scale is 0 or NaN are 0, without
// these functions.

// Momenta: with r = x / scale, codes of q = 127 * 2 r / (1 + |r|) = 254 - 254 / (1 + |r|).
struct SignedCodes {
  using Code = int8_t;
  FT_METHOD static float factor(float scale) { return 254.0f * scale; }
  template <class Number>
  FT_METHOD static Number value(Number k, Number scale) {
    return product(scale, quotient_of_code(k, 254.0f - magnitude(k)));
  }
  template <class Number>
  FT_METHOD static auto code_of_magnitude(Number a, Number scale, Number factor, Number chance) {
    const Number rest = quotient(factor, scale + a), q = 254.0f - rest;
    const auto below = truncated(q);
    const Number k = number(below);
    return one_more_where_less(below, chance * rest, (q - k) * (253.0f - k));
  }
  FT_METHOD static int32_t code(float x, float scale, float factor, float chance) {
    const int32_t code = code_of_magnitude(magnitude(x), scale, factor, chance);
    const int32_t sign = sign_bits(x);
    return (code ^ sign) - sign;
  }
};

// Averages of squares: codes k of 255 sqrt(r), in which a number's share of the distance to the
// next is (q^2 - k^2) / (2 k + 1). A number > 0 has a code of 1 at least, since rules divide by its
// root. A root that is wrong in its last bit is no wrong code: it can only take a number near k^2
// for one beyond, and chances are never so near to 0 or 1.
struct SquareCodes {
  using Code = uint8_t;
  FT_METHOD static float factor(float scale) { return quotient(65025.0f, scale); }
  template <class Number>
  FT_METHOD static Number value(Number k, Number scale) {
    return product(scale, k * k * (1.0f / 65025.0f));
  }
  template <class Number>
  FT_METHOD static auto code_of_magnitude(Number a, Number, Number factor, Number chance) {
    const Number square = product(a, factor);
    const auto below = truncated(root(square));
    const Number k = number(below);
    return one_more_where_less(below, chance * (k + k + one_at_most(k)) + k * k, square);
  }
  FT_METHOD static int32_t code(float x, float scale, float factor, float chance) {
    return code_of_magnitude(magnitude(x), scale, factor, chance);
  }
};

FT_END_NAMESPACE
