// The derivative of an activation in few bits: levels, and how a slope becomes the nearest one.
//
// It is the value of the derivative that is quantised, not the input: most of these derivatives
// rise and fall, and intervals of x would give several codes to one slope. The 4, 8 and 16 levels
// are those of least squares (Lloyd, 1982) for x ~ N(0, 1), to four decimals; test_few_bit.py
// computes them again. Codes of 8 bits count units; the slopes 0 and 1 are exact.
#pragma once

#include "formulas.h"

namespace fusedtrain {

struct SlopeTable {
  double one[2], two[4], three[8], four[16];  // all 0: not offered
  int unit, zero;                             // units that make 1, and the code of 0
};

constexpr SlopeTable kReluSlopes = {{0, 1}, {}, {}, {}, 1, 0};
constexpr SlopeTable kSiluSlopes = {
    {},
    {0.0336, 0.3445, 0.6555, 0.9664},
    {-0.0407, 0.1136, 0.2681, 0.4227, 0.5773, 0.7319, 0.8864, 1.0407},
    {-0.0746, 0.0013, 0.0779, 0.1546, 0.2314, 0.3081, 0.3849, 0.4616, 0.5384, 0.6151, 0.6919,
     0.7686, 0.8454, 0.9221, 0.9987, 1.0746},
    212,
    21};
constexpr SlopeTable kMishSlopes = {
    {},
    {0.0117, 0.3474, 0.6887, 1.0131},
    {-0.0605, 0.0967, 0.2595, 0.4246, 0.5901, 0.7536, 0.9116, 1.0565},
    {-0.0906, -0.0158, 0.0621, 0.1416, 0.2222, 0.3035, 0.3852, 0.4672, 0.5491, 0.6306, 0.7115,
     0.7913, 0.8695, 0.9452, 1.0169, 1.0746},
    211,
    24};
constexpr SlopeTable kGeluSlopes = {
    {},
    {-0.0464, 0.3127, 0.6873, 1.0464},
    {-0.0915, 0.0620, 0.2337, 0.4107, 0.5893, 0.7663, 0.9380, 1.0915},
    {-0.1132, -0.0498, 0.0253, 0.1079, 0.1930, 0.2797, 0.3674, 0.4557, 0.5443, 0.6326, 0.7203,
     0.8070, 0.8921, 0.9747, 1.0497, 1.1132},
    202,
    26};
constexpr SlopeTable kQuickGeluSlopes = {
    {},
    {-0.0295, 0.3156, 0.6844, 1.0295},
    {-0.0695, 0.0768, 0.2409, 0.4128, 0.5871, 0.7591, 0.9232, 1.0695},
    {-0.0868, -0.0316, 0.0411, 0.1192, 0.2007, 0.2847, 0.3702, 0.4566, 0.5433, 0.6298, 0.7153,
     0.7993, 0.8809, 0.9589, 1.0316, 1.0868},
    212,
    21};
constexpr SlopeTable kHardswishSlopes = {
    {},
    {0.0060, 0.3514, 0.6486, 0.9940},
    {-0.1873, 0.0636, 0.2537, 0.4201, 0.5799, 0.7463, 0.9364, 1.1873},
    {-0.3234, -0.1409, -0.0066, 0.1041, 0.2018, 0.2917, 0.3767, 0.4592, 0.5408, 0.6233, 0.7083,
     0.7982, 0.8959, 1.0066, 1.1409, 1.3234},
    127,
    64};

// name of the op, struct, table
#define FT_FEW_BIT(X)                        \
  X(relu, Relu, kReluSlopes)                 \
  X(silu, Silu, kSiluSlopes)                 \
  X(mish, Mish, kMishSlopes)                 \
  X(gelu, Gelu, kGeluSlopes)                 \
  X(gelu_tanh, GeluTanh, kGeluSlopes)        \
  X(quick_gelu, QuickGelu, kQuickGeluSlopes) \
  X(hardswish, Hardswish, kHardswishSlopes)

// The table of the formula with this index in FT_POINTWISE, or null.
static inline const SlopeTable* slope_table(int64_t op) {
#define FT_SLOPE_INDEX(name, ...) index_##name,
  enum Index { FT_POINTWISE(FT_SLOPE_INDEX) };
#undef FT_SLOPE_INDEX
  switch (op) {
#define FT_SLOPE_CASE(name, Formula, table) \
  case index_##name:                        \
    return &table;
    FT_FEW_BIT(FT_SLOPE_CASE)
#undef FT_SLOPE_CASE
    default:
      return nullptr;
  }
}

// Its levels of so many bits, or null.
static inline const double* levels_of(const SlopeTable& table, int bits) {
  const double* levels = bits == 1   ? table.one
                         : bits == 2 ? table.two
                         : bits == 3 ? table.three
                         : bits == 4 ? table.four
                                     : nullptr;
  return levels != nullptr && levels[1] != 0 ? levels : nullptr;
}
static inline bool has_levels(const SlopeTable& table, int bits) {
  return bits == 8 ? table.unit > 1 : levels_of(table, bits) != nullptr;
}

constexpr int kMostLevels = 16;

// Values of a table that kernels take, for codes of one size. A slope is counted in units first
// (which is its code of 8 bits); codes of fewer bits are those of the nearest level to that.
template <class T>
struct Slopes {
  T level[kMostLevels], unit, step, zero;
  uint8_t threshold[kMostLevels - 1];  // from so many units on a code is above k

