// Every activation as one small struct: what it computes, on the CPU and on the GPU alike.
//
// forward(x) is the function; backward(g, saved) is g times its derivative, where `saved` is the
// output for the formulas that say so and the input for all others. T is float (also for half and
// bfloat16 tensors, which are converted at the edges) or double. No loops, dtypes or tensors here.
// channelwise_formulas.h has the activations with parameters for each channel.
//
// At the infinities a formula returns the limit of its function: torch's silu(-inf), mish(-inf),
// gelu(+-inf), hardswish(-inf) and softsign(+-inf) are nan. NaN stays NaN.
//
// To add one: a struct, a line in FT_POINTWISE, and the four places that CONTRIBUTING.md lists.
#pragma once

#include "host_device.h"
#include "vecmath.h"

// name of the op, struct, number of float parameters, whether these are rounded to the tensor's
// dtype first (where backward compares the saved output with them), what backward takes
#define FT_POINTWISE(X)                          \
  X(relu, Relu, 0, false, kOutput)               \
  X(relu6, Relu6, 0, false, kOutput)             \
  X(leaky_relu, LeakyRelu, 1, false, kOutput)    \
  X(elu, Elu, 1, false, kInput)                  \
  X(celu, Celu, 1, false, kInput)                \
  X(selu, Selu, 0, false, kInput)                \
  X(silu, Silu, 0, false, kInput)                \
  X(mish, Mish, 0, false, kInput)                \
  X(gelu, Gelu, 0, false, kInput)                \
  X(gelu_tanh, GeluTanh, 0, false, kInput)       \
  X(quick_gelu, QuickGelu, 0, false, kInput)     \
  X(sigmoid, Sigmoid, 0, false, kOutput)         \
  X(logsigmoid, LogSigmoid, 0, false, kOutput)   \
  X(tanh, Tanh, 0, false, kOutput)               \
  X(tanhshrink, Tanhshrink, 0, false, kInput)    \
  X(softplus, Softplus, 2, false, kOutput)       \
  X(softsign, Softsign, 0, false, kOutput)       \
  X(hardswish, Hardswish, 0, false, kInput)      \
  X(hardsigmoid, Hardsigmoid, 0, false, kOutput) \
  X(hardtanh, Hardtanh, 2, true, kOutput)        \
  X(hardshrink, Hardshrink, 1, true, kOutput)    \
  X(softshrink, Softshrink, 1, false, kOutput)   \
  X(threshold, Threshold, 2, false, kInput)      \
  X(relu_squared, ReluSquared, 0, false, kInput) \
  X(hard_mish, HardMish, 0, false, kInput)       \
  X(squareplus, Squareplus, 1, false, kInput)

FT_BEGIN_NAMESPACE

template <class T>
using Constants = math::Constants<T>;

struct NoParameters {
  FT_METHOD explicit NoParameters(const double*) {}
};

template <class T>
struct Relu : NoParameters {  // saves the output
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const { return math::at_least(x, T(0)); }
  FT_METHOD T backward(T g, T y) const { return y <= T(0) ? T(0) : g; }
};

template <class T>
struct Relu6 : NoParameters {  // saves the output
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const { return math::clamp(x, T(0), T(6)); }
  // Two choices: `||` kept the loop of batch norm from being vectorised, 13 times the time.
  FT_METHOD T backward(T g, T y) const {
    const T above = y <= T(0) ? T(0) : g;
    return y >= T(6) ? T(0) : above;
  }
};

template <class T>
struct LeakyRelu {  // saves the output; slope >= 0
  T slope;
  FT_METHOD explicit LeakyRelu(const double* p) : slope(T(p[0])) {}
  FT_METHOD T forward(T x) const { return x > T(0) ? x : slope * x; }
  FT_METHOD T backward(T g, T y) const { return y > T(0) ? g : slope * g; }
};

template <class T>
struct Elu {  // from the output, y + alpha would cancel
  T alpha;
  FT_METHOD explicit Elu(const double* p) : alpha(T(p[0])) {}
  FT_METHOD T forward(T x) const {
    const T e = alpha * math::expm1(math::at_most(x, T(0)));
    return x > T(0) ? x : e;
  }
  FT_METHOD T backward(T g, T x) const {
    const T slope = alpha * math::exp(math::at_most(x, T(0)));
    return x > T(0) ? g : g * slope;
  }
};

