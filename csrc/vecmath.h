// Scalar math functions that GCC and Clang turn into vector code: branch-free, no calls, no tables.
//
// Each states its contract: largest error in ULP of the result, argument range, special values.
// test_vecmath.py checks every contract in every instruction set. The polynomials are minimax
// fits (Remez exchange in 50-digit arithmetic); the number behind each is the fit's own error.
//
// Included into a namespace of its own by every instruction-set unit (see formulas.h): no standard
// library, no torch headers, nothing that could be emitted once and shared between units.
#pragma once

#include <stdint.h>

#include "host_device.h"

FT_BEGIN_NAMESPACE
namespace math {

template <class T>
struct Constants;

template <>
struct Constants<float> {
  using Bits = uint32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr int kExponentBias = 127;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLn2High = 0.693359375f;
  static constexpr float kLn2Low = -2.12194440054690581e-4f;
  static constexpr float kExpMax = 89.0f;
  static constexpr float kExpMin = -104.0f;
  static constexpr float kNormalMax = 88.8f;   // rounds to n = 128: inf
  static constexpr float kNormalMin = -88.0f;  // rounds to n = -127: 0
  static constexpr float kHuge = 3.402823466e+38f;
  // Beyond this, exp(x) is 0 or inf and every S-shaped function has reached its limit.
  static constexpr float kFar = 110.0f;
};

template <>
struct Constants<double> {
  using Bits = uint64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr int kExponentBias = 1023;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 6.93147180369123816490e-1;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kExpMax = 710.0;
  static constexpr double kExpMin = -746.0;
  static constexpr double kNormalMax = 709.8;
  static constexpr double kNormalMin = -709.0;
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

// NaN if one is.
template <class T>
FT_INLINE T largest(T a, T b) {
  return a > b || a != a ? a : b;
}

FT_INLINE float abs(float x) { return __builtin_fabsf(x); }
FT_INLINE double abs(double x) { return __builtin_fabs(x); }
FT_INLINE float copysign(float x, float s) { return __builtin_copysignf(x, s); }
FT_INLINE double copysign(double x, double s) { return __builtin_copysign(x, s); }
FT_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
FT_INLINE double sqrt(double x) { return __builtin_sqrt(x); }

// 1 / x for x from 1 up. 1 ULP; one instruction on CUDA, where nvcc's division has six more for the
// ends of the range, and there 0 from 2^126 up.
template <class T>
FT_INLINE T reciprocal(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) {
#ifdef __NVCC__
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return ::emulated_reciprocal(x);
#endif
  }
#endif
  return T(1) / x;
}

// a / b for b from 1 up, where a / 2^126 is as good as 0. 2 ULP.
template <class T>
FT_INLINE T ratio(T a, T b) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return a * reciprocal(b);
#endif
  return a / b;
}

