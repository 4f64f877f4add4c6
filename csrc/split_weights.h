// Float32 weights as two numbers: a 16-bit parameter, and a correction of kBits = 16 or 8 bits.
//
// bfloat16: the bits of a weight, or its 24 upper bits, are (parameter << 16) + correction. The
// parameter is the nearest one, with ties away from 0: the correction cannot hold the tie that goes
// to even. float16: the correction counts 2^-kBits of the parameter's unit in the last place.
// Infinities and NaN have a correction of 0.
#pragma once

#include <stdint.h>

#include "host_device.h"

FT_BEGIN_NAMESPACE

struct SplitWeight {
  uint32_t param;  // 16 bits
  int32_t correction;
};

FT_INLINE float weight_of_bits(uint32_t bits) {
  float weight;
  __builtin_memcpy(&weight, &bits, sizeof weight);
  return weight;
}
FT_INLINE uint32_t bits_of_weight(float weight) {
  uint32_t bits;
  __builtin_memcpy(&bits, &weight, sizeof bits);
  return bits;
}

template <int kBits>
FT_INLINE float join_bfloat16(uint32_t param, int32_t correction) {
  return weight_of_bits((param << 16) + (static_cast<uint32_t>(correction) << (16 - kBits)));
}

constexpr uint32_t kNearest24 = 0x80;  // half a unit of the 24 bits that remain

// `added`: to the 8 bits that kBits = 8 cuts: kNearest24, or 8 random bits. A finite weight stays
// finite.
template <int kBits>
FT_INLINE SplitWeight split_bfloat16(float weight, uint32_t added) {
  uint32_t bits = bits_of_weight(weight);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t special = (bits >> 16) | (magnitude > 0x7f800000u ? 0x40u : 0u);
  if (kBits == 8) {
    const uint32_t rounded = magnitude + added;
    bits = (bits & 0x80000000u) | ((rounded < 0x7f7fffffu ? rounded : 0x7f7fffffu) & 0xffffff00u);
  }
  const uint32_t param = (bits + 0x8000u) >> 16;
  const int32_t correction = static_cast<int32_t>(bits - (param << 16)) >> (16 - kBits);
  const bool finite = magnitude < 0x7f800000u;
  return {finite ? param : special, finite ? correction : 0};
}

// The exponent of a float16, that of denormals as they count.
FT_INLINE int32_t half_exponent(uint32_t param) {
  const int32_t exponent = static_cast<int32_t>(param >> 10 & 31u);
  return exponent > 1 ? exponent : 1;
}
FT_INLINE bool half_is_finite(uint32_t param) { return (param & 0x7c00u) != 0x7c00u; }
FT_INLINE float power_of_two(int32_t n) {
  return weight_of_bits(static_cast<uint32_t>(n + 127) << 23);
}

// `value`: of the parameter.
template <int kBits>
FT_INLINE float join_half(float value, uint32_t param, int32_t correction) {
  const float step = power_of_two(half_exponent(param) - 25 - kBits);
  const float weight = value + static_cast<float>(correction) * step;
  return half_is_finite(param) ? weight : value;
}

// The correction of a weight whose nearest float16 is `param`. Both halves of a tie fit only if
// corrections are symmetric: a weight that is split, joined and split again stays what it was.
template <int kBits>
FT_INLINE int32_t half_correction(float weight, float value, uint32_t param) {
  constexpr int32_t kMost = (1 << (kBits - 1)) - 1;
  constexpr float kRound = 12582912.0f;  // 1.5 2^23: the sum's low bits are the rounded number
  const float steps = (weight - value) * power_of_two(25 + kBits - half_exponent(param));
  const int32_t rounded = static_cast<int32_t>(bits_of_weight(steps + kRound) - 0x4b400000u);
  const int32_t clamped = rounded < -kMost ? -kMost : (rounded > kMost ? kMost : rounded);
  return half_is_finite(param) ? clamped : 0;
}

FT_END_NAMESPACE
