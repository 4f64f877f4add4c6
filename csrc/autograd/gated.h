// Gated products of two tensors or of the halves of one, and their nodes; where a gate is
// broadcast, the activation of the gate and a scaled sum.
#pragma once

#include <tuple>

#include "activations.h"
#include "tensors.h"

namespace fusedtrain {

struct GatedOps {
  Op<Tensor(const Tensor&, const Tensor&, int64_t, double, double)> forward = "fusedtrain::gated";
  Op<void(const Tensor&, const Tensor&, const Tensor&, Tensor&, Tensor&, int64_t, double, double)>
      backward = "fusedtrain::gated_backward";
  Op<Tensor(const Tensor&, const Tensor&, int64_t, double, double)> spread =
      "fusedtrain::gated_spread";
  Op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&, int64_t, double,
                                double, bool)>
      spread_backward = "fusedtrain::gated_spread_backward";

  static const GatedOps& all() {
    static const GatedOps ops;
    return ops;
  }
};

struct GatedRule {
  static constexpr size_t kSaved = 2, kEdges = 2;
  static constexpr const char* kLabel = "GatedBackward";
  Pointwise f;

  variable_list gradients(const Tensor& grad, const SavedTensors<GatedRule>& saved,
                          const Needs<GatedRule>&) const {
    const auto& [gate, value] = saved;
    if (!takes_op(grad, saved))
      return call_formula(formula_of<GatedRule>(), grad, gate, value, f.op, f.a, f.b);
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor grad_gate = new_like(gate), grad_value = new_like(value);
    GatedOps::all().backward.call(grad, gate, value, grad_gate, grad_value, f.op, f.a, f.b);
    return {std::move(grad_gate), std::move(grad_value)};
  }

  void collect(torch::autograd::CompiledNodeArgs& args) const { f.collect(args); }
};

// With a gate of [N, C, 1, ...].
struct GatedSpreadRule {
  static constexpr size_t kSaved = 2, kEdges = 2;
  static constexpr const char* kLabel = "GatedSpreadBackward";
  enum Edge { kToGate, kToValue };
  Pointwise f;

  variable_list gradients(const Tensor& grad, const SavedTensors<GatedSpreadRule>& saved,
                          const Needs<GatedSpreadRule>& needs) const {
    const auto& [gate, value] = saved;
    if (!takes_op(grad, saved))
      return call_formula(formula_of<GatedSpreadRule>(), grad, gate, value, f.op, f.a, f.b);
    at::AutoDispatchBelowADInplaceOrView below;
    auto [grad_gate, grad_value] = GatedOps::all().spread_backward.call(
        grad, gate, needs[kToGate] ? maybe(value) : std::nullopt, f.op, f.a, f.b, needs[kToValue]);
    return {std::move(grad_gate), std::move(grad_value)};
  }

  void collect(torch::autograd::CompiledNodeArgs& args) const { f.collect(args); }
};

struct GatedHalvesRule {
  static constexpr size_t kSaved = 1, kEdges = 1;
  static constexpr const char* kLabel = "GatedHalvesBackward";
  int64_t dim;
  bool gate_last;
  Pointwise f;

  // Gate and value.
  std::pair<Tensor, Tensor> parts(const Tensor& input) const {
    auto [first, second] = halves(input, dim);
    if (gate_last) std::swap(first, second);
    return {std::move(first), std::move(second)};
  }

  Tensor output(const Tensor& input) const {
    const BelowAutograd below(input);
    const auto [gate, value] = parts(input);
    return GatedOps::all().forward.call(gate, value, f.op, f.a, f.b);
  }

  variable_list gradients(const Tensor& grad, const SavedTensors<GatedHalvesRule>& saved,
                          const Needs<GatedHalvesRule>&) const {
    const Tensor& input = saved[0];
    if (!takes_op(grad, saved))
      return call_formula(formula_of<GatedHalvesRule>(), grad, input, dim, gate_last, f.op, f.a,
                          f.b);
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor result = new_like(input);
    const auto [gate, value] = parts(input);
    auto [grad_gate, grad_value] = parts(result);
    GatedOps::all().backward.call(grad, gate, value, grad_gate, grad_value, f.op, f.a, f.b);
    return {std::move(result)};
  }