template <class T>
struct Celu {  // alpha > 0
  T alpha, inverse;
  FT_METHOD explicit Celu(const double* p) : alpha(T(p[0])), inverse(T(1.0 / p[0])) {}
  FT_METHOD T forward(T x) const {
    const T e = alpha * math::expm1(math::at_most(x, T(0)) * inverse);
    return x > T(0) ? x : e;
  }
  FT_METHOD T backward(T g, T x) const {
    const T slope = math::exp(math::at_most(x, T(0)) * inverse);
    return x > T(0) ? g : g * slope;
  }
};

template <class T>
struct Selu : NoParameters {
  using NoParameters::NoParameters;
  static constexpr double kScale = 1.0507009873554804934193349852946;
  static constexpr double kScaledAlpha = 1.0507009873554804934193349852946 * 1.6732632423543772848;
  FT_METHOD T forward(T x) const {
    const T e = T(kScaledAlpha) * math::expm1(math::at_most(x, T(0)));
    return x > T(0) ? T(kScale) * x : e;
  }
  FT_METHOD T backward(T g, T x) const {
    const T slope = T(kScaledAlpha) * math::exp(math::at_most(x, T(0)));
    return g * (x > T(0) ? T(kScale) : slope);
  }
};

// sigmoid(z) and its slope from e = exp(-|z|): 1 - sigmoid(z) would cancel for large z (45 eps of
// error in the slope of gelu_tanh).
template <class T>
struct SigmoidAndSlope {
  T value, slope;
  FT_METHOD explicit SigmoidAndSlope(T z) {
    const T e = math::exp_negative(-math::abs(z));
    const T r = math::reciprocal(T(1) + e);
    value = z < T(0) ? e * r : r;
    slope = e * r * r;
  }
};

template <class T>
struct Silu : NoParameters {
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const {
    x = math::at_least(x, -Constants<T>::kFar);
    return math::ratio(x, T(1) + math::exp_normal(-x));
  }
  FT_METHOD T backward(T g, T x) const {
    x = math::clamp(x, -Constants<T>::kFar, Constants<T>::kFar);
    const SigmoidAndSlope<T> s(x);
    return g * (s.value + x * s.slope);
  }
  // Value and slope together; as the others of this name for one exponential instead of two.
  FT_METHOD void both(T x, T& value, T& slope) const {
    x = math::at_least(x, -Constants<T>::kFar);
    const T near = math::at_most(x, Constants<T>::kFar);
    const SigmoidAndSlope<T> s(near);
    value = x * s.value;
    slope = s.value + near * s.slope;
  }
};

// tanh(softplus(x)) = n / (n + 2) with n = e (e + 2), e = exp(x): one exp and one division.
template <class T>
struct Mish : NoParameters {
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const {
    const T e = math::exp(math::at_most(x, T(20)));  // from 20 up the factor is 1
    const T n = e * (e + T(2));
    return math::at_least(x, -Constants<T>::kFar) * math::ratio(n, n + T(2));
  }
  FT_METHOD T backward(T g, T x) const {
    x = math::clamp(x, -Constants<T>::kFar, T(20));
    const T e = math::exp(x);
    const T n = e * (e + T(2));
    const T r = math::reciprocal(n + T(2));
    return g * (n * r + x * (T(4) * e * (e + T(1)) * r) * r);
  }
  FT_METHOD void both(T x, T& value, T& slope) const {
    x = math::at_least(x, -Constants<T>::kFar);
    const T near = math::at_most(x, T(20));
    const T e = math::exp(near);
    const T n = e * (e + T(2));
    const T r = math::reciprocal(n + T(2));
    value = x * (n * r);
    slope = n * r + near * (T(4) * e * (e + T(1)) * r) * r;
  }
};

template <class T>
struct Gelu : NoParameters {
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const { return math::at_least(x, T(-40)) * math::normal_cdf(x); }
  FT_METHOD T backward(T g, T x) const {
    T density;
    x = math::clamp(x, T(-40), T(40));
    const T cumulative = math::normal_cdf(x, density);
    return g * (cumulative + x * density);
  }
  FT_METHOD void both(T x, T& value, T& slope) const {
    T density;
    x = math::at_least(x, T(-40));
    const T near = math::at_most(x, T(40));
    const T cumulative = math::normal_cdf(near, density);
    value = x * cumulative;
    slope = cumulative + near * density;
  }
};

