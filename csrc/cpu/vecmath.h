// Scalar math functions that GCC and Clang turn into vector code: branch-free, no calls, no tables.
//
// Each states its contract: largest error in ULP of the result, argument range, special values.
// tests/test_vecmath.py checks every contract in every instruction set. The polynomials are minimax
// fits (Remez exchange in 50-digit arithmetic); the number behind each is the fit's own error.
//
// Included into a namespace of its own by every instruction-set unit (see formulas.h): no standard
// library, no torch headers, nothing that could be emitted once and shared between units.
#pragma once

#include <stdint.h>

#include "../host_device.h"

FT_BEGIN_NAMESPACE
namespace math {

template <class T>
struct Constants;

template <>
struct Constants<float> {
  using Int = int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr int kExponentBias = 127;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLn2High = 0.693359375f;
  static constexpr float kLn2Low = -2.12194440054690581e-4f;
  static constexpr float kExpMax = 89.0f;
  static constexpr float kExpMin = -104.0f;
  static constexpr float kHuge = 3.402823466e+38f;
  // Beyond this, exp(x) is 0 or inf and every S-shaped function has reached its limit.
  static constexpr float kFar = 110.0f;
};

template <>
struct Constants<double> {
  using Int = int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr int kExponentBias = 1023;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 6.93147180369123816490e-1;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kExpMax = 710.0;
  static constexpr double kExpMin = -746.0;
  static constexpr double kHuge = 1.7976931348623157e+308;
  static constexpr double kFar = 1000.0;
};

// NaN passes through all three: a comparison with NaN is false.
template <class T>
FT_INLINE T at_most(T x, T high) {
  return x > high ? high : x;
}
template <class T>
FT_INLINE T at_least(T x, T low) {
  return x < low ? low : x;
}
template <class T>
FT_INLINE T clamp(T x, T low, T high) {
  return at_most(at_least(x, low), high);
}

FT_INLINE float abs(float x) { return __builtin_fabsf(x); }
FT_INLINE double abs(double x) { return __builtin_fabs(x); }
FT_INLINE float copysign(float x, float s) { return __builtin_copysignf(x, s); }
FT_INLINE double copysign(double x, double s) { return __builtin_copysign(x, s); }
FT_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
FT_INLINE double sqrt(double x) { return __builtin_sqrt(x); }

// 2^n for an integral n within the normal exponents.
template <class T>
FT_INLINE T power_of_two(T n) {
  using C = Constants<T>;
  const T shifted = n + C::kRound;
  typename C::Int bits, zero;
  const T round = C::kRound;
  __builtin_memcpy(&bits, &shifted, sizeof(T));
  __builtin_memcpy(&zero, &round, sizeof(T));
  using Unsigned = decltype(sizeof(T) == 4 ? uint32_t{} : uint64_t{});
  const typename C::Int power = static_cast<typename C::Int>(
      static_cast<Unsigned>(bits - zero + C::kExponentBias) << C::kMantissaBits);
  T result;
  __builtin_memcpy(&result, &power, sizeof(T));
  return result;
}

// (e^r - 1 - r) / r^2 on |r| <= ln(2)/2.
FT_INLINE float exp_tail(float r) {  // 7.5e-9 relative to e^r
  return 0.5000000027f +
         r * (0.166665768f + r * (0.04166637471f + r * (0.008363207963f + r * 0.001394116325f)));
}
FT_INLINE double exp_tail(double r) {  // 1.7e-19 relative to e^r
  double p = 2.092162527661532348e-9;
  p = p * r + 2.510526092259006226e-8;
  p = p * r + 2.755725280625021098e-7;
  p = p * r + 2.755725529422523941e-6;
  p = p * r + 2.480158734744942001e-5;
  p = p * r + 1.98412698749046357e-4;
  p = p * r + 1.388888888887435206e-3;
  p = p * r + 8.333333333326110925e-3;
  p = p * r + 4.166666666666668386e-2;
  p = p * r + 1.666666666666667101e-1;
  return p * r + 0.5;
}

// e^x. 2 ULP (1 in the denormal range's own units). All x; overflows to inf, underflows through
// the denormals to 0.
template <class T>
FT_INLINE T exp(T x) {
  using C = Constants<T>;
  x = clamp(x, C::kExpMin, C::kExpMax);
  const T n = (x * T(1.44269504088896340736) + C::kRound) - C::kRound;
  const T r = (x - n * C::kLn2High) - n * C::kLn2Low;
  const T p = T(1) + (r + r * r * exp_tail(r));
  // Two factors: 2^n alone is not representable at either end of the range.
  const T half = (n * T(0.5) + C::kRound) - C::kRound;
  return (p * power_of_two(half)) * power_of_two(n - half);
}

// e^x - 1. 3 ULP. All x; -1 from -40 down, inf above the range; keeps the sign of zero.
template <class T>
FT_INLINE T expm1(T x) {
  using C = Constants<T>;
  const T z = clamp(x, T(-40), C::kExpMax);
  const T n = (z * T(1.44269504088896340736) + C::kRound) - C::kRound;
  const T r = (z - n * C::kLn2High) - n * C::kLn2Low;
  const T p = r + r * r * exp_tail(r);
  const T s = power_of_two(n - T(1));
  const T y = T(2) * (s * p + (s - T(0.5)));
  return x == T(0) ? x : y;
}

// (2 atanh(s) - 2 s) / s^3 as a function of s^2, s^2 <= 0.0295.
FT_INLINE float log_tail(float z) {  // 3e-9 relative to the logarithm
  return 0.6666668532f + z * (0.3998869588f + z * 0.2958308769f);
}
FT_INLINE double log_tail(double z) {  // 5e-18 relative to the logarithm
  double p = 0.1461909699201227853;
  p = p * z + 0.1533149776450681842;
  p = p * z + 0.18182896207631686;
  p = p * z + 0.2222221103174932446;
  p = p * z + 0.2857142862665140686;
  p = p * z + 0.3999999999989788784;
  return p * z + 0.6666666666666669749;
}

// log(1 + x) for 0 <= x <= 1, where softplus needs it. 2 ULP. NaN gives NaN.
template <class T>
FT_INLINE T log1p_unit(T x) {
  const bool upper = x > T(0.41421356237309504880);
  const T f = upper ? T(0.5) * x - T(0.5) : x;  // 1 + x = (upper ? 2 : 1) (1 + f), exactly
  const T s = f / (T(2) + f);
  const T y = f - s * (f - s * s * log_tail(s * s));
  return upper ? y + T(0.69314718055994530942) : y;
}

// 1 / (1 + e^-x). 4 ULP while e^-x is finite, then 0 (as torch).
template <class T>
FT_INLINE T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}

