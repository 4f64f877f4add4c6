// Bias, activation, gain, clamp and dropout, and their node.
#pragma once

#include <ATen/ops/empty_strided.h>

#include <string>
#include <tuple>

#include "activations.h"
#include "tensors.h"

namespace fusedtrain {

// A byte for each activation, given once by Python. Not 0: the output is compared with a bound in
// backward, and so must not be multiplied.
inline std::string& bounded_activations() {
  static std::string bounded;
  return bounded;
}

// The arguments of the ops behind the tensors.
struct BiasActSettings {
  int64_t dim;
  Pointwise f;
  double gain, clamp, p;

  auto fields() const { return std::tie(dim, f, gain, clamp, p); }

  Tensor output(const Tensor& input, const Tensor& bias, const Tensor& seed,
                const Tensor& residual) const {
    static const Op<Tensor(const Tensor&, const MaybeTensor&, const MaybeTensor&,
                           const MaybeTensor&, int64_t, int64_t, double, double, double, double,
                           double)>
        op = "fusedtrain::bias_act";
    const BelowAutograd below(input);
    return op.call(input, maybe(bias), maybe(seed), maybe(residual), dim, f.op, f.a, f.b, gain,
                   clamp, p);
  }

  std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& saved, const Tensor& bias,
                                      const Tensor& seed, bool needs_bias) const {
    static const Op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&,
                                               const MaybeTensor&, int64_t, int64_t, double, double,
                                               double, double, double, bool)>
        op = "fusedtrain::bias_act_backward";
    return op.call(grad, saved, maybe(bias), maybe(seed), dim, f.op, f.a, f.b, gain, clamp, p,
                   needs_bias);
  }
};

struct BiasActRule {
  static constexpr size_t kSaved = 3, kEdges = 3;
  static constexpr const char* kLabel = "BiasActBackward";
  enum Saved { kActivated, kBias, kSeed };
  enum Edge { kToInput, kToBias, kToResidual };
  BiasActSettings settings;
  std::vector<int64_t> strides;  // of the output, by which the mask goes; of dropout only

  variable_list gradients(const Tensor& given, const SavedTensors<BiasActRule>& s,
                          const Needs<BiasActRule>& needs) const {
    if (!needs[kToInput] && !needs[kToBias]) return {Tensor(), Tensor(), given};
    const bool drops = s[kSeed].defined();
    const Tensor grad = drops ? laid_out(given) : given;
    const Tensor saved = !s[kActivated].defined() ? grad
                         : drops                  ? laid_out(s[kActivated])
                                                  : s[kActivated];
    auto [grad_input, sums] = settings.backward(grad, saved, s[kBias], s[kSeed], needs[kToBias]);
    if (!needs[kToBias]) return {std::move(grad_input), Tensor(), given};
    const Tensor& bias = s[kBias];
    sums = sums.view(-1);
    if (sums.scalar_type() != bias.scalar_type()) sums = sums.to(bias.scalar_type());
    return {std::move(grad_input), std::move(sums), given};
  }

  variable_list by_formula(const Tensor& grad, const SavedTensors<BiasActRule>& s,
                           const Needs<BiasActRule>& needs) const {
    return call_formula(formula_of<BiasActRule>(), grad, s, settings, needs[kToBias], strides);
  }

  auto fields() const { return std::tie(settings, strides); }

 private:
  Tensor laid_out(const Tensor& t) const {
    if (t.strides() == at::IntArrayRef(strides)) return t;
    return at::empty_strided(t.sizes(), strides, t.options()).copy_(t);
  }
};

// Whether the op takes the call as it is.
inline bool fits(const Tensor& input, const Tensor& bias, const Tensor& residual,
                 BiasActSettings& s) {
  if (!are_usual(input, {&bias, &residual}) || !(s.p >= 0 && s.p < 1)) return false;
  // The output has the residual's layout in torch, and here the input's.
  if (residual.defined() &&
      (residual.sizes() != input.sizes() || residual.strides() != input.strides()))
    return false;
  if (!bias.defined()) {
    s.dim = -1;
  } else {
    if (s.dim < 0) s.dim += input.dim();
    if (s.dim < 0 || s.dim >= input.dim() || bias.dim() != 1 || bias.size(0) != input.size(s.dim))
      return false;
  }
  const bool bounded = s.f.op >= 0 && bounded_activations()[static_cast<size_t>(s.f.op)] != 0;
  return !bounded || (s.gain == 1 && s.p == 0 && s.clamp < 0);
}

// bias_act(input, bias, residual, dim, activation, gain, clamp, p) -> output, or NotImplemented for
// an unusual call. `clamp` is a number of the dtype. Saves the output where the derivative is a
// function of it (then there is no residual), else the input.
inline PyObject* bias_act(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Tensor input, bias, residual, seed;
  BiasActSettings s;
  if (!read_call("bias_act", args, count, input, bias, residual, s.dim, s.f, s.gain, s.clamp,
                 s.p) ||
      !fits(input, bias, residual, s))
    Py_RETURN_NOTIMPLEMENTED;
  const auto forward = [&] {
    if (s.p > 0) seed = new_seed(input);
    return s.output(input, bias, seed, residual);
  };
  const auto save = [&](auto& node, const Tensor& output) {
    using Rule = BiasActRule;
    if (seed.defined()) node.rule.strides = output.strides().vec();
    if (s.f.saves_output())
      node.save(Rule::kActivated, output, /*is_output=*/true);
    else if (s.f.op >= 0 || s.clamp >= 0)  // else the derivative is constant
      node.save(Rule::kActivated, input);
    node.save(Rule::kBias, bias);
    node.save(Rule::kSeed, seed);
  };
  return wrapped(run(BiasActRule{s, {}}, forward, save, input, bias, residual));
  END_HANDLE_TH_ERRORS
}

// prepare_bias_act(formula, bounded): what bias_act needs from Python.
inline PyObject* prepare_bias_act(PyObject* module, PyObject* args) {
  PyObject* formula;
  const char* bounded;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "Oy#", &formula, &bounded, &size)) return nullptr;
  bounded_activations().assign(bounded, static_cast<size_t>(size));
  return prepare<BiasActRule>(module, formula);
}

}  // namespace fusedtrain
