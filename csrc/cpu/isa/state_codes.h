// Loops between states in 8-bit codes and the floats that rules compute with.
#pragma once

#include "../../optimizer_step.h"
#include "../../state_codes.h"
#include "kernels.h"

FT_BEGIN_NAMESPACE

// Of elements that begin with a group.
template <class Codes>
void load_codes(const void* from, const float* scales, float* x, int64_t n) {
  const auto* const codes = static_cast<const typename Codes::Code*>(from);
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    const float scale = scales[i / kGroup];
#pragma GCC ivdep
    for (int lane = 0; lane < kGroup; ++lane) x[i + lane] = Codes::value(codes[i + lane], scale);
  }
  for (; i < n; ++i) x[i] = Codes::value(codes[i], scales[i / kGroup]);
}

template <class Codes>
FT_METHOD void store_group(const float* x, typename Codes::Code* codes, float* scale,
                           uint32_t random) {
  uint32_t most = 0;
  for (int lane = 0; lane < kGroup; ++lane) {
    const uint32_t bits = magnitude_bits(x[lane]);
    most = bits > most ? bits : most;
  }
  *scale = group_scale(most);
  const float largest = *scale, factor = Codes::factor(largest);
  int32_t rounded[kGroup];
  for (int lane = 0; lane < kGroup; ++lane)
    rounded[lane] =
        Codes::code(x[lane], largest, factor, rounding_chance(random, static_cast<uint32_t>(lane)));
  for (int lane = 0; lane < kGroup; ++lane)
    codes[lane] = static_cast<typename Codes::Code>(rounded[lane]);
}

// `first`: what the first group's random numbers count as.
template <class Codes>
void store_codes(const float* x, void* to, float* scales, int64_t n, uint32_t first, uint32_t key) {
  using Code = typename Codes::Code;
  Code* const codes = static_cast<Code*>(to);
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup)
    store_group<Codes>(x + i, codes + i, scales + i / kGroup,
                       random_bits(first + static_cast<uint32_t>(i / kGroup), key));
  if (i == n) return;
  float padded[kGroup] = {};
  Code stored[kGroup];
  for (int64_t j = i; j < n; ++j) padded[j - i] = x[j];
  store_group<Codes>(padded, stored, scales + i / kGroup,
                     random_bits(first + static_cast<uint32_t>(i / kGroup), key));
  for (int64_t j = i; j < n; ++j) codes[j] = stored[j - i];
}

FT_END_NAMESPACE
