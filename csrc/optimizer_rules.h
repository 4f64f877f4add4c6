// Every update rule as one small struct: what one element's step is, and the numbers it needs.
//
// prepare() turns the options of a group, the step count and the norms of one tensor into
// coefficients, once a step, in double. operator()(p, g, s) advances the states `s` of one element
// in place and returns its direction u; optimizer_step.h makes p' = keep p - size u of it. T is
// float (also for 16-bit tensors, which are converted at the edges) or double. A state that a
// tensor does not have reads as 0.
//
// To add one: a struct, a line in FT_RULES, and the places that CONTRIBUTING.md lists.
#pragma once

#include <math.h>

#include "host_device.h"
#include "ops/optimizers.h"
#include "vecmath.h"

// name, struct, least and most states of an element
#define FT_RULES(X)              \
  X(sgd, Sgd, 0, 1)              \
  X(lars, Lars, 0, 1)            \
  X(adam, Adam, 2, 3)            \
  X(nadamw, NAdamW, 2, 2)        \
  X(lamb, Lamb, 2, 2)            \
  X(lion, Lion, 1, 1)            \
  X(rmsprop, RMSprop, 1, 3)      \
  X(rmsprop_tf, RMSpropTF, 1, 3) \
  X(adagrad, Adagrad, 1, 1)      \
  X(novograd, NovoGrad, 1, 1)

namespace fusedtrain {
#define FT_RULE_NUMBER(name, Rule, least, most) rule_##name,
enum RuleNumber { FT_RULES(FT_RULE_NUMBER) kRules };
#undef FT_RULE_NUMBER
}  // namespace fusedtrain

FT_BEGIN_NAMESPACE

// Facts of a tensor for prepare(). Norms are those of the gradient that the rule will see: divided
// by the loss scale and clipped. Where nobody asked for them they are 0.
struct TensorFacts {
  const OptionGroup* group;
  double lr;
  double step;  // of this update, counted from 1
  double grad_norm, param_norm;
  float* second_moment;  // two numbers of the tensor, kept from step to step
};

// Further facts for finish(), from a trial of the update. Sums over the elements whose direction
// agrees with the gradient's sign where the group is cautious, over all elements elsewhere.
struct TrialFacts {
  double agreeing;  // number of elements with u g > 0
  double squares;   // sum of u^2
  double products;  // sum of u p
  double numel;
};

// Rates of decoupled weight decay: lr, or lr^2 / max_lr where it is "corrected".
FT_INLINE double decay_rate(const TensorFacts& t) {
  const double max_lr = t.group->max_lr;
  return (max_lr == 0 ? t.lr : t.lr * t.lr / max_lr) * t.group->weight_decay;
}

// The states of an element of which the compiler is to know how many the tensor has.
template <class T, int kCount>
struct States {
  T values[kMaxStates];
  FT_METHOD operator T*() { return values; }
};
template <class S>
struct CountOf {
  static constexpr int value = kMaxStates;
};
template <class T, int kCount>
struct CountOf<States<T, kCount>> {
  static constexpr int value = kCount;
};

// c[] of every rule starts so: coupled (L2) weight decay.
template <class T>
struct Rule {
  using Number = T;
  static constexpr int kRare = 0;  // the place in c[] of an option that few ask for, where not 0
  static constexpr bool kTakesRoots = false;  // of each element

  T weight_decay;
  bool decays;

  FT_METHOD explicit Rule(const Coefficients& k) : weight_decay(T(k.c[0])), decays(k.c[0] != 0) {}

  // A multiplication by 0 is no "none": parameters may be infinite.
  FT_METHOD T coupled(T p, T g) const { return decays ? g + weight_decay * p : g; }

  FT_METHOD static void finish(const TensorFacts&, const TrialFacts&, Coefficients&) {}
};

// Weight decay: of the parameter, or coupled: part of the gradient.
FT_INLINE void decay(bool decoupled, const TensorFacts& t, Coefficients& k) {
  k.keep = decoupled ? 1 - decay_rate(t) : 1;
  k.c[0] = decoupled ? 0 : t.group->weight_decay;
}

// Without momentum, and where the first gradient fills the momentum buffer.
FT_INLINE bool undampened(const TensorFacts& t) { return t.group->option[0] == 0 || t.step == 1; }

// torch.optim.SGD; with decoupled weight decay timm's SGDW.
// options: momentum, dampening, nesterov, decoupled
template <class T>
struct Sgd : Rule<T> {
  T momentum, fresh, trust;
  bool nesterov;

