// Loops of the optimizer step over elements of one tensor (optimizers.cpp cuts the work).
#pragma once

#include "lanes.h"  // before the rules, which call its functions

#include "../../optimizer_step.h"
#include "../../split_weights.h"
#include "convert.h"
#include "kernels.h"

FT_BEGIN_NAMESPACE

// Whether a loop knows that options are the usual ones.
struct Usual {
  static constexpr bool value = true;
};
struct Unusual {
  static constexpr bool value = false;
};

// Calls loop(k, kind) with coefficients of which the compiler knows the usual ones: nothing is
// cautious or decays late, the rule's rare option is off, and gradients have weight decay or not.
// Selects that never change need more registers than AVX2 has (in the cache, ns an element, AMD
// EPYC: AdamW 0.69 and 0.34, RMSprop 0.79 and 0.36).
template <class Rule, class Loop>
FT_METHOD void with_usual(const Coefficients& k, const Loop& loop) {
  Coefficients usual = k;
  usual.cautious = usual.late_decay = 0;
  usual.caution = 1;
  if (Rule::kRare != 0) usual.c[Rule::kRare] = 0;
  const bool common =
      k.cautious == 0 && k.late_decay == 0 && (Rule::kRare == 0 || k.c[Rule::kRare] == 0);
  if (!common || sizeof(typename Rule::Number) == sizeof(double)) return loop(k, Unusual());
  if (k.c[0] != 0) return loop(usual, Usual());
  usual.c[0] = 0;
  loop(usual, Usual());
}

template <template <class> class Rule, int kStates, class T>
FT_METHOD void update_all(const Coefficients& k, T* p, const T* g, T* const* s, int64_t n) {
  const Stepper<Rule, T> stepper(k);
  T* const s0 = kStates > 0 ? s[0] : nullptr;
  T* const s1 = kStates > 1 ? s[1] : nullptr;
  T* const s2 = kStates > 2 ? s[2] : nullptr;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    States<T, kStates> state = {
        {kStates > 0 ? s0[i] : T(0), kStates > 1 ? s1[i] : T(0), kStates > 2 ? s2[i] : T(0)}};
    p[i] = stepper.step(p[i], g[i], state);
    if (kStates > 0) s0[i] = state[0];
    if (kStates > 1) s1[i] = state[1];
    if (kStates > 2) s2[i] = state[2];
  }
}

#if defined(FT_LANES) && FT_LANES == 16
#define FT_LANES_TAKE_ROOTS 1

template <template <class> class Rule, int kStates>
FT_METHOD void update_lanes(const Stepper<Rule, Lanes>& stepper, float* p, const float* g,
                            float* const* s) {
  const Lanes none(0.0f);
  States<Lanes, kStates> state = {{none, none, none}};
  for (int k = 0; k < kStates; ++k) state[k] = Lanes::load(s[k]);
  stepper.usual_step(Lanes::load(p), Lanes::load(g), state).store(p);
  for (int k = 0; k < kStates; ++k) state[k].store(s[k]);
}

// The rest goes through registers too, so every element sees the same code.
template <template <class> class Rule, int kStates>
FT_METHOD void update_in_lanes(const Coefficients& k, float* p, const float* g, float* const* s,
                               int64_t n) {
  const Stepper<Rule, Lanes> stepper(k);
  int64_t i = 0;
  float* states[kMaxStates] = {};
  for (; i + FT_LANES <= n; i += FT_LANES) {
    for (int l = 0; l < kStates; ++l) states[l] = s[l] + i;
    update_lanes<Rule, kStates>(stepper, p + i, g + i, states);
  }
  if (i == n) return;
  float value[FT_LANES] = {}, grad[FT_LANES] = {}, state[kMaxStates][FT_LANES] = {};
  const auto copy = [&](const float* from, float* to) __attribute__((always_inline)) {
    for (int64_t j = 0; j < n - i; ++j) to[j] = from[j];
  };
  copy(p + i, value);
  copy(g + i, grad);
  for (int l = 0; l < kStates; ++l) copy(s[l] + i, states[l] = state[l]);
  update_lanes<Rule, kStates>(stepper, value, grad, states);
  copy(value, p + i);
  for (int l = 0; l < kStates; ++l) copy(state[l], s[l] + i);
}
#else
#define FT_LANES_TAKE_ROOTS 0
#endif

template <template <class> class Rule, int kStates, class T>
void update(const Coefficients& k, T* p, const T* g, T* const* s, int64_t n) {
  with_usual<Rule<T>>(
      k, [&](const Coefficients& known, [[maybe_unused]] auto kind) __attribute__((always_inline)) {
#if FT_LANES_TAKE_ROOTS
        // Two conditions: clang checks what does not depend on `kind` for every T.
        if constexpr (Rule<T>::kTakesRoots && sizeof(T) == sizeof(float))
          if constexpr (decltype(kind)::value)
            return update_in_lanes<Rule, kStates>(known, p, g, s, n);
#endif
        update_all<Rule, kStates>(known, p, g, s, n);
      });
}

