// Depthwise convolutions, of which each pass runs torch's kernel or ours, and their node.
#pragma once

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "node.h"

namespace fusedtrain {

struct DepthwiseOps {
  using Numbers = at::IntArrayRef;
  Op<Tensor(const Tensor&, const Tensor&, const MaybeTensor&, Numbers, Numbers, Numbers, Numbers,
            bool)>
      forward = "fusedtrain::depthwise_conv";
  Op<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, Numbers,
                                        Numbers, Numbers, bool, bool, bool, bool)>
      backward = "fusedtrain::depthwise_conv_backward";

  static const DepthwiseOps& all() {
    static const DepthwiseOps ops;
    return ops;
  }
};

struct DepthwiseRule {
  static constexpr size_t kSaved = 2, kEdges = 3;
  static constexpr const char* kLabel = "DepthwiseConvBackward";
  enum Edge { kToInput, kToWeight, kToBias };
  std::vector<int64_t> stride, padding, dilation;
  bool channels_last, our_grad_input, our_grad_weight;  // the bias goes with the weight

  variable_list gradients(const Tensor& grad, const SavedTensors<DepthwiseRule>& saved,
                          const Needs<DepthwiseRule>& needs) const {
    const auto& [input, weight] = saved;
    const bool is_ours[] = {our_grad_input, our_grad_weight, our_grad_weight};
    Needs<DepthwiseRule> ours, torchs;
    for (size_t i = 0; i < kEdges; ++i) {
      ours[i] = needs[i] && is_ours[i];
      torchs[i] = needs[i] && !is_ours[i];
    }
    variable_list all(kEdges);
    const auto take = [&](const Needs<DepthwiseRule>& asked, auto&& made) {
      auto& [of_input, of_weight, of_bias] = made;
      if (asked[kToInput]) all[kToInput] = std::move(of_input);
      if (asked[kToWeight]) all[kToWeight] = std::move(of_weight);
      if (asked[kToBias]) all[kToBias] = std::move(of_bias);
    };
    const auto any = [](const Needs<DepthwiseRule>& n) { return n[0] || n[1] || n[2]; };
    if (any(ours))
      take(ours, DepthwiseOps::all().backward.call(grad, input, weight, stride, padding, dilation,
                                                   channels_last, ours[0], ours[1], ours[2]));
    if (any(torchs)) {
      const int64_t outputs = weight.size(0);
      const std::vector<int64_t> zeros(stride.size());
      take(torchs,
           at::convolution_backward(grad, input, weight, at::IntArrayRef(outputs), stride, padding,
                                    dilation, /*transposed=*/false, zeros, input.size(1), torchs));
    }
    return all;
  }

  variable_list by_formula(const Tensor& grad, const SavedTensors<DepthwiseRule>& saved,
                           const Needs<DepthwiseRule>& needs) const {
    return call_formula(formula_of<DepthwiseRule>(), grad, saved, stride, padding, dilation,
                        channels_last, needs[0], needs[1], needs[2]);
  }

  auto fields() const {
    return std::tie(stride, padding, dilation, channels_last, our_grad_input, our_grad_weight);
  }
};

// depthwise_conv(input, weight, bias, stride, padding, padding_end, dilation, channels_last,
//                forward, grad_input, grad_weight) -> output, or NotImplemented where the call
// is unusual. The last three say where our kernels run. Python has checked the shapes.
inline PyObject* depthwise_conv(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Tensor input, weight, bias;
  DepthwiseRule rule;
  std::vector<int64_t> padding_end;
  bool ours;
  if (!read_call("depthwise_conv", args, count, input, weight, bias, rule.stride, rule.padding,
                 padding_end, rule.dilation, rule.channels_last, ours, rule.our_grad_input,
                 rule.our_grad_weight) ||
      !are_usual(input, {&weight, &bias}))
    Py_RETURN_NOTIMPLEMENTED;
  const auto forward = [&] {
    const BelowAutograd below(input);
    if (ours)
      return DepthwiseOps::all().forward.call(input, weight, maybe(bias), rule.stride, rule.padding,
                                              padding_end, rule.dilation, rule.channels_last);
    const std::vector<int64_t> zeros(rule.stride.size());
    return at::convolution(input, weight, maybe(bias), rule.stride, rule.padding, rule.dilation,
                           /*transposed=*/false, zeros, input.size(1));
  };
  const auto save = [&](auto& node, const Tensor&) {
    node.save(0, input);
    node.save(1, weight);
  };
  return wrapped(run(rule, forward, save, input, weight, bias));
  END_HANDLE_TH_ERRORS
}

}  // namespace fusedtrain