  FT_METHOD static void prepare(const TensorFacts& t, Coefficients& k) {
    const double* option = t.group->option;
    k.size = t.lr;
    decay(option[3] != 0, t, k);
    k.c[1] = option[0];
    k.c[2] = undampened(t) ? 1 : 1 - option[1];
    k.c[3] = option[2];
    k.c[4] = 1;
    if (option[0] == 0) k.cautious = 0;  // as timm: the direction is the gradient itself
  }

  FT_METHOD explicit Sgd(const Coefficients& k)
      : Rule<T>(k),
        momentum(T(k.c[1])),
        fresh(T(k.c[2])),
        trust(T(k.c[4])),
        nesterov(k.c[3] != 0) {}

  FT_METHOD T operator()(T p, T& g, T* s) const {
    g = this->coupled(p, g) * trust;
    s[0] = momentum * s[0] + fresh * g;
    return nesterov ? g + momentum * s[0] : s[0];
  }
};

// timm's Lars (LARC with trust_clip): SGD behind a trust ratio of each tensor.
// options: momentum, dampening, nesterov, trust_coeff, eps, trust_clip, always_adapt
template <class T>
struct Lars : Sgd<T> {
  using Sgd<T>::Sgd;

  FT_METHOD static void prepare(const TensorFacts& t, Coefficients& k) {
    const double* option = t.group->option;
    const double decay = t.group->weight_decay;
    k.size = t.lr;
    k.keep = 1;
    k.c[0] = decay;
    k.c[1] = option[0];
    k.c[2] = undampened(t) ? 1 : 1 - option[1];
    k.c[3] = option[2];
    double trust = 1;
    if (decay != 0 || option[6] != 0) {
      if (t.param_norm > 0 && t.grad_norm > 0)
        trust = option[3] * t.param_norm / (t.grad_norm + t.param_norm * decay + option[4]);
      if (option[5] != 0) trust = trust / t.lr < 1 ? trust / t.lr : 1;
    }
    k.c[4] = trust;
    if (option[0] == 0) k.cautious = 0;
  }
};

// torch.optim.Adam and AdamW; `uncorrected` leaves out what makes up for averages that start at 0.
// options: beta1, beta2, eps, decoupled, uncorrected
template <class T>
struct Adam : Rule<T> {
  static constexpr bool kTakesRoots = true;

  T beta2, fresh1, fresh2, root, eps;

  FT_METHOD static void prepare(const TensorFacts& t, Coefficients& k) {
    const double* option = t.group->option;
    const bool corrects = option[4] == 0;
    k.size = corrects ? t.lr / (1 - pow(option[0], t.step)) : t.lr;
    decay(option[3] != 0, t, k);
    k.c[1] = option[0];
    k.c[2] = option[1];
    k.c[3] = 1 - option[0];
    k.c[4] = 1 - option[1];
    k.c[5] = corrects ? 1 / ::sqrt(1 - pow(option[1], t.step)) : 1;
    k.c[6] = option[2];
  }

  FT_METHOD explicit Adam(const Coefficients& k)
      : Rule<T>(k),
        beta2(T(k.c[2])),
        fresh1(T(k.c[3])),
        fresh2(T(k.c[4])),
        root(T(k.c[5])),
        eps(T(k.c[6])) {}

  template <class S>
  FT_METHOD T operator()(T p, T& g, S& s) const {
    g = this->coupled(p, g);
    s[0] += (g - s[0]) * fresh1;
    s[1] = beta2 * s[1] + fresh2 * g * g;
    T square = s[1];
    if (CountOf<S>::value > 2)  // amsgrad: the largest so far
      square = s[2] = math::largest(s[1], s[2]);
    return s[0] / (math::sqrt(square) * root + eps);
  }
};

// timm's NAdamW: AdamW that looks one step of the average ahead.
// options: beta1, beta2, eps, decoupled (always 1), uncorrected (always 0)
template <class T>
struct NAdamW : Adam<T> {
  T beta1;

  FT_METHOD explicit NAdamW(const Coefficients& k) : Adam<T>(k), beta1(T(k.c[1])) {}

  FT_METHOD T operator()(T, T& g, T* s) const {
    s[0] += (g - s[0]) * this->fresh1;
    s[1] = this->beta2 * s[1] + this->fresh2 * g * g;
    const T ahead = s[0] * beta1 + g * this->fresh1;
    return ahead / (math::sqrt(s[1]) * this->root + this->eps);
  }
};

// timm's Lamb: Adam's direction, with a trust ratio of each tensor. Apex's adam_w_mode=False is a
// decoupled_decay of 2: weight decay is part of the gradient that the averages see.
// options: beta1, beta2, eps, bias_correction, grad_averaging, trust_clip, always_adapt,
// decoupled_decay
template <class T>
struct Lamb : Rule<T> {
  static constexpr bool kTakesRoots = true;