// tanh(x). 4 ULP. All x; keeps the sign of zero.
template <class T>
FT_INLINE T tanh(T x) {
  const T e = expm1(T(-2) * abs(x));
  return copysign(-e / (e + T(2)), x);
}

// Standard normal distribution: returns the cumulative probability, stores the density.
// Absolute error 2e-7 in float; in the lower tail the relative error stays below
// (4 + x^2) ULP. All x; 0 or 1 at the infinities.
FT_INLINE float normal_cdf(float x, float& density) {
  const float a = at_most(abs(x), 15.0f);
  const float e = exp(-0.5f * a * a);
  const float t = 1.0f / (1.0f + 0.3f * a);
  // erfc(a / sqrt(2)) e^(a^2 / 2) / (2 t) on 0 <= a <= 15: 3.5e-9.
  float p = -0.02062863502f;
  p = p * t + 0.1124646512f;
  p = p * t - 0.2282844554f;
  p = p * t + 0.1918828506f;
  p = p * t - 0.07950880232f;
  p = p * t + 0.09620473434f;
  p = p * t + 0.07837228505f;
  p = p * t + 0.1102393344f;
  p = p * t + 0.1195713189f;
  p = p * t + 0.1196867166f;
  const float upper_tail = e * (t * p);
  density = 0.39894228040143267794f * e;
  return x > 0.0f ? 1.0f - upper_tail : upper_tail;
}
// The double version calls libm's erfc: right to 2 ULP and not vectorised.
FT_INLINE double normal_cdf(double x, double& density) {
  density = 0.39894228040143267794 * exp(-0.5 * x * x);
  return 0.5 * __builtin_erfc(-x * 0.70710678118654752440);
}

}  // namespace math
FT_END_NAMESPACE