static FT_METHOD void copy_rest(const uint16_t* from, uint16_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}

// Steps of kLanes elements: with the bits of the two loops above.
template <template <class> class Rule, int kStates>
FT_METHOD void step_block(const Stepper<Rule, float>& stepper, float* value, const float* grad,
                          float (*state)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    States<float, kStates> own = {{kStates > 0 ? state[0][i] : 0.0f,
                                   kStates > 1 ? state[1][i] : 0.0f,
                                   kStates > 2 ? state[2][i] : 0.0f}};
    value[i] = stepper.step(value[i], grad[i], own);
    for (int k = 0; k < kStates; ++k) state[k][i] = own[k];
  }
}
#if FT_LANES_TAKE_ROOTS
template <template <class> class Rule, int kStates>
FT_METHOD void step_block(const Stepper<Rule, Lanes>& stepper, float* value, const float* grad,
                          float (*state)[kLanes]) {
  float* states[kMaxStates] = {};
  for (int i = 0; i < kLanes; i += FT_LANES) {
    for (int k = 0; k < kStates; ++k) states[k] = state[k] + i;
    update_lanes<Rule, kStates>(stepper, value + i, grad + i, states);
  }
}
#endif

// The same where all is of one 16-bit format: converted in registers, block by block.
template <template <class> class Rule, int kStates, class Format, class Number>
FT_METHOD void block_update(const Stepper<Rule, Number>& stepper, uint16_t* p, const uint16_t* g,
                            uint16_t* const* s) {
  alignas(64) float value[kLanes], grad[kLanes], state[kMaxStates][kLanes];
  Format::load(p, value);
  Format::load(g, grad);
  for (int k = 0; k < kStates; ++k) Format::load(s[k], state[k]);
  step_block<Rule, kStates>(stepper, value, grad, state);
  Format::store(value, p);
  for (int k = 0; k < kStates; ++k) Format::store(state[k], s[k]);
}

// The rest goes through a block too, so every element sees the same code.
template <template <class> class Rule, int kStates, class Format, class Number>
FT_METHOD void update_blocks(const Coefficients& k, uint16_t* p, const uint16_t* g,
                             uint16_t* const* s, int64_t n) {
  const Stepper<Rule, Number> stepper(k);
  uint16_t value[kLanes] = {}, grad[kLanes] = {}, state[kMaxStates][kLanes] = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t rest = n - i;
    uint16_t* values = p + i;
    const uint16_t* grads = g + i;
    uint16_t* states[kMaxStates] = {};
    for (int l = 0; l < kStates; ++l) states[l] = s[l] + i;
    if (rest < kLanes) {
      copy_rest(values, value, rest);
      copy_rest(grads, grad, rest);
      for (int l = 0; l < kStates; ++l) copy_rest(states[l], state[l], rest);
      values = value;
      grads = grad;
      for (int l = 0; l < kStates; ++l) states[l] = state[l];
    }
    block_update<Rule, kStates, Format>(stepper, values, grads, states);
    if (rest < kLanes) {
      copy_rest(value, p + i, rest);
      for (int l = 0; l < kStates; ++l) copy_rest(state[l], s[l] + i, rest);
    }
  }
}

template <template <class> class Rule, int kStates, class Format>
void update_16bit(const Coefficients& k, uint16_t* p, const uint16_t* g, uint16_t* const* s,
                  int64_t n) {
  with_usual<Rule<float>>(
      k, [&](const Coefficients& known, [[maybe_unused]] auto kind) __attribute__((always_inline)) {
#if FT_LANES_TAKE_ROOTS
        if constexpr (Rule<float>::kTakesRoots)
          if constexpr (decltype(kind)::value)
            return update_blocks<Rule, kStates, Format, Lanes>(known, p, g, s, n);
#endif
        update_blocks<Rule, kStates, Format, float>(known, p, g, s, n);
      });
}

// Sums in a fixed order: lanes first, then across them.
constexpr int kSumLanes = 16;

// The sum of x[i] y[i]; n is a multiple of kSumLanes.
template <class T>
double sum_of_products(const T* x, const T* y, int64_t n) {
  double lanes[kSumLanes] = {}, sum = 0;
  for (int64_t i = 0; i < n; i += kSumLanes)
    for (int lane = 0; lane < kSumLanes; ++lane)
      lanes[lane] += double(x[i + lane]) * double(y[i + lane]);
  for (int lane = 0; lane < kSumLanes; ++lane) sum += lanes[lane];
  return sum;
}