  T beta1, beta2, fresh1, fresh2, root, eps, correction;

  FT_METHOD static void prepare(const TensorFacts& t, Coefficients& k) {
    const double* option = t.group->option;
    const bool decoupled = option[7] == 1, coupled = option[7] == 2, corrects = option[3] != 0;
    k.size = t.lr;
    k.keep = decoupled ? 1 - decay_rate(t) : 1;
    k.late_decay = decoupled || coupled ? 0 : t.group->weight_decay;
    k.c[0] = coupled ? t.group->weight_decay : 0;
    k.c[1] = option[0];
    k.c[2] = option[1];
    k.c[3] = option[4] != 0 ? 1 - option[0] : 1;
    k.c[4] = 1 - option[1];
    k.c[5] = corrects ? 1 / ::sqrt(1 - pow(option[1], t.step)) : 1;
    k.c[6] = option[2];
    k.c[7] = corrects ? 1 / (1 - pow(option[0], t.step)) : 1;
  }

  FT_METHOD static void finish(const TensorFacts& t, const TrialFacts& trial, Coefficients& k) {
    const double* option = t.group->option;
    if (t.group->weight_decay == 0 && option[6] == 0) return;
    const double w = ::fabs(k.keep) * t.param_norm, decay = k.late_decay, caution = k.caution;
    const double squares = caution * caution * trial.squares +
                           2 * caution * decay * trial.products +
                           decay * decay * t.param_norm * t.param_norm;
    const double u = ::sqrt(squares);
    double trust = w > 0 && u > 0 ? w / u : 1;
    if (option[5] != 0 && trust > 1) trust = 1;
    k.size *= trust;
  }

  FT_METHOD explicit Lamb(const Coefficients& k)
      : Rule<T>(k),
        beta1(T(k.c[1])),
        beta2(T(k.c[2])),
        fresh1(T(k.c[3])),
        fresh2(T(k.c[4])),
        root(T(k.c[5])),
        eps(T(k.c[6])),
        correction(T(k.c[7])) {}

  FT_METHOD T operator()(T p, T& g, T* s) const {
    g = this->coupled(p, g);
    s[0] = beta1 * s[0] + fresh1 * g;
    s[1] = beta2 * s[1] + fresh2 * g * g;
    return s[0] * correction / (math::sqrt(s[1]) * root + eps);
  }
};

// Lion (arXiv 2302.06675), as timm has it. The sign of 0 is 0.
// options: beta1, beta2
template <class T>
struct Lion : Rule<T> {
  T beta1, fresh1, fresh2;

  FT_METHOD static void prepare(const TensorFacts& t, Coefficients& k) {
    const double* option = t.group->option;
    k.size = t.lr;
    decay(true, t, k);
    k.c[1] = option[0];
    k.c[2] = 1 - option[0];
    k.c[3] = 1 - option[1];
  }

  FT_METHOD explicit Lion(const Coefficients& k)
      : Rule<T>(k), beta1(T(k.c[1])), fresh1(T(k.c[2])), fresh2(T(k.c[3])) {}

  FT_METHOD T operator()(T, T& g, T* s) const {
    const T ahead = beta1 * s[0] + fresh1 * g;
    s[0] += (g - s[0]) * fresh2;
    return ahead > T(0) ? T(1) : (ahead < T(0) ? T(-1) : ahead);
  }
};

// Common part of the RMSprops: c[1] to c[4], and the centered variance of the two averages.
template <class T>
struct Centered : Rule<T> {
  static constexpr int kRare = 4;
  static constexpr bool kTakesRoots = true;

  T fresh, eps, momentum;
  T factor;  // c[5]: alpha of RMSprop, the learning rate inside of RMSpropTF
  bool centered;

  FT_METHOD static void prepare(const double* option, double factor, Coefficients& k) {
    k.c[1] = 1 - option[0];
    for (int i = 1; i < 4; ++i) k.c[i + 1] = option[i];
    k.c[5] = factor;
  }

  FT_METHOD explicit Centered(const Coefficients& k)
      : Rule<T>(k),
        fresh(T(k.c[1])),
        eps(T(k.c[2])),
        momentum(T(k.c[3])),
        factor(T(k.c[5])),
        centered(k.c[4] != 0) {}

  FT_METHOD T variance(T g, T* s) const {
    s[2] += (g - s[2]) * fresh;
    // Rounding may make it negative, and torch's square root is nan there.
    return math::at_least(centered ? s[0] - s[2] * s[2] : s[0], T(0));
  }
};

// torch.optim.RMSprop. states: square_avg, momentum_buffer, grad_avg
// options: alpha, eps, momentum, centered
template <class T>
struct RMSprop : Centered<T> {
  using Centered<T>::Centered;

