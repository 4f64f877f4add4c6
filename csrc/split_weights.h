// Float32 weights as two numbers: a 16-bit parameter, and a correction of kBits = 16 or 8 bits.
//
// bfloat16: the bits of a weight, or its 24 upper bits, are (parameter << 16) + correction. The
// parameter is the nearest one, with ties away from 0: the correction cannot hold the tie that goes
// to even. float16: the correction counts 2^-kBits of the parameter's unit in the last place.
// Infinities, NaN and zeros of bfloat16 have a correction of 0: weights below 2^-134 become 0.
//
// Others may write to a parameter, and its correction stays. Whatever the two parts are, the weight
// rounds to the parameter, or is the parameter: a correction that no split makes counts as 0.
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

// Every correction of such a parameter is one that a split makes. Added to a zero, a negative one
// would make NaN, and so would a positive one of an infinity.
FT_INLINE bool is_corrected_bfloat16(uint32_t param) { return (param & 0x7fffu) - 1u < 0x7f7fu; }

template <int kBits>
FT_INLINE float join_bfloat16(uint32_t param, int32_t correction) {
  const uint32_t added = static_cast<uint32_t>(correction) << (16 - kBits);
  return weight_of_bits((param << 16) + (is_corrected_bfloat16(param) ? added : 0u));
}

constexpr uint32_t kNearest24 = 0x80;  // half a unit of the 24 bits that remain

// `added`: to the 8 bits that kBits = 8 cuts: kNearest24, or 8 random bits.
template <int kBits>
FT_INLINE SplitWeight split_finite_bfloat16(uint32_t bits, uint32_t added) {
  if (kBits == 8) bits = (bits + added) & 0xffffff00u;
  const uint32_t param = (bits + 0x8000u) >> 16;
  const int32_t correction = static_cast<int32_t>(bits - (param << 16)) >> (16 - kBits);
  return {param, is_corrected_bfloat16(param) ? correction : 0};
}

template <int kBits>
FT_INLINE SplitWeight split_bfloat16(float weight, uint32_t added) {
  const uint32_t bits = bits_of_weight(weight), magnitude = bits & 0x7fffffffu;
  const uint32_t special = (bits >> 16) | (magnitude > 0x7f800000u ? 0x40u : 0u);
  const SplitWeight parts = split_finite_bfloat16<kBits>(bits, added);
  const bool finite = magnitude < 0x7f800000u;
  return {finite ? parts.param : special, finite ? parts.correction : 0};
}

// The bits of 2^e for the exponent e of a float16, as float32; that of denormals is -14. What the
// two functions below need is taken from the float32 value: no 16-bit lanes to unpack (joining 25 M
// numbers: 8 ms with the exponent of the 16 bits, 5 with this).
FT_INLINE uint32_t half_exponent(float value) {
  const uint32_t exponent = bits_of_weight(value) & 0x7f800000u;
  return exponent > 0x38800000u ? exponent : 0x38800000u;
}
FT_INLINE bool is_finite_exponent(uint32_t exponent) { return exponent != 0x7f800000u; }

// The nearest float16, ties to even, of a weight below 65520. Added to 1.5 2^23 units of its last
// place, a weight loses what lies below.
FT_INLINE float rounded_to_half(float weight) {
  const float far = weight_of_bits(half_exponent(weight) + (13u << 23) + 0x400000u);
  const uint32_t magnitude = bits_of_weight((weight + far) - far) & 0x7fffffffu;
  return weight_of_bits((bits_of_weight(weight) & 0x80000000u) | magnitude);
}

// `value`: of the parameter. Corrections that no split makes: of a power of 2, below the middle to
// its smaller neighbour; of an odd parameter, a tie in float32; of a zero, of the other sign.
template <int kBits>
FT_INLINE float join_half(float value, int32_t correction) {
  const uint32_t exponent = half_exponent(value);
  const float step = weight_of_bits(exponent - (static_cast<uint32_t>(10 + kBits) << 23));
  const float weight = value + static_cast<float>(correction) * step;
  const bool rounds = bits_of_weight(rounded_to_half(weight)) == bits_of_weight(value);
  return is_finite_exponent(exponent) & rounds ? weight : value;
}

// The correction of a weight whose nearest float16 is `value`. Both halves of a tie fit only if
// corrections are symmetric: a weight that is split, joined and split again stays what it was.
template <int kBits>
FT_INLINE int32_t half_correction(float weight, float value) {
  constexpr int32_t kMost = (1 << (kBits - 1)) - 1;
  constexpr float kRound = 12582912.0f;  // 1.5 2^23: the sum's low bits are the rounded number
  const uint32_t exponent = half_exponent(value);
  const float steps_of_one = weight_of_bits((static_cast<uint32_t>(264 + kBits) << 23) - exponent);
  const float steps = (weight - value) * steps_of_one;
  const int32_t rounded = static_cast<int32_t>(bits_of_weight(steps + kRound) - 0x4b400000u);
  const int32_t clamped = rounded < -kMost ? -kMost : (rounded > kMost ? kMost : rounded);
  return is_finite_exponent(exponent) ? clamped : 0;
}

// Float32 masters that follow their 16-bit parameter: where others have written to the parameter,
// so that it is not the rounded master (ties either way), it is the new master. NaN rounds to
// nothing.
FT_INLINE float follow_bfloat16(float master, uint32_t param) {
  const bool near = bits_of_weight(master) - (param << 16) + 0x8000u <= 0x10000u;
  return near & (master == master) ? master : weight_of_bits(param << 16);
}

// `value`: of the parameter.
FT_INLINE float follow_half(float master, float value) {
  const uint32_t bits = bits_of_weight(master), infinity = (bits & 0x80000000u) | 0x7f800000u;
  const bool overflows = (bits & 0x7fffffffu) - 0x477ff000u <= 0x7f800000u - 0x477ff000u;
  const uint32_t rounded = overflows ? infinity : bits_of_weight(rounded_to_half(master));
  return rounded == bits_of_weight(value) ? master : value;
}

FT_END_NAMESPACE