// The terms go through a block in the cache: a loop that computes and sums at once is not
// vectorised (69 ms instead of 34 for LAMB on ResNet-50, 2 threads).
template <template <class> class Rule, int kStates, class T>
void trial(const Coefficients& k, const T* p, const T* g, const T* const* s, int64_t n,
           double* sums) {
  constexpr int kPiece = 256;
  const Stepper<Rule, T> stepper(k);
  const T* const s0 = kStates > 0 ? s[0] : nullptr;
  const T* const s1 = kStates > 1 ? s[1] : nullptr;
  const T* const s2 = kStates > 2 ? s[2] : nullptr;
  T u[kPiece], weight[kPiece], agreeing[kPiece], one[kPiece];
  for (int i = 0; i < kPiece; ++i) one[i] = T(1);
  for (int64_t start = 0; start < n; start += kPiece) {
    const int64_t m = n - start < kPiece ? n - start : kPiece;
#pragma GCC ivdep
    for (int64_t j = 0; j < m; ++j) {
      const int64_t i = start + j;
      States<T, kStates> state = {
          {kStates > 0 ? s0[i] : T(0), kStates > 1 ? s1[i] : T(0), kStates > 2 ? s2[i] : T(0)}};
      bool agrees;
      u[j] = stepper.direction(p[i], g[i], state, agrees);
      agreeing[j] = agrees ? T(1) : T(0);
      weight[j] = p[i];
    }
    const int64_t padded = (m + kSumLanes - 1) / kSumLanes * kSumLanes;
    for (int64_t j = m; j < padded; ++j) u[j] = weight[j] = agreeing[j] = T(0);
    sums[0] += sum_of_products(agreeing, one, padded);
    sums[1] += sum_of_products(u, u, padded);
    sums[2] += sum_of_products(u, weight, padded);
  }
}

template <class T>
double non_finite(const T* x, T factor, int64_t n) {
  double bad[kSumLanes] = {}, sum = 0;
  for (int64_t i = 0; i < n; i += kSumLanes)
    for (int lane = 0; lane < kSumLanes && i + lane < n; ++lane) {
      const T value = x[i + lane] * factor;
      // inf - inf and nan - nan are nan
      bad[lane] += value - value != T(0) ? 1.0 : 0.0;
    }
  for (int lane = 0; lane < kSumLanes; ++lane) sum += bad[lane];
  return sum;
}

// Squares of finite floats have a finite sum in double: non-finite values are counted only where it
// is none.
template <class T>
void measure(const T* x, T factor, int64_t n, double* sums) {
  double squares[kSumLanes] = {}, sum = 0;
  const auto add = [&](int64_t i, int lane) {
    const T value = x[i] * factor;
    squares[lane] += double(value) * double(value);
  };
  int64_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes)
    for (int lane = 0; lane < kSumLanes; ++lane) add(i + lane, lane);
  for (int lane = 0; i < n; ++i, ++lane) add(i, lane);
  for (int lane = 0; lane < kSumLanes; ++lane) {
    sums[1] += squares[lane];
    sum += squares[lane];
  }
  if (sizeof(T) == sizeof(double) || !(sum - sum == 0)) sums[0] += non_finite(x, factor, n);
}

template <class T>
void multiply(T* x, T factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

template <class T>
void average(T* a, const T* x, T weight, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) a[i] += weight * (x[i] - a[i]);
}

// Adds 16 random bits below the last that bfloat16 keeps, and cuts. Infinities and NaN stay.
static void to_bfloat16_stochastic(const float* in, uint16_t* out, int64_t n, int64_t first,
                                   uint32_t key) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = float_to_bits(in[i]);
    const uint32_t random = random_bits(uint32_t(first + i), key) >> 16;
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    const uint32_t rounded = (bits + random) >> 16;
    out[i] = finite ? static_cast<uint16_t>(rounded) : float_to_bfloat16(in[i]);
  }
}

// Weights of 16-bit parameters and their corrections, and back: split_weights.h of n elements.
template <class Format, class Correction>
struct SplitLoops;

template <class Correction>
struct SplitLoops<BFloat16, Correction> {
  static constexpr int kBits = 8 * sizeof(Correction);