  Slopes(const SlopeTable& table, int bits)
      : unit(T(table.unit)), step(T(1.0 / table.unit)), zero(T(table.zero)) {
    const double* levels = levels_of(table, bits);
    const int count = levels == nullptr ? 0 : 1 << bits;
    for (int k = 0; k < kMostLevels; ++k) level[k] = k < count ? T(levels[k]) : T(0);
    for (int k = 0; k + 1 < kMostLevels; ++k) {
      threshold[k] = 255;
      if (k + 1 < count)
        threshold[k] =
            uint8_t(__builtin_ceil(0.5 * (levels[k] + levels[k + 1]) * table.unit + table.zero));
    }
  }
};

}  // namespace fusedtrain

FT_BEGIN_NAMESPACE

// Value and slope of a formula, together where it can.
template <class...>
using Void = void;
template <class F, class T, class = void>
constexpr bool kHasBoth = false;
template <class F, class T>
constexpr bool kHasBoth<F, T, Void<decltype(&F::both)>> = true;

template <bool kByOutput, class F, class T>
FT_METHOD void value_and_slope(const F& formula, T x, T& value, T& slope) {
  if constexpr (kHasBoth<F, T>) {
    formula.both(x, value, slope);
  } else {
    value = formula.forward(x);
    slope = formula.backward(T(1), kByOutput ? value : x);
  }
}

// In units, from 0 to 255; 0 for nan.
template <class T>
FT_METHOD T units_of(T slope, const Slopes<T>& slopes) {
  const T units = slope * slopes.unit + (slopes.zero + T(0.5));
  return units >= T(0) ? math::at_most(units, T(255)) : T(0);
}

// The code of whole units.
template <int kBits, class T>
FT_METHOD uint8_t code_of(uint8_t units, const Slopes<T>& slopes) {
  if constexpr (kBits == 8) return units;
  uint8_t code = 0;
  for (int k = 0; k + 1 < 1 << kBits; ++k) code = uint8_t(code + (units >= slopes.threshold[k]));
  return code;
}

template <int kBits, class T>
FT_METHOD T level_of(int code, const Slopes<T>& slopes) {
  if constexpr (kBits == 8)
    return (T(code) - slopes.zero) * slopes.step;
  else
    return slopes.level[code];
}

FT_END_NAMESPACE