// 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class T>
struct GeluTanh : NoParameters {
  using NoParameters::NoParameters;
  static constexpr double kLinear = 2 * 0.79788456080286535588;
  static constexpr double kCubic = kLinear * 0.044715;
  FT_METHOD T forward(T x) const {
    const T z = math::clamp(x, T(-30), T(30));
    const T s = math::sigmoid(z * (T(kLinear) + T(kCubic) * z * z));
    return math::at_least(x, T(-30)) * s;
  }
  FT_METHOD T backward(T g, T x) const {
    x = math::clamp(x, T(-30), T(30));
    const SigmoidAndSlope<T> s(x * (T(kLinear) + T(kCubic) * x * x));
    return g * (s.value + x * s.slope * (T(kLinear) + T(3 * kCubic) * x * x));
  }
  FT_METHOD void both(T x, T& value, T& slope) const {
    x = math::at_least(x, T(-30));
    const T z = math::at_most(x, T(30));
    const SigmoidAndSlope<T> s(z * (T(kLinear) + T(kCubic) * z * z));
    value = x * s.value;
    slope = s.value + z * s.slope * (T(kLinear) + T(3 * kCubic) * z * z);
  }
};

template <class T>
struct QuickGelu : NoParameters {
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const {
    x = math::at_least(x, -Constants<T>::kFar);
    return math::ratio(x, T(1) + math::exp_normal(T(-1.702) * x));
  }
  FT_METHOD T backward(T g, T x) const {
    x = math::clamp(x, -Constants<T>::kFar, Constants<T>::kFar);
    const SigmoidAndSlope<T> s(T(1.702) * x);
    return g * (s.value + T(1.702) * x * s.slope);
  }
  FT_METHOD void both(T x, T& value, T& slope) const {
    x = math::at_least(x, -Constants<T>::kFar);
    const T near = math::at_most(x, Constants<T>::kFar);
    const SigmoidAndSlope<T> s(T(1.702) * near);
    value = x * s.value;
    slope = s.value + T(1.702) * near * s.slope;
  }
};

template <class T>
struct Sigmoid : NoParameters {  // saves the output
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const { return math::sigmoid(x); }
  FT_METHOD T backward(T g, T y) const { return g * (y * (T(1) - y)); }
};

template <class T>
struct LogSigmoid : NoParameters {  // saves the output
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const {
    return math::at_most(x, T(0)) - math::log1p_unit(math::exp(-math::abs(x)));
  }
  FT_METHOD T backward(T g, T y) const { return g * -math::expm1(y); }
};

template <class T>
struct Tanh : NoParameters {  // saves the output
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const { return math::tanh(x); }
  FT_METHOD T backward(T g, T y) const { return g * (T(1) - y * y); }
};

template <class T>
struct Tanhshrink : NoParameters {
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const { return x - math::tanh(x); }
  FT_METHOD T backward(T g, T x) const {
    const T t = math::tanh(x);
    return g * (t * t);
  }
};

template <class T>
struct Softplus {  // saves the output; threshold >= 20, so that the two branches meet
  T beta, inverse, threshold;
  FT_METHOD explicit Softplus(const double* p)
      : beta(T(p[0])), inverse(T(1.0 / p[0])), threshold(T(p[1])) {}
  FT_METHOD T forward(T x) const {
    const T z = beta * x;
    const T y = (math::at_least(z, T(0)) + math::log1p_unit(math::exp(-math::abs(z)))) * inverse;
    return z > threshold ? x : y;
  }
  FT_METHOD T backward(T g, T y) const {
    const T z = beta * y;
    return z > threshold ? g : g * -math::expm1(-z);
  }
};

template <class T>
struct Softsign : NoParameters {  // saves the output
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const {
    x = math::clamp(x, -Constants<T>::kHuge, Constants<T>::kHuge);
    return x / (T(1) + math::abs(x));
  }
  FT_METHOD T backward(T g, T y) const {
    const T d = T(1) - math::abs(y);
    return g * (d * d);
  }
};

