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
    Tensor grad_gate = new_like(gate), grad_value = new_like(value);
    GatedOps::all().backward.call(grad, gate, value, grad_gate, grad_value, f.op, f.a, f.b);
    return {std::move(grad_gate), std::move(grad_value)};
  }

  auto fields() const { return std::tie(f); }
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
    auto [grad_gate, grad_value] = GatedOps::all().spread_backward.call(
        grad, gate, needs[kToGate] ? maybe(value) : std::nullopt, f.op, f.a, f.b, needs[kToValue]);
    return {std::move(grad_gate), std::move(grad_value)};
  }

  auto fields() const { return std::tie(f); }
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

  variable_list gradients(const Tensor& grad, const SavedTensors<GatedHalvesRule>& saved,
                          const Needs<GatedHalvesRule>&) const {
    const Tensor& input = saved[0];
    Tensor result = new_like(input);
    const auto [gate, value] = parts(input);
    auto [grad_gate, grad_value] = parts(result);
    GatedOps::all().backward.call(grad, gate, value, grad_gate, grad_value, f.op, f.a, f.b);
    return {std::move(result)};
  }

  auto fields() const { return std::tie(dim, gate_last, f); }
};

// Whether the gate has one value for each sample and channel of [N, C, ...].
inline bool is_spread(const Tensor& gate, const Tensor& value) {
  return gate.dim() == value.dim() && gate.dim() >= 2 && gate.size(0) == value.size(0) &&
         gate.size(1) == value.size(1) && gate.numel() == gate.size(0) * gate.size(1);
}

// gated(gate, value, spreads, activation) -> output, or NotImplemented for an unusual call.
// `spreads`: a gate may be [N, C, 1, ...]; then the value is saved only where the gate is trained.
inline PyObject* gated(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Tensor gate, value;
  bool spreads;
  Pointwise f;
  if (!read_call("gated", args, count, gate, value, spreads, f) || !value.defined() ||
      !are_usual(gate, {&value}))
    Py_RETURN_NOTIMPLEMENTED;
  const bool alike = gate.sizes() == value.sizes();
  if (!alike && !(spreads && is_spread(gate, value))) Py_RETURN_NOTIMPLEMENTED;
  const auto forward = [&] {
    const BelowAutograd below(value);
    const GatedOps& ops = GatedOps::all();
    return (alike ? ops.forward : ops.spread).call(gate, value, f.op, f.a, f.b);
  };
  const auto save = [&](auto& node, const Tensor&) {
    node.save(0, gate);
    if (alike || node.should_compute_output(GatedSpreadRule::kToGate)) node.save(1, value);
  };
  return wrapped(alike ? run(GatedRule{f}, forward, save, gate, value)
                       : run(GatedSpreadRule{f}, forward, save, gate, value));
  END_HANDLE_TH_ERRORS
}

// gated_halves(input, dim, gate_last, activation), the same of a packed tensor
inline PyObject* gated_halves(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Tensor input;
  GatedHalvesRule rule;
  if (!read_call("gated_halves", args, count, input, rule.dim, rule.gate_last, rule.f) ||
      !is_usual(input))
    Py_RETURN_NOTIMPLEMENTED;
  if (rule.dim < 0) rule.dim += input.dim();
  if (rule.dim < 0 || rule.dim >= input.dim() || input.size(rule.dim) % 2 != 0)
    Py_RETURN_NOTIMPLEMENTED;
  const auto forward = [&] {
    const BelowAutograd below(input);
    const auto [gate, value] = rule.parts(input);
    return GatedOps::all().forward.call(gate, value, rule.f.op, rule.f.a, rule.f.b);
  };
  const auto save = [&](auto& node, const Tensor&) { node.save(0, input); };
  return wrapped(run(rule, forward, save, input));
  END_HANDLE_TH_ERRORS
}

}  // namespace fusedtrain
