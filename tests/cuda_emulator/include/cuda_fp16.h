// __half: 16 bits, and the conversions that round to nearest even.
#pragma once

#include "cuda_runtime.h"

struct __half {
  unsigned short bits;
};

__forceinline__ float __half2float(__half h) {
  const uint32_t sign = uint32_t(h.bits & 0x8000u) << 16, rest = h.bits & 0x7fffu;
  if (rest >= 0x7c00u) {  // inf and nan
    const uint32_t bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
  }
  if (rest < 0x400u) {  // denormal: a multiple of 2^-24
    const float f = float(rest) * 0x1p-24f;
    return sign ? -f : f;
  }
  const uint32_t bits = sign | ((rest << 13) + (112u << 23));
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

__forceinline__ __half __float2half_rn(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7fffu;
  } else if (bits >= 0x477ff000u) {  // from 65520 up
    half = 0x7c00u;
  } else if (bits < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the denormal in the last bits
    float scaled;
    __builtin_memcpy(&scaled, &bits, 4);
    scaled += 0.5f;
    __builtin_memcpy(&half, &scaled, 4);
    half -= 0x3f000000u;
  } else {
    half = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
  }
  return __half{static_cast<unsigned short>(sign | half)};
}
