// Batch norm with what follows it: `batch_norm_act`, and its node.
#pragma once

#include <string>
#include <tuple>

#include "node.h"

namespace fusedtrain {

// Description of batch norm, given once by Python: `prepare_batch_norm`.
struct BatchNormRow {
  std::string saves_output;     // a byte for each activation
  int64_t softplus;             // its number
  PyObject* formula = nullptr;  // backward in torch operators
};
inline BatchNormRow& batch_norm_row() {
  static BatchNormRow row;
  return row;
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

// The arguments of a call, as the op has them. `op` is -1 for no activation.
struct BatchNormCall {
  Tensor input, residual, branch_scale, weight, bias, running_mean, running_var;
  bool training;
  double momentum, eps;
  int64_t op;
  double a, b;

  bool saves_output() const {
    return op >= 0 && batch_norm_row().saves_output[static_cast<size_t>(op)] != 0;
  }
};

struct BatchNormRule {
  static constexpr size_t kSaved = 7, kEdges = 4;
  enum Saved { kInput, kActivated, kBranchScale, kWeight, kBias, kMean, kInvstd };
  enum Edge { kToInput, kToResidual, kToWeight, kToBias };
  using Tensors = SavedTensors<BatchNormRule>;

  bool training;
  double eps;
  int64_t op;
  double a, b;

  variable_list gradients(const Tensor& grad, const Tensors& s,
                          const Needs<BatchNormRule>& needs) const {
    const bool added = op < 0;  // A residual that is only added gets the gradient itself.
    variable_list all;
    if (takes_op(grad, s)) {
      at::AutoDispatchBelowADInplaceOrView below;
      auto [input, residual, weight, bias] = BatchNormOps::all().backward.call(
          grad, maybe(s[kInput]), maybe(s[kActivated]), maybe(s[kBranchScale]), maybe(s[kWeight]),
          maybe(s[kBias]), s[kMean], s[kInvstd], training, op, a, b, needs[kToInput],
          needs[kToResidual] && !added, needs[kToWeight] || needs[kToBias]);
      all = {std::move(input), std::move(residual), std::move(weight), std::move(bias)};
    } else {
      all = by_formula(grad, s);
    }
    if (added) all[kToResidual] = grad;
    return all;
  }

  void collect(torch::autograd::CompiledNodeArgs& args) const {
    args.collect(training);
    args.collect(eps);
    args.collect(op);
    args.collect(a);
    args.collect(b);
  }

 private:
  variable_list by_formula(const Tensor& grad, const Tensors& s) const {
    variable_list all = call_formula(batch_norm_row().formula, grad, s[0], s[1], s[2], s[3], s[4],
                                     s[5], s[6], training, eps, op, a, b);
    TORCH_CHECK(all.size() == 4, "fusedtrain: batch norm has four gradients");
    return all;
  }
};

using BatchNormNode = RuleNode<BatchNormRule>;

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
       !c.branch_scale.is_contiguous()))
    return false;
  const Tensor& r = c.residual;
  if (r.defined() && !(is_usual(r) && r.sizes() == x.sizes() &&
                       r.scalar_type() == x.scalar_type() && r.device() == x.device()))
    return false;
  // Under autocast a GPU computes softplus in float32, which Python knows.
  if (c.op == batch_norm_row().softplus) return false;
  return c.op >= -1 && c.op < static_cast<int64_t>(batch_norm_row().saves_output.size());
}

inline std::tuple<Tensor, Tensor, Tensor> run_forward(const BatchNormCall& c) {
  const BelowAutograd below(c.input);
  return BatchNormOps::all().forward.call(
      c.input, maybe(c.residual), maybe(c.branch_scale), maybe(c.weight), maybe(c.bias),
      maybe(c.running_mean), maybe(c.running_var), c.training, c.momentum, c.eps, c.op, c.a, c.b);
}

// Saves what `save_for_backward` of ops/batch_norm_autograd.py says, with the same reasons.
inline Tensor recorded(const BatchNormCall& c) {
  RECORD_FUNCTION("BatchNormAct", std::vector<c10::IValue>({c.input}), at::sequence_number::peek());
  auto node = make_node<BatchNormNode>();
  node->label = "BatchNormActBackward";
  node->set_next_edges(torch::autograd::collect_next_edges(c.input, c.residual, c.weight, c.bias));
  node->rule = {c.training, c.eps, c.op, c.a, c.b};
  const auto [output, mean, invstd] = run_forward(c);
  torch::autograd::set_history(output, node);
  using Rule = BatchNormRule;
  const bool affine =
      node->should_compute_output(Rule::kToWeight) || node->should_compute_output(Rule::kToBias);
  const bool identity = c.op < 0, by_output = c.saves_output();
  const bool keeps_input = c.training || affine || !(identity || by_output);
  if (keeps_input) node->save(Rule::kInput, c.input);
  if (by_output && (c.residual.defined() || !keeps_input))
    node->save(Rule::kActivated, output, /*is_output=*/true);
  else if (!by_output && !identity)
    node->save(Rule::kActivated, c.residual);
  node->save(Rule::kBranchScale, c.branch_scale);
  node->save(Rule::kWeight, c.weight);
  node->save(Rule::kBias, c.bias);
  node->save(Rule::kMean, mean);
  node->save(Rule::kInvstd, invstd);
  return output;
}

// batch_norm_act(input, residual, branch_scale, weight, bias, running_mean, running_var, training,
//                momentum, eps, activation, a, b) -> output, or NotImplemented for an unusual call
inline PyObject* batch_norm_act(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 13, "batch_norm_act: 13 arguments");
  BatchNormCall c;
  if (!(read(args[0], c.input) && read(args[1], c.residual) && read(args[2], c.branch_scale) &&
        read(args[3], c.weight) && read(args[4], c.bias) && read(args[5], c.running_mean) &&
        read(args[6], c.running_var) && read(args[7], c.training) && read(args[8], c.momentum) &&
        read(args[9], c.eps) && read(args[10], c.op) && read(args[11], c.a) &&
        read(args[12], c.b)) ||
      !fits(c) || !is_usual_thread())
    Py_RETURN_NOTIMPLEMENTED;
  if (!torch::autograd::compute_requires_grad(c.input, c.residual, c.weight, c.bias))
    return THPVariable_Wrap(std::get<0>(run_forward(c)));
  if (!can_record({&c.input, &c.residual, &c.branch_scale, &c.weight, &c.bias}))
    Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(recorded(c));
  END_HANDLE_TH_ERRORS
}

// prepare_batch_norm(formula, saves_output, softplus): what batch_norm_act needs from Python.
inline PyObject* prepare_batch_norm(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* formula;
  const char* saves_output;
  Py_ssize_t size;
  long long softplus;
  if (!PyArg_ParseTuple(args, "Oy#L", &formula, &saves_output, &size, &softplus)) return nullptr;
  BatchNormRow& row = batch_norm_row();
  if (row.formula == nullptr) register_class<BatchNormNode>("BatchNormActBackward");
  row.saves_output.assign(saves_output, static_cast<size_t>(size));
  row.softplus = softplus;
  row.formula = Py_NewRef(formula);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace fusedtrain
