// Surroundings of the rules of optimizer_rules.h: the step of one element, the numbers that clip a
// gradient, random bits, the loss scale.
#pragma once

#include "optimizer_rules.h"

FT_BEGIN_NAMESPACE

// Step of an element around a rule, the same for every rule.
template <template <class> class Formula, class T>
struct Stepper {
  Formula<T> formula;
  T gradient, keep, size, late_decay, caution;
  bool cautious, decays_late;

  FT_METHOD explicit Stepper(const Coefficients& k)
      : formula(k),
        gradient(T(k.gradient)),
        keep(T(k.keep)),
        size(T(k.size)),
        late_decay(T(k.late_decay)),
        caution(T(k.caution)),
        cautious(k.cautious != 0),
        decays_late(k.late_decay != 0) {}

  // The direction of an element, as the rule has it and with disagreeing ones at 0; advances `s`:
  // kMaxStates numbers, or States.
  template <class S>
  FT_METHOD T direction(T p, T stored, S& s, bool& agrees) const {
    T g = stored * gradient;
    const T u = formula(p, g, s);
    agrees = u * g > T(0);
    return cautious && !agrees ? u * T(0) : u;
  }

  template <class S>
  FT_METHOD T step(T p, T stored, S& s) const {
    bool agrees;
    T u = direction(p, stored, s, agrees) * caution;
    u = decays_late ? u + late_decay * p : u;
    return keep * p - size * u;
  }

  // The same where nothing is cautious or decays late, without a comparison of T.
  template <class S>
  FT_METHOD T usual_step(T p, T stored, S& s) const {
    T g = stored * gradient;
    return keep * p - size * formula(p, g, s);
  }
};

// Computes the coefficients that wait for a trial of the update: caution (arXiv 2411.16085, with
// timm's bound) and trust ratios of the update's norm.
template <template <class> class Formula>
FT_METHOD void finish_step(const TensorFacts& t, const TrialFacts& trial, Coefficients& k) {
  if (k.cautious != 0) {
    const double share = trial.agreeing / (trial.numel > 0 ? trial.numel : 1);
    k.caution = 1 / (share > 1e-3 ? share : 1e-3);
  }
  Formula<double>::finish(t, trial, k);
}

// Random bits for stochastic rounding: a hash of the element's index under the tensor's key of this
// step (the finaliser "lowbias32" of Chris Wellons' hash-prospector, public domain).
FT_INLINE uint32_t random_bits(uint32_t index, uint32_t key) {
  uint32_t x = index * 0x9e3779b9u + key;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

// Whether stochastic rounding changes a tensor: it rounds bfloat16 parameters, and weights of
// bfloat16 parameters that keep 24 bits.
static inline bool rounds_stochastically(const OptimizerTensor& t) {
  return t.param_dtype == Dtype::kBFloat16 && (t.master == nullptr || t.correction_bits == 8);
}

// The seed of a step's options.
FT_INLINE int64_t whole_seed(const StepOptions& options) {
  return int64_t(uint64_t(options.seed) + (uint64_t(options.seed_high) << 32));
}

// The key of a tensor at a step (splitmix64's finaliser).
FT_INLINE uint32_t random_key(int64_t seed, int64_t tensor, int64_t step) {
  uint64_t x = uint64_t(seed) + uint64_t(tensor) * 0x9e3779b97f4a7c15u +
               uint64_t(step) * 0xd1b54a32d192ed03u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return uint32_t(x >> 32) ^ uint32_t(x);
}

// The numbers that clip a gradient.

// Global norm: torch's max_norm / (norm + eps), at most 1.
FT_INLINE double clip_coefficient(double norm, double max_norm, double eps) {
  const double ratio = max_norm / (norm + eps);
  return ratio < 1 || ratio != ratio ? ratio : 1;
}

// Adaptive gradient clipping of one unit (arXiv 2102.06171), timm's constants.
FT_INLINE double adaptive_clip_coefficient(double grad_norm, double param_norm, double factor,
                                           double eps) {
  const double most = (param_norm > eps ? param_norm : eps) * factor;
  return grad_norm < most ? 1 : most / (grad_norm > 1e-6 ? grad_norm : 1e-6);
}

// The loss scale after the steps of an iteration. found_inf != 0 is a bad step: after `hysteresis`
// of them without a good one between, and at every one that follows, the scale backs off.
FT_INLINE void next_scale(const ScaleUpdate& u) {
  const bool bad = !(*u.found_inf == 0);
  float scale = *u.scale;
  if (bad) {
    *u.growth_tracker = 0;
    if (*u.hysteresis_tracker > 0) *u.hysteresis_tracker -= 1;
    if (*u.hysteresis_tracker == 0) scale = float(scale * u.backoff_factor);
  } else {
    *u.hysteresis_tracker = int32_t(u.hysteresis);
    *u.growth_tracker += 1;
    if (*u.growth_tracker == u.growth_interval) {
      const float grown = float(scale * u.growth_factor);
      if (grown - grown == 0) scale = grown;
      *u.growth_tracker = 0;
    }
  }
  scale = scale < u.min_scale ? float(u.min_scale) : scale;
  *u.scale = scale > u.max_scale ? float(u.max_scale) : scale;
}

FT_END_NAMESPACE