  void collect(torch::autograd::CompiledNodeArgs& args) const {
    args.collect(dim);
    args.collect(gate_last);
    f.collect(args);
  }
};

inline Tensor run_gated(const Tensor& gate, const Tensor& value, const Pointwise& f) {
  const auto run = [&] {
    const BelowAutograd below(value);
    return GatedOps::all().forward.call(gate, value, f.op, f.a, f.b);
  };
  if (!torch::autograd::compute_requires_grad(gate, value)) return run();
  RECORD_FUNCTION("Gated", std::vector<c10::IValue>({gate, value}), at::sequence_number::peek());
  const auto node = rule_node(GatedRule{f}, gate, value);
  Tensor output = run();
  torch::autograd::set_history(output, node);
  node->save(0, gate);
  node->save(1, value);
  return output;
}

inline Tensor run_halves(const Tensor& input, const GatedHalvesRule& rule) {
  if (!torch::autograd::compute_requires_grad(input)) return rule.output(input);
  RECORD_FUNCTION("GatedHalves", std::vector<c10::IValue>({input}), at::sequence_number::peek());
  const auto node = rule_node(rule, input);
  Tensor output = rule.output(input);
  torch::autograd::set_history(output, node);
  node->save(0, input);
  return output;
}

// Whether the gate has one value for each sample and channel of [N, C, ...].
inline bool is_spread(const Tensor& gate, const Tensor& value) {
  return gate.dim() == value.dim() && gate.dim() >= 2 && gate.size(0) == value.size(0) &&
         gate.size(1) == value.size(1) && gate.numel() == gate.size(0) * gate.size(1);
}

// Saves the gate, and the value where the gate is trained.
inline Tensor run_spread(const Tensor& gate, const Tensor& value, const Pointwise& f) {
  const auto run = [&] {
    const BelowAutograd below(value);
    return GatedOps::all().spread.call(gate, value, f.op, f.a, f.b);
  };
  if (!torch::autograd::compute_requires_grad(gate, value)) return run();
  RECORD_FUNCTION("GatedSpread", std::vector<c10::IValue>({gate, value}),
                  at::sequence_number::peek());
  const auto node = rule_node(GatedSpreadRule{f}, gate, value);
  Tensor output = run();
  torch::autograd::set_history(output, node);
  node->save(0, gate);
  if (node->should_compute_output(GatedSpreadRule::kToGate)) node->save(1, value);
  return output;
}

// gated(gate, value, spreads, activation) -> output, or NotImplemented for an unusual call.
// `spreads`: a gate may be [N, C, 1, ...].
inline PyObject* gated(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 4, "gated: 4 arguments");
  Tensor gate, value;
  bool spreads;
  Pointwise f;
  if (!(read(args[0], gate) && read(args[1], value) && read(args[2], spreads) &&
        read(args[3], f)) ||
      !value.defined() || !are_usual(gate, {&value}) || !is_usual_thread())
    Py_RETURN_NOTIMPLEMENTED;
  const bool alike = gate.sizes() == value.sizes();
  if (!alike && !(spreads && is_spread(gate, value))) Py_RETURN_NOTIMPLEMENTED;
  if (torch::autograd::compute_requires_grad(gate, value) && !can_record({&gate, &value}))
    Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(alike ? run_gated(gate, value, f) : run_spread(gate, value, f));
  END_HANDLE_TH_ERRORS
}

// gated_halves(input, dim, gate_last, activation), the same of a packed tensor
inline PyObject* gated_halves(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 4, "gated_halves: 4 arguments");
  Tensor input;
  GatedHalvesRule rule;
  if (!(read(args[0], input) && read(args[1], rule.dim) && read(args[2], rule.gate_last) &&
        read(args[3], rule.f)) ||
      !is_usual(input) || !is_usual_thread())
    Py_RETURN_NOTIMPLEMENTED;
  if (rule.dim < 0) rule.dim += input.dim();
  if (rule.dim < 0 || rule.dim >= input.dim() || input.size(rule.dim) % 2 != 0)
    Py_RETURN_NOTIMPLEMENTED;
  if (torch::autograd::compute_requires_grad(input) && !can_record({&input}))
    Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(run_halves(input, rule));
  END_HANDLE_TH_ERRORS
}

}  // namespace fusedtrain