template <class T>
struct Hardswish : NoParameters {
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const {
    x = math::at_least(x, T(-3));
    return x * (math::at_most(x + T(3), T(6)) / T(6));
  }
  FT_METHOD T backward(T g, T x) const {
    const T slope = x * T(1.0 / 3.0) + T(0.5);
    return x <= T(-3) ? T(0) : (x >= T(3) ? g : g * slope);
  }
};

template <class T>
struct Hardsigmoid : NoParameters {  // saves the output
  using NoParameters::NoParameters;
  // From the nearer end, where 3 - |x| is exact: the output is 0 or 1 only where the slope is 0.
  FT_METHOD T forward(T x) const {
    const T t = math::at_least(T(3) - math::abs(x), T(0)) / T(6);
    return x < T(0) ? t : T(1) - t;
  }
  // 0 at NaN, as torch has it.
  FT_METHOD T backward(T g, T y) const { return y > T(0) && y < T(1) ? g * T(1.0 / 6.0) : T(0); }
};

template <class T>
struct Hardtanh {  // saves the output
  T low, high;
  FT_METHOD explicit Hardtanh(const double* p) : low(T(p[0])), high(T(p[1])) {}
  FT_METHOD T forward(T x) const { return math::clamp(x, low, high); }
  FT_METHOD T backward(T g, T y) const { return y <= low || y >= high ? T(0) : g; }
};

template <class T>
struct Hardshrink {  // saves the output
  T lambd;
  FT_METHOD explicit Hardshrink(const double* p) : lambd(T(p[0])) {}
  FT_METHOD T forward(T x) const { return x >= -lambd && x <= lambd ? T(0) : x; }
  FT_METHOD T backward(T g, T y) const { return y == T(0) && lambd >= T(0) ? T(0) : g; }
};

template <class T>
struct Softshrink {  // saves the output; lambd >= 0
  T lambd;
  FT_METHOD explicit Softshrink(const double* p) : lambd(T(p[0])) {}
  FT_METHOD T forward(T x) const {
    return x > lambd ? x - lambd : (x < -lambd ? x + lambd : x * T(0));
  }
  FT_METHOD T backward(T g, T y) const { return y == T(0) ? T(0) : g; }
};

template <class T>
struct Threshold {
  T threshold, value;
  FT_METHOD explicit Threshold(const double* p) : threshold(T(p[0])), value(T(p[1])) {}
  FT_METHOD T forward(T x) const { return x <= threshold ? value : x; }
  FT_METHOD T backward(T g, T x) const { return x <= threshold ? T(0) : g; }
};

template <class T>
struct ReluSquared : NoParameters {  // the square leaves the range of float16
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const {
    x = math::at_least(x, T(0));
    return x * x;
  }
  FT_METHOD T backward(T g, T x) const { return x <= T(0) ? T(0) : g * (T(2) * x); }
};

template <class T>
struct HardMish : NoParameters {
  using NoParameters::NoParameters;
  FT_METHOD T forward(T x) const {
    x = math::at_least(x, T(-2));
    return x * (T(0.5) * math::at_most(x + T(2), T(2)));
  }
  FT_METHOD T backward(T g, T x) const {
    return x < T(-2) ? T(0) : (x > T(0) ? g : g * (x + T(1)));
  }
};

// (x + sqrt(x^2 + b)) / 2, for x < 0 in the form that does not cancel.
template <class T>
struct Squareplus {
  T b;
  FT_METHOD explicit Squareplus(const double* p) : b(T(p[0])) {}
  FT_METHOD T root(T x) const {
    const T a = math::at_most(math::abs(x), T(1e18));  // beyond it, x^2 + b is x^2
    return math::at_least(math::sqrt(a * a + b), math::abs(x));
  }
  FT_METHOD T forward(T x) const {
    const T s = root(x), a = math::abs(x);
    return x < T(0) ? T(0.5) * b / (s + a) : T(0.5) * s + T(0.5) * a;
  }
  FT_METHOD T backward(T g, T x) const {
    x = math::clamp(x, T(-1e18), T(1e18));
    const T s = root(x), a = math::abs(x);
    const T y = x < T(0) ? T(0.5) * b / (s + a) : T(0.5) * s + T(0.5) * a;
    return g * (s == T(0) ? T(0.5) : y / s);
  }
};

FT_END_NAMESPACE
