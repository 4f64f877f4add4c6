// __nv_bfloat16: the upper half of a float, rounded to nearest even.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  unsigned short bits;
};

__forceinline__ float __bfloat162float(__nv_bfloat16 b) {
  const uint32_t bits = uint32_t(b.bits) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

__forceinline__ __nv_bfloat16 __float2bfloat16_rn(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return __nv_bfloat16{0x7fff};
  return __nv_bfloat16{static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
