// Optimizer states in 8 bits: 32 neighbouring elements in memory share a float32 scale, the largest
// magnitude among them (docs/decisions/0013-eight-bit-states.md).
//
// Codes are rounded at random, so that the mean of the stored number is the number: updates that
// are smaller than half a code are not lost. No operation is a product that a sum follows, so that
// fused multiplies change no bit, and divisions are those of IEEE: all backends give equal codes.
#pragma once

#include <stdint.h>

#include "host_device.h"
#include "vecmath.h"

FT_BEGIN_NAMESPACE

constexpr int kGroup = 32;
constexpr uint32_t kLeastScale = 0x0d800000u;  // bits of 2^-100: groups below become 0
constexpr uint32_t kMostScale = 0x7b000000u;   // bits of 2^119: groups from there on become NaN
constexpr uint32_t kStateStream = 1u << 30;
constexpr int kSharedBy = 8;  // groups that follow each other have the same random bits

// Products, divisions and roots that have the bits of IEEE on CUDA, too: nvcc makes sums of
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
#else
  return a / b;
#endif
}

// x >= 0; of a number below 2^-100 the result need only be below 2^-49, and 0 if the number is.
FT_INLINE float root(float x) {
#if defined(__CUDA_ARCH__) && defined(__NVCC__)
  const float a = fmaxf(x, 0x1p-100f);
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a));
  const float r = __fmul_rn(a, inverse);  // from here on nvcc's own root
  const float nearest = __fmaf_rn(__fmaf_rn(-r, r, a), __fmul_rn(inverse, 0.5f), r);
  return x > 0.0f ? nearest : 0.0f;
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
  const uint32_t bits = most >= kMostScale ? 0x7fc00000u : (most < kLeastScale ? 0u : most);
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

// What an element's random bits are a hash of.
FT_INLINE uint32_t random_index(uint32_t group, int state) {
  return group / kSharedBy + static_cast<uint32_t>(state + 1) * kStateStream;
}

// The code of a number is that of the upper neighbour where `chance` is below the number's share
// of the distance between both. All codes of a group whose scale is 0 or NaN are 0, without
// these functions.

// Momenta: with r = x / scale, codes of q = 127 * 2 r / (1 + |r|) = 254 - 254 / (1 + |r|).
struct SignedCodes {
  using Code = int8_t;
  FT_METHOD static float factor(float scale) { return 254.0f * scale; }
  FT_METHOD static float value(int32_t code, float scale) {
    const float k = static_cast<float>(code);
    return product(scale, quotient(k, 254.0f - math::abs(k)));
  }
  FT_METHOD static int32_t code(float x, float scale, float factor, float chance) {
    const float rest = quotient(factor, scale + math::abs(x)), q = 254.0f - rest;
    const int32_t below = static_cast<int32_t>(q);
    const float k = static_cast<float>(below);
    const int32_t upper = chance * rest < (q - k) * (253.0f - k);
    const int32_t sign = sign_bits(x);
    return ((below + upper) ^ sign) - sign;
  }
};

// Averages of squares: codes of q = 255 sqrt(r). A number > 0 has a code of 1 at least, since rules
// divide by its root.
struct SquareCodes {
  using Code = uint8_t;
  FT_METHOD static float factor(float scale) { return quotient(65025.0f, scale); }
  FT_METHOD static float value(int32_t code, float scale) {
    const float k = static_cast<float>(code);
    return product(scale, k * k * (1.0f / 65025.0f));
  }
  FT_METHOD static int32_t code(float x, float, float factor, float chance) {
    const float q = root(product(math::abs(x), factor));
    const int32_t below = static_cast<int32_t>(q);
    const float k = static_cast<float>(below);
    const int32_t upper = (chance + chance) * (k + 0.5f) < (q - k) * (k + q);
    const int32_t least = q > 0.0f;
    const int32_t rounded = below + upper;
    return rounded < least ? least : rounded;
  }
};

FT_END_NAMESPACE
