// depthwise_conv and its backward, the same for every backend: check, lay out, allocate, run.
#pragma once

#include "../ops/depthwise.h"
#include "checks.h"

#include <optional>
#include <tuple>
#include <vector>

namespace fusedtrain {
namespace {

template <class Backend>
struct DepthwiseConvolution {
  using Ints = std::vector<int64_t>;

  // Everything but pointers and the sizes of the output. `input` may be nothing but its sizes.
  static void describe(const char* op, Depthwise& call, const Tensor& model, const Ints& sizes,
                       const Tensor& weight, const Ints& stride, const Ints& padding,
                       const Ints& dilation, bool channels_last) {
    const size_t spatial = sizes.size() - 2;
    STD_TORCH_CHECK(Backend::on_device(model), "fusedtrain::", op,
                    ": a tensor is on another device");
    check_device<Backend>(op, "weight", weight, model);
    STD_TORCH_CHECK(weight.scalar_type() == model.scalar_type(), "fusedtrain::", op,
                    ": weight must have the dtype of the others");
    STD_TORCH_CHECK(sizes.size() >= 3 && sizes.size() <= 5, "fusedtrain::", op,
                    ": expected [N, C, L], [N, C, H, W] or [N, C, D, H, W]");
    STD_TORCH_CHECK(!channels_last || spatial > 1, "fusedtrain::", op,
                    ": [N, C, L] has no channels_last");
    const auto w = weight.sizes();
    STD_TORCH_CHECK(
        w.size() == sizes.size() && sizes[1] >= 1 && w[0] >= 1 && w[1] == 1 && w[0] % sizes[1] == 0,
        "fusedtrain::", op, ": weight must be [C multiplier, 1, ...] for C channels of input");
    STD_TORCH_CHECK(
        stride.size() == spatial && padding.size() == spatial && dilation.size() == spatial,
        "fusedtrain::", op, ": stride, padding and dilation must have a number for each dimension");
    call.dtype = dtype_of(model, op, "input");
    call.last = channels_last;
    call.samples = sizes[0];
    call.channels = sizes[1];
    call.multiplier = w[0] / sizes[1];
    for (size_t d = 0; d < 3; ++d) {
      const bool known = d + spatial >= 3;
      const size_t i = known ? d + spatial - 3 : 0;
      call.in[d] = known ? sizes[i + 2] : 1;
      call.kernel[d] = known ? w[i + 2] : 1;
      call.stride[d] = known ? stride[i] : 1;
      call.dilation[d] = known ? dilation[i] : 1;
      call.pad[d] = known ? padding[i] : 0;
      STD_TORCH_CHECK(call.kernel[d] >= 1 && call.stride[d] >= 1 && call.dilation[d] >= 1 &&
                          call.pad[d] >= 0 && call.in[d] >= 0,
                      "fusedtrain::", op,
                      ": kernel, stride and dilation must be positive, padding not negative");
    }
  }

  static void set_outputs(Depthwise& call, const Ints& out) {
    const size_t spatial = out.size();
    for (size_t d = 0; d < 3; ++d) call.out[d] = d + spatial >= 3 ? out[d + spatial - 3] : 1;
  }

  static Ints sizes_of(const Tensor& t) {
    const auto sizes = t.sizes();
    return Ints(sizes.begin(), sizes.end());
  }

  // A tensor [N, C, ...] in one of the two layouts.
  static Tensor new_tensor(const Tensor& model, const Ints& sizes, bool channels_last) {
    const size_t dims = sizes.size();
    Ints strides(dims);
    int64_t next = channels_last ? sizes[1] : 1;
    for (size_t d = dims; d-- > (channels_last ? 2 : 0);) {
      strides[d] = next;
      next *= sizes[d] > 0 ? sizes[d] : 1;
    }
    if (channels_last) strides[1] = 1, strides[0] = next;
    return Backend::prepared(
        new_strided(model, int64_t(dims), sizes.data(), strides.data(), model.scalar_type()));
  }

  static Tensor in_layout(const Tensor& t, bool channels_last) {
    using torch::headeronly::MemoryFormat;
    if (!channels_last) return in_order(t);
    return torch::stable::contiguous(
        t, t.dim() == 5 ? MemoryFormat::ChannelsLast3d : MemoryFormat::ChannelsLast);
  }