  static void join(const uint16_t* p, const void* correction, float* weights, int64_t n) {
    const Correction* const c = static_cast<const Correction*>(correction);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) weights[i] = join_bfloat16<kBits>(p[i], c[i]);
  }

  static void split(const float* weights, uint16_t* p, void* correction, int64_t n, int64_t first,
                    int64_t key) {
    Correction* const c = static_cast<Correction*>(correction);
    if (key >= 0)
      split(weights, p, c, n,
            [&](int64_t i) { return random_bits(uint32_t(first + i), uint32_t(key)) >> 24; });
    else
      split(weights, p, c, n, [](int64_t) { return kNearest24; });
  }

 private:
  template <class Added>
  static FT_METHOD void split(const float* weights, uint16_t* p, Correction* c, int64_t n,
                              const Added& added) {
    uint32_t most = 0;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bits_of_weight(weights[i]), magnitude = bits & 0x7fffffffu;
      const SplitWeight parts = split_finite_bfloat16<kBits>(bits, added(i));
      p[i] = static_cast<uint16_t>(parts.param);
      c[i] = static_cast<Correction>(parts.correction);
      most = magnitude > most ? magnitude : most;
    }
    if (most < 0x7f800000u) return;  // all are finite
    for (int64_t i = 0; i < n; ++i) {
      const SplitWeight parts = split_bfloat16<kBits>(weights[i], added(i));
      p[i] = static_cast<uint16_t>(parts.param);
      c[i] = static_cast<Correction>(parts.correction);
    }
  }
};

template <class Correction>
struct SplitLoops<Half, Correction> {
  static constexpr int kBits = 8 * sizeof(Correction);

  static void join(const uint16_t* p, const void* correction, float* weights, int64_t n) {
    const Correction* const c = static_cast<const Correction*>(correction);
    from_16bit<Half>(p, weights, n);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) weights[i] = join_half<kBits>(weights[i], c[i]);
  }

  static void split(const float* weights, uint16_t* p, void* correction, int64_t n, int64_t,
                    int64_t) {
    constexpr int kPiece = 256;
    Correction* const c = static_cast<Correction*>(correction);
    float values[kPiece];
    for (int64_t start = 0; start < n; start += kPiece) {
      const int64_t m = n - start < kPiece ? n - start : kPiece;
      to_16bit<Half>(weights + start, p + start, m);
      from_16bit<Half>(p + start, values, m);
#pragma GCC ivdep
      for (int64_t j = 0; j < m; ++j)
        c[start + j] =
            static_cast<Correction>(half_correction<kBits>(weights[start + j], values[j]));
    }
  }
};

static FT_METHOD float followed(BFloat16, float master, uint16_t p) {
  return follow_bfloat16(master, p);
}
static FT_METHOD float followed(Half, float master, uint16_t p) {
  return follow_half(master, half_to_float(p));
}

// Whether certainly nobody has written: a quick look without the rare cases.
static FT_METHOD bool are_rounded(BFloat16, const float* masters, const uint16_t* p, int64_t n) {
  uint32_t distances = 0, most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of_weight(masters[i]), magnitude = bits & 0x7fffffffu;
    distances |= bits - (static_cast<uint32_t>(p[i]) << 16) + 0x8000u;
    most = magnitude > most ? magnitude : most;
  }
  return distances < 0x10000u && most <= 0x7f800000u;
}
static FT_METHOD bool are_rounded(Half, const float* masters, const uint16_t* p, int64_t n) {
  constexpr int kPiece = 256;
  uint16_t rounded[kPiece];
  uint32_t differing = 0;
  for (int64_t start = 0; start < n; start += kPiece) {
    const int64_t m = n - start < kPiece ? n - start : kPiece;
    to_16bit<Half>(masters + start, rounded, m);
    for (int64_t j = 0; j < m; ++j) differing |= rounded[j] ^ p[start + j];
  }
  return differing == 0;
}

template <class Format>
bool follow(const uint16_t* p, const float* masters, float* weights, int64_t n) {
  if (are_rounded(Format(), masters, p, n)) return false;
  for (int64_t i = 0; i < n; ++i) weights[i] = followed(Format(), masters[i], p[i]);
  return true;
}

// Instances only for the numbers of states that a rule can have.
template <template <class> class Rule, int kStates, int kLeast, int kMost, class T>
constexpr typename cpu::OptimizerKernels<T, T>::Update update_kernel() {
  if constexpr (kStates >= kLeast && kStates <= kMost)
    return update<Rule, kStates, T>;
  else
    return nullptr;
}
template <template <class> class Rule, int kStates, int kLeast, int kMost, class Format>
constexpr cpu::OptimizerKernels<uint16_t, float>::Update update_kernel_16bit() {
  if constexpr (kStates >= kLeast && kStates <= kMost)
    return update_16bit<Rule, kStates, Format>;
  else
    return nullptr;
}
template <template <class> class Rule, int kStates, int kLeast, int kMost, class T>
constexpr typename cpu::OptimizerKernels<T, T>::Trial trial_kernel() {
  if constexpr (kStates >= kLeast && kStates <= kMost)
    return trial<Rule, kStates, T>;
  else
    return nullptr;
}

FT_END_NAMESPACE