  FT_METHOD static void prepare(const TensorFacts& t, Coefficients& k) {
    k.size = t.lr;
    decay(false, t, k);
    Centered<T>::prepare(t.group->option, t.group->option[0], k);
  }

  FT_METHOD T operator()(T p, T& g, T* s) const {
    g = this->coupled(p, g);
    s[0] = this->factor * s[0] + this->fresh * g * g;
    const T variance = this->variance(g, s);
    s[1] = this->momentum * s[1] + g / (math::sqrt(variance) + this->eps);
    return s[1];
  }
};

// timm's RMSpropTF: eps inside the root, the learning rate inside the momentum buffer.
// states: square_avg (starts at 1), momentum_buffer, grad_avg
// options: alpha, eps, momentum, centered, decoupled_decay, lr_in_momentum
template <class T>
struct RMSpropTF : Centered<T> {
  using Centered<T>::Centered;

  FT_METHOD static void prepare(const TensorFacts& t, Coefficients& k) {
    const double* option = t.group->option;
    const bool inside = option[5] != 0 && option[2] > 0;
    k.size = inside ? 1 : t.lr;
    decay(option[4] != 0, t, k);
    Centered<T>::prepare(option, inside ? t.lr : 1, k);
    if (option[2] == 0) k.cautious = 0;  // as timm
  }

  FT_METHOD T operator()(T p, T& g, T* s) const {
    g = this->coupled(p, g);
    s[0] += (g * g - s[0]) * this->fresh;
    const T variance = this->variance(g, s);
    s[1] = this->momentum * s[1] + this->factor * g / math::sqrt(variance + this->eps);
    return s[1];
  }
};

// torch.optim.Adagrad; `decoupled` is Apex's adagrad_w_mode.
// options: lr_decay, eps, decoupled
template <class T>
struct Adagrad : Rule<T> {
  static constexpr bool kTakesRoots = true;

  T eps;

  FT_METHOD static void prepare(const TensorFacts& t, Coefficients& k) {
    const double* option = t.group->option;
    k.size = t.lr / (1 + (t.step - 1) * option[0]);
    decay(option[2] != 0, t, k);
    k.c[1] = option[1];
  }

  FT_METHOD explicit Adagrad(const Coefficients& k) : Rule<T>(k), eps(T(k.c[1])) {}

  FT_METHOD T operator()(T p, T& g, T* s) const {
    g = this->coupled(p, g);
    s[0] += g * g;
    return g / (math::sqrt(s[0]) + eps);
  }
};

// NovoGrad (arXiv 1905.11286), as timm's NvNovoGrad has it: one second moment a tensor. Apex's has
// `bias_correction`; `outside` divides and decays after the average instead of in it (Apex's
// moment_mode 1). The first squared norm is the second moment where that is 0 (`start` 0, timm), at
// the first step (1, Apex), or never (2, Apex's init_zero).
// options: beta1, beta2, eps, grad_averaging, amsgrad, bias_correction, outside, start
template <class T>
struct NovoGrad : Rule<T> {
  T beta1, per_norm, fresh;

  FT_METHOD static void prepare(const TensorFacts& t, Coefficients& k) {
    const double* option = t.group->option;
    const bool corrects = option[5] != 0, outside = option[6] == 1, inside = option[6] == 0;
    const double squares = t.grad_norm * t.grad_norm;
    float* v = t.second_moment;
    const bool first = option[7] == 0 ? v[0] == 0 : option[7] == 1 && t.step == 1;
    v[0] = float(first ? squares : option[1] * v[0] + (1 - option[1]) * squares);
    if (option[4] != 0) v[1] = v[1] > v[0] ? v[1] : v[0];
    const double root = corrects ? ::sqrt(1 - pow(option[1], t.step)) : 1;
    const double denominator = ::sqrt(double(option[4] != 0 ? v[1] : v[0])) / root + option[2];
    const double size = corrects ? t.lr / (1 - pow(option[0], t.step)) : t.lr;
    k.size = outside ? size / denominator : size;
    decay(!inside, t, k);
    k.c[1] = option[0];
    k.c[2] = outside ? 1 : 1 / denominator;
    k.c[3] = option[3] != 0 ? 1 - option[0] : 1;
  }

  FT_METHOD explicit NovoGrad(const Coefficients& k)
      : Rule<T>(k), beta1(T(k.c[1])), per_norm(T(k.c[2])), fresh(T(k.c[3])) {}

  FT_METHOD T operator()(T p, T& g, T* s) const {
    g = this->coupled(p, g * per_norm) * fresh;
    s[0] = beta1 * s[0] + g;
    return s[0];
  }
};

FT_END_NAMESPACE
