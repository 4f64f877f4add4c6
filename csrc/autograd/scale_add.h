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
    auto [grad_input, sums] = ScaleOps::all().backward.call(
        grad, needs[kToScale] ? maybe(input) : std::nullopt, scale, dim, needs[kToInput]);
    if (sums.scalar_type() != scale.scalar_type()) sums = sums.to(scale.scalar_type());
    return {std::move(grad_input), std::move(sums), grad};
  }

  variable_list by_formula(const Tensor& grad, const SavedTensors<ScaleRule>& saved,
                           const Needs<ScaleRule>& needs) const {
    return call_formula(formula_of<ScaleRule>(), grad, saved, dim, needs[kToScale]);
  }

  auto fields() const { return std::tie(dim); }
};

// scale_add(input, scale, residual, dim) -> output, or NotImplemented for an unusual call. `scale`
// is [samples, channels]; saves the scale, and the input where the scale is trained.
inline PyObject* scale_add(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Tensor input, scale, residual;
  int64_t dim;
  if (!read_call("scale_add", args, count, input, scale, residual, dim) || !scale.defined() ||
      !are_usual(input, {&scale, &residual}))
    Py_RETURN_NOTIMPLEMENTED;
  const auto forward = [&] {
    const BelowAutograd below(input);
    return ScaleOps::all().forward.call(input, scale, maybe(residual), dim);
  };
  const auto save = [&](auto& node, const Tensor&) {
    if (node.should_compute_output(ScaleRule::kToScale)) node.save(0, input);
    node.save(1, scale);
  };
  return wrapped(run(ScaleRule{dim}, forward, save, input, scale, residual));
  END_HANDLE_TH_ERRORS
}

}  // namespace fusedtrain
