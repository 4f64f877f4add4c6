// States in 8-bit codes (state_codes.h) of the optimizer step: loads, stores, scales of groups.
#pragma once

#include "../state_codes.h"
#include "optimizers.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

static_assert(kChunk % formulas::kGroup == 0, "a chunk begins with a group");
static_assert(formulas::kGroup == kWarp, "a group of single elements is a warp");

// A state in floats, or in codes with scales, from the place on where a block works.
struct State : Stream {
  float* scales;  // or null
  bool squares;
};
__device__ __forceinline__ Stream state_of(const SweptTensor& t, int s, int64_t begin) {
  return stream_of(t.state[s], dtype_of(t, kState + s), begin);
}
__device__ __forceinline__ State state_of(const CodedTensor& t, int s, int64_t begin) {
  float* const scales = t.scales[s];
  const bool squares = (t.squares >> s & 1) != 0;
  if (scales == nullptr)
    return {state_of(static_cast<const SweptTensor&>(t), s, begin), scales, squares};
  return {{static_cast<char*>(t.state[s]) + begin, Dtype::kFloat32},
          scales + begin / formulas::kGroup,
          squares};
}

__device__ __forceinline__ float value_of(bool squares, uint32_t byte, float scale) {
  return squares
             ? formulas::SquareCodes::value(static_cast<float>(byte), scale)
             : formulas::SignedCodes::value(static_cast<float>(static_cast<int8_t>(byte)), scale);
}

// A state to compute with, as Loaded of optimizers.cuh.
template <int kLanes>
struct LoadedCodes;

template <>
struct LoadedCodes<4> : Loaded<float, 4> {
  // Four codes are the first word, their scale is the second.
  __device__ __forceinline__ void load(const State& s, int i) {
    if (s.scales == nullptr) return Loaded<float, 4>::load(static_cast<const Stream&>(s), i);
    bits[0] = *reinterpret_cast<const uint32_t*>(s.data + i);
    bits[1] = same_bits<uint32_t>(s.scales[i / formulas::kGroup]);
  }
  __device__ __forceinline__ void get(const State& s, float* v) const {
    if (s.scales == nullptr) return Loaded<float, 4>::get(static_cast<const Stream&>(s), v);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      v[k] = value_of(s.squares, bits[0] >> (8 * k) & 0xffu, same_bits<float>(bits[1]));
  }
};

template <>
struct LoadedCodes<1> : Loaded<float, 1> {
  __device__ __forceinline__ void load(const State& s, int i) {
    if (s.scales == nullptr) return Loaded<float, 1>::load(static_cast<const Stream&>(s), i);
    value = value_of(s.squares, static_cast<uint8_t>(s.data[i]), s.scales[i / formulas::kGroup]);
  }
};

// Largest x of the threads that hold a group together: 8 with four elements each, or a warp. All
// lanes of the warp must come.
template <int kLanes>
__device__ __forceinline__ uint32_t largest_of_group(uint32_t x) {
#pragma unroll
  for (int offset = formulas::kGroup / kLanes / 2; offset > 0; offset /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

template <class Codes, int kLanes>
__device__ __forceinline__ void store_codes(const State& s, int i, int end,
                                            const float (&v)[kLanes], float scale,
                                            uint32_t random) {
  const float factor = Codes::factor(scale);
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < kLanes; ++k) {
    const float chance = formulas::rounding_chance(random, uint32_t((i + k) % formulas::kGroup));
    const int32_t code = scale > 0.0f ? Codes::code(v[k], scale, factor, chance) : 0;
    word |= (static_cast<uint32_t>(code) & 0xffu) << (8 * k);
  }
  if constexpr (kLanes == 4)
    *reinterpret_cast<uint32_t*>(s.data + i) = word;
  else if (i < end)
    s.data[i] = static_cast<char>(word);
}

// Rounds a group. All lanes of the warp must come; those that hold nothing before `end` have zeros.
// random: the group's random bits.
template <int kLanes>
__device__ __forceinline__ void store_codes(const State& s, int i, int end,
                                            const float (&v)[kLanes], uint32_t random) {
  uint32_t most = 0;
#pragma unroll
  for (int k = 0; k < kLanes; ++k) {
    const uint32_t bits = formulas::magnitude_bits(v[k]);
    most = bits > most ? bits : most;
  }
  const float scale = formulas::group_scale(largest_of_group<kLanes>(most));
  if (s.squares)
    store_codes<formulas::SquareCodes>(s, i, end, v, scale, random);
  else
    store_codes<formulas::SignedCodes>(s, i, end, v, scale, random);
  __syncwarp();  // all have read the old scale
  if (i % formulas::kGroup == 0) s.scales[i / formulas::kGroup] = scale;
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