// 2^n, where `shifted` is n + kRound for an integral n: its low bits are n. 0 for the exponent
// below the normal ones, inf for the one above.
template <class T>
FT_INLINE T power_of_two(T shifted) {
  using C = Constants<T>;
  using Bits = typename C::Bits;
  Bits bits;
  __builtin_memcpy(&bits, &shifted, sizeof(T));
  bits = (bits << C::kMantissaBits) + (Bits(C::kExponentBias) << C::kMantissaBits);
  T result;
  __builtin_memcpy(&result, &bits, sizeof(T));
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

// x = n ln 2 + r, |r| <= ln(2)/2; returns r. `shifted` is n + kRound.
template <class T>
FT_INLINE T reduce(T x, T& shifted) {
  using C = Constants<T>;
  shifted = x * T(1.44269504088896340736) + C::kRound;
  const T n = shifted - C::kRound;
  return (x - n * C::kLn2High) - n * C::kLn2Low;
}

// e^x. 2 ULP (1 in the denormal range's own units). All x; overflows to inf, underflows through
// the denormals to 0.
template <class T>
FT_INLINE T exp(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return ::expf(x);
#endif
  using C = Constants<T>;
  T shifted;
  const T r = reduce(clamp(x, C::kExpMin, C::kExpMax), shifted);
  const T p = T(1) + (r + r * r * exp_tail(r));
  // Two factors: 2^n alone is not representable at either end of the range.
  const T n = shifted - C::kRound;
  const T half = n * T(0.5) + C::kRound;
  return (p * power_of_two(half)) * power_of_two((n - (half - C::kRound)) + C::kRound);
}

// e^x where the sigmoids need it, at two thirds of the cost of exp. 2 ULP from -87 to 88; below, it
// is at most 1.3e-38 (double: 2.3e-308), and 0 from -88 (-709) down; above, inf from 88.4 (709.5).
template <class T>
FT_INLINE T exp_normal(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return ::expf(x);
#endif
  using C = Constants<T>;
  T shifted;
  const T r = reduce(clamp(x, C::kNormalMin, C::kNormalMax), shifted);
  return (T(1) + (r + r * r * exp_tail(r))) * power_of_two(shifted);
}

// The same for x <= 0.
template <class T>
FT_INLINE T exp_negative(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return ::expf(x);
#endif
  T shifted;
  const T r = reduce(at_least(x, Constants<T>::kNormalMin), shifted);
  return (T(1) + (r + r * r * exp_tail(r))) * power_of_two(shifted);
}

// e^x - 1. 3 ULP. All x; -1 from -40 down, inf above the range; keeps the sign of zero.
template <class T>
FT_INLINE T expm1(T x) {
  using C = Constants<T>;
  T shifted;
  const T r = reduce(clamp(x, T(-40), C::kExpMax), shifted);
  const T p = r + r * r * exp_tail(r);
  const T s = power_of_two(shifted - T(1));
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
  const T s = ratio(f, T(2) + f);
  const T y = f - s * (f - s * s * log_tail(s * s));
  return upper ? y + T(0.69314718055994530942) : y;
}

// 1 / (1 + e^-x). 4 ULP down to -87 (double: -708), then 0 (torch: from -88.7 down).
template <class T>
FT_INLINE T sigmoid(T x) {
  return reciprocal(T(1) + exp_normal(-x));
}

// tanh(x). 4 ULP. All x; keeps the sign of zero.
template <class T>
FT_INLINE T tanh(T x) {
  const T e = expm1(T(-2) * abs(x));
  return copysign(ratio(-e, e + T(2)), x);
}

// Cumulative probability of the standard normal distribution. Absolute error 2.5e-7 in float, 0
// from -13 down. In the tail from -10 up the relative error stays below 1e-3. All x.
FT_INLINE float normal_cdf(float x) {
  const float a = at_most(abs(x), 20.0f);
  // log2 of the upper tail on 0 <= a <= 10, fitted for an absolute error of 2.6e-8 in the tail
  // itself: no division and no second exponential (against 24 % more time in gelu's forward).
  float p = -5.8895417827e-9f;
  p = p * a + 2.5086100376e-7f;
  p = p * a - 4.35611387e-6f;
  p = p * a + 3.8443774725e-5f;
  p = p * a - 0.00015471866771f;
  p = p * a - 0.00023943645216f;
  p = p * a + 0.0072099724866f;
  p = p * a - 0.052597931962f;
  p = p * a - 0.45917600573f;
  p = p * a - 1.1511089035f;
  p = p * a - 0.99999992477f;
#ifdef __CUDA_ARCH__
  const float upper_tail = ::exp2f(at_least(p, -151.0f));  // 0 there
#else
  p = at_least(p, -127.0f);
  const float shifted = p + Constants<float>::kRound;
  const float r = p - (shifted - Constants<float>::kRound);
  float q = 0.00015467973208f;  // 2^r: 4e-9
  q = q * r + 0.0013390939849f;
  q = q * r + 0.0096180351484f;
  q = q * r + 0.055503569657f;
  q = q * r + 0.24022651064f;
  q = q * r + 0.69314718806f;
  const float upper_tail = (q * r + 1.0f) * power_of_two(shifted);
#endif
  return x > 0.0f ? 1.0f - upper_tail : upper_tail;
}

// The same, and the density, whose exponential serves both. Absolute error 2.5e-7 in float; in the
// lower tail the relative error stays below
// (4 + x^2) ULP down to -13, then it is 0. All x; 0 or 1 at the infinities.
FT_INLINE float normal_cdf(float x, float& density) {
  const float a = at_most(abs(x), 14.0f);
  const float e = exp_negative(-0.5f * a * a);
  const float t = reciprocal(1.0f + 0.3f * a);
  // erfc(a / sqrt(2)) e^(a^2 / 2) / (2 t) on 0 <= a <= 13: 1.1e-7.
  float p = 0.03619496891f;
  p = p * t - 0.159378694f;
  p = p * t + 0.2101188753f;
  p = p * t - 0.05716761696f;
  p = p * t + 0.1304164697f;
  p = p * t + 0.09934715908f;
  p = p * t + 0.1208455179f;
  p = p * t + 0.1196232639f;
  const float upper_tail = e * (t * p);
  density = 0.39894228040143267794f * e;
  return x > 0.0f ? 1.0f - upper_tail : upper_tail;
}
FT_INLINE double normal_cdf(double x, double& density) {
  const double a = at_most(abs(x), 39.0);
  const double e = exp_negative(-0.5 * a * a);
  // erfc(a / sqrt(2)) e^(a^2 / 2) (a + 5) / 2 as a polynomial of (a - 5) / (a + 5): 6e-18.
  constexpr double kCoefficients[] = {
      -3.0289728280171412623e-10,  1.4319666693562341358e-9,   7.9421729319016499675e-9,
      -8.2947808688582444555e-9,   -6.6011508429993101384e-8,  4.0880452351814551575e-8,
      4.3288408323818309379e-7,    -3.3553717211844422588e-7,  -2.7689524702388324971e-6,
      3.9803846962184835266e-6,    0.000016681041221392948328, -0.000049762654909867747766,
      -0.000059375674793011516266, 0.00054489903339075085198,  -0.00079786940800945276152,
      -0.0029933767667056956608,   0.020795066800837628112,    -0.069118638706569996107,
      0.16502036617033742238,      -0.3135331566712961954,     0.49530561596997729889,
      -0.6653825028900567812,      0.76919304975006295591,
  };
  const double r = 1.0 / (a + 5.0), s = (a - 5.0) * r;
  double p = kCoefficients[0];
  for (int i = 1; i < 23; ++i) p = p * s + kCoefficients[i];
  const double upper_tail = e * (p * r);
  density = 0.39894228040143267794 * e;
  return x > 0.0 ? 1.0 - upper_tail : upper_tail;
}
FT_INLINE double normal_cdf(double x) {
  double density;
  return normal_cdf(x, density);
}

}  // namespace math
FT_END_NAMESPACE
