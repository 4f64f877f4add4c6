// Batch norm with what follows it: `batch_norm_act`, and its node.
#pragma once

#include <tuple>

#include "activations.h"

namespace fusedtrain {

// The number of softplus, given once by Python.
inline int64_t& softplus() {
  static int64_t number = -1;
  return number;
}

struct BatchNormOps {
  Op<std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
      const MaybeTensor&, const MaybeTensor&, bool, double, double, int64_t, double, double)>
      forward = "fusedtrain::batch_norm_act";
  Op<std::tuple<Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
      const MaybeTensor&, const Tensor&, const Tensor&, bool, int64_t, double, double, bool, bool,
      bool)>
      backward = "fusedtrain::batch_norm_act_backward";

  static const BatchNormOps& all() {
    static const BatchNormOps ops;
    return ops;
  }
};

// The arguments of a call, as the op has them.
struct BatchNormCall {
  Tensor input, residual, branch_scale, weight, bias, running_mean, running_var;
  bool training;
  double momentum, eps;
  Pointwise f;
};

struct BatchNormRule {
  static constexpr size_t kSaved = 7, kEdges = 4;
  static constexpr const char* kLabel = "BatchNormActBackward";
  enum Saved { kInput, kActivated, kBranchScale, kWeight, kBias, kMean, kInvstd };
  enum Edge { kToInput, kToResidual, kToWeight, kToBias };
  using Tensors = SavedTensors<BatchNormRule>;

  bool training;
  double eps;
  Pointwise f;

  variable_list gradients(const Tensor& grad, const Tensors& s,
                          const Needs<BatchNormRule>& needs) const {
    const bool added = f.op < 0;  // A residual that is only added gets the gradient itself.
    auto [input, residual, weight, bias] = BatchNormOps::all().backward.call(
        grad, maybe(s[kInput]), maybe(s[kActivated]), maybe(s[kBranchScale]), maybe(s[kWeight]),
        maybe(s[kBias]), s[kMean], s[kInvstd], training, f.op, f.a, f.b, needs[kToInput],
        needs[kToResidual] && !added, needs[kToWeight] || needs[kToBias]);
    return {std::move(input), added ? grad : std::move(residual), std::move(weight),
            std::move(bias)};
  }

  auto fields() const { return std::tie(training, eps, f); }
};

// One value for each of `size` channels or samples, as the op takes them.
inline bool is_vector(const Tensor& t, const Tensor& input, at::ScalarType wide, int64_t size) {
  return is_usual(t) && t.scalar_type() == wide && t.dim() == 1 && t.size(0) == size &&
         t.device() == input.device();
}

// Whether the op takes the call as it is; torch's errors and all conversions are Python's work.
inline bool fits(const BatchNormCall& c) {
  const Tensor& x = c.input;
  if (!(c.eps > 0 || (c.eps == 0 && !c.training))) return false;
  if (!is_usual(x) || x.dim() < 2 || x.numel() == 0) return false;
  const int64_t channels = x.size(1);
  if (c.training && x.numel() == channels) return false;
  const bool tracks = c.running_mean.defined();
  if (tracks != c.running_var.defined() || (!tracks && !c.training)) return false;
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (const Tensor* t : {&c.weight, &c.bias, &c.running_mean, &c.running_var})
    if (t->defined() && !is_vector(*t, x, wide, channels)) return false;
  for (const Tensor* t : {&c.running_mean, &c.running_var})
    if (t->defined() && (t->requires_grad() || !t->is_contiguous())) return false;
  if (c.branch_scale.defined() &&
      (!is_vector(c.branch_scale, x, wide, x.size(0)) || c.branch_scale.requires_grad() ||
       !c.branch_scale.is_contiguous() ||
       (at::GradMode::is_enabled() && c.branch_scale.is_inference())))
    return false;
  const Tensor& r = c.residual;
  if (r.defined() && !(is_usual(r) && r.sizes() == x.sizes() &&
                       r.scalar_type() == x.scalar_type() && r.device() == x.device()))
    return false;
  // Under autocast a GPU computes softplus in float32, which Python knows.
  if (c.f.op == softplus()) return false;
  return c.f.op >= -1 && c.f.op < static_cast<int64_t>(activation_rows().size());
}

// batch_norm_act(input, residual, branch_scale, weight, bias, running_mean, running_var, training,
//                momentum, eps, activation, a, b) -> output, or NotImplemented for an unusual call.
// Saves what `save_for_backward` of ops/batch_norm_autograd.py says, with the same reasons.
inline PyObject* batch_norm_act(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  BatchNormCall c;
  if (!read_call("batch_norm_act", args, count, c.input, c.residual, c.branch_scale, c.weight,
                 c.bias, c.running_mean, c.running_var, c.training, c.momentum, c.eps, c.f.op,
                 c.f.a, c.f.b) ||
      !fits(c))
    Py_RETURN_NOTIMPLEMENTED;
  Tensor mean, invstd;
  const auto forward = [&] {
    const BelowAutograd below(c.input);
    Tensor output;
    std::tie(output, mean, invstd) = BatchNormOps::all().forward.call(
        c.input, maybe(c.residual), maybe(c.branch_scale), maybe(c.weight), maybe(c.bias),
        maybe(c.running_mean), maybe(c.running_var), c.training, c.momentum, c.eps, c.f.op, c.f.a,
        c.f.b);
    return output;
  };
  const auto save = [&](auto& node, const Tensor& output) {
    using Rule = BatchNormRule;
    const bool affine =
        node.should_compute_output(Rule::kToWeight) || node.should_compute_output(Rule::kToBias);
    const bool identity = c.f.op < 0, by_output = c.f.saves_output();
    const bool keeps_input = c.training || affine || !(identity || by_output);
    if (keeps_input) node.save(Rule::kInput, c.input);
    if (by_output && (c.residual.defined() || !keeps_input))
      node.save(Rule::kActivated, output, /*is_output=*/true);
    else if (!by_output && !identity)
      node.save(Rule::kActivated, c.residual);
    node.save(Rule::kBranchScale, c.branch_scale);
    node.save(Rule::kWeight, c.weight);
    node.save(Rule::kBias, c.bias);
    node.save(Rule::kMean, mean);
    node.save(Rule::kInvstd, invstd);
  };
  return wrapped(run(BatchNormRule{c.training, c.eps, c.f}, forward, save, c.input, c.residual,
                     c.weight, c.bias));
  END_HANDLE_TH_ERRORS
}

// prepare_batch_norm(formula, softplus): what batch_norm_act needs from Python.
inline PyObject* prepare_batch_norm(PyObject* module, PyObject* args) {
  PyObject* formula;
  long long number;
  if (!PyArg_ParseTuple(args, "OL", &formula, &number)) return nullptr;
  softplus() = number;
  return prepare<BatchNormRule>(module, formula);
}

}  // namespace fusedtrain