  static Tensor forward(Tensor input, Tensor weight, std::optional<Tensor> bias, Ints stride,
                        Ints padding, Ints padding_end, Ints dilation, bool channels_last) {
    const char* op = "depthwise_conv";
    DepthwiseForward call = {};
    Ints sizes = sizes_of(input);
    describe(op, call, input, sizes, weight, stride, padding, dilation, channels_last);
    const size_t spatial = sizes.size() - 2;
    STD_TORCH_CHECK(padding_end.size() == spatial, "fusedtrain::", op,
                    ": padding_end must have a number for each dimension");
    Ints out(spatial);
    for (size_t i = 0; i < spatial; ++i) {
      const int64_t room = sizes[i + 2] + padding[i] + padding_end[i] -
                           (weight.sizes()[i + 2] - 1) * dilation[i] - 1;
      STD_TORCH_CHECK(padding_end[i] >= 0 && room >= 0, "fusedtrain::", op,
                      ": the padded input is smaller than the kernel");
      out[i] = room / stride[i] + 1;
    }
    set_outputs(call, out);
    if (bias) {
      check_device<Backend>(op, "bias", *bias, input);
      STD_TORCH_CHECK(bias->dim() == 1 && bias->sizes()[0] == weight.sizes()[0] &&
                          bias->scalar_type() == input.scalar_type(),
                      "fusedtrain::", op,
                      ": bias must have a number for each channel of outputs, and input's dtype");
    }
    const Backend backend(input);
    Ints shape = {sizes[0], weight.sizes()[0]};
    shape.insert(shape.end(), out.begin(), out.end());
    Tensor y = new_tensor(input, shape, channels_last);
    if (y.numel() == 0) return y;
    const Tensor x = in_layout(input, channels_last), w = in_order(weight);
    const Tensor b = bias ? in_order(*bias) : w;
    call.x = read_data(x);
    call.weight = read_data(w);
    call.bias = bias ? read_data(b) : nullptr;
    call.y = write_data(y);
    backend.run(call);
    return y;
  }

  // Gradients that nobody asks for have no elements.
  static std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad, Tensor input, Tensor weight,
                                                     Ints stride, Ints padding, Ints dilation,
                                                     bool channels_last, bool input_asked,
                                                     bool weight_asked, bool bias_asked) {
    const char* op = "depthwise_conv_backward";
    DepthwiseBackward call = {};
    const Ints sizes = sizes_of(input), out = sizes_of(grad);
    check_device<Backend>(op, "grad", grad, input);
    STD_TORCH_CHECK(grad.scalar_type() == input.scalar_type(), "fusedtrain::", op,
                    ": grad and input must have the same dtype");
    describe(op, call, input, sizes, weight, stride, padding, dilation, channels_last);
    STD_TORCH_CHECK(out.size() == sizes.size() && out[0] == sizes[0] && out[1] == weight.sizes()[0],
                    "fusedtrain::", op, ": grad must have the shape of the output");
    set_outputs(call, Ints(out.begin() + 2, out.end()));
    const Backend backend(input);
    const Ints none = {0};
    const auto empty = [&] {
      return new_strided(input, 1, none.data(), none.data(), input.scalar_type());
    };
    Tensor grad_input = input_asked ? new_tensor(input, sizes, channels_last) : empty();
    Tensor grad_weight = weight_asked ? new_tensor(weight, sizes_of(weight), false) : empty();
    Tensor grad_bias = bias_asked ? new_tensor(weight, {out[1]}, false) : empty();
    if (grad.numel() == 0 || input.numel() == 0) {
      if (input_asked) torch::stable::zero_(grad_input);
      if (weight_asked) torch::stable::zero_(grad_weight);
      if (bias_asked && grad.numel() == 0) torch::stable::zero_(grad_bias);
      if (grad.numel() == 0 || !bias_asked) return {grad_input, grad_weight, grad_bias};
      input_asked = weight_asked = false;  // outputs of nothing but padding have a bias
    }
    const Tensor g = in_layout(grad, channels_last), w = in_order(weight);
    const Tensor x = weight_asked ? in_layout(input, channels_last) : input;
    call.grad = read_data(g);
    if (weight_asked) {
      call.x = read_data(x);
      call.grad_weight = write_data(grad_weight);
    }
    if (input_asked) {
      call.weight = read_data(w);
      call.grad_input = write_data(grad_input);
    }
    if (bias_asked) call.grad_bias = write_data(grad_bias);
    if (input_asked || weight_asked || bias_asked) backend.run(call);
    return {grad_input, grad_weight, grad_bias};
  }
};

FT_REGISTER(m) {
  m.impl("depthwise_conv", TORCH_BOX(&DepthwiseConvolution<Backend>::forward));
  m.impl("depthwise_conv_backward", TORCH_BOX(&DepthwiseConvolution<Backend>::backward));
}

}  // namespace
}  // namespace fusedtrain
