// Scaled sums, and their node.
#pragma once

#include <tuple>

#include "node.h"

namespace fusedtrain {

struct ScaleOps {
  Op<Tensor(const Tensor&, const Tensor&, const MaybeTensor&, int64_t)> forward =
      "fusedtrain::scale_add";
  Op<std::tuple<Tensor, Tensor>(const Tensor&, const MaybeTensor&, const Tensor&, int64_t, bool)>
      backward = "fusedtrain::scale_add_backward";

  static const ScaleOps& all() {
    static const ScaleOps ops;
    return ops;
  }
};

struct ScaleRule {
  static constexpr size_t kSaved = 2, kEdges = 3;
  static constexpr const char* kLabel = "ScaleAddBackward";
  enum Edge { kToInput, kToScale, kToResidual };
  int64_t dim;

  variable_list gradients(const Tensor& grad, const SavedTensors<ScaleRule>& saved,
                          const Needs<ScaleRule>& needs) const {
    const auto& [input, scale] = saved;
    if (!takes_op(grad, saved))
      return call_formula(formula_of<ScaleRule>(), grad, input, scale, dim, needs[kToScale]);
    at::AutoDispatchBelowADInplaceOrView below;
    auto [grad_input, sums] = ScaleOps::all().backward.call(
        grad, needs[kToScale] ? maybe(input) : std::nullopt, scale, dim, needs[kToInput]);
    if (sums.scalar_type() != scale.scalar_type()) sums = sums.to(scale.scalar_type());
    return {std::move(grad_input), std::move(sums), grad};
  }

  void collect(torch::autograd::CompiledNodeArgs& args) const { args.collect(dim); }
};

// `scale` is [samples, channels]; saves the scale, and the input where the scale is trained.
inline Tensor run_scale(const Tensor& input, const Tensor& scale, const Tensor& residual,
                        int64_t dim) {
  const auto run = [&] {
    const BelowAutograd below(input);
    return ScaleOps::all().forward.call(input, scale, maybe(residual), dim);
  };
  if (!torch::autograd::compute_requires_grad(input, scale, residual)) return run();
  RECORD_FUNCTION("ScaleAdd", std::vector<c10::IValue>({input, scale}),
                  at::sequence_number::peek());
  const auto node = rule_node(ScaleRule{dim}, input, scale, residual);
  Tensor output = run();
  torch::autograd::set_history(output, node);
  if (node->should_compute_output(ScaleRule::kToScale)) node->save(0, input);
  node->save(1, scale);
  return output;
}

// scale_add(input, scale, residual, dim) -> output, or NotImplemented for an unusual call
inline PyObject* scale_add(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 4, "scale_add: 4 arguments");
  Tensor input, scale, residual;
  int64_t dim;
  if (!(read(args[0], input) && read(args[1], scale) && read(args[2], residual) &&
        read(args[3], dim)) ||
      !scale.defined() || !are_usual(input, {&scale, &residual}) || !is_usual_thread())
    Py_RETURN_NOTIMPLEMENTED;
  if (torch::autograd::compute_requires_grad(input, scale, residual) &&
      !can_record({&input, &scale, &residual}))
    Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(run_scale(input, scale, residual, dim));
  END_HANDLE_TH_ERRORS
}

}  // namespace fusedtrain
