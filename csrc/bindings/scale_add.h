// Scaled sums, the same for every backend: check, lay out, allocate, run.
#pragma once

#include "../ops/scale_add.h"
#include "channels.h"

#include <optional>
#include <tuple>

namespace fusedtrain {
namespace {

template <class Backend>
struct ScaledSums {
  using MaybeTensor = std::optional<Tensor>;

  static void check_scale(const char* op, const Tensor& scale, const Tensor& input, int64_t dim) {
    check_device<Backend>(op, "scale", scale, input);
    const int64_t channels = dim < 0 || dim >= int64_t(input.dim()) ? 1 : input.sizes()[dim];
    STD_TORCH_CHECK(scale.dim() == 2 && scale.sizes()[1] == channels, "fusedtrain::", op,
                    ": scale must be [samples, ", channels, "]");
    STD_TORCH_CHECK(scale.scalar_type() == input.scalar_type(), "fusedtrain::", op,
                    ": scale must have the dtype of input");
  }

  static Tensor scale_add(Tensor input, Tensor scale, MaybeTensor residual, int64_t dim) {
    const char* op = "scale_add";
    const Dtype dtype = dtype_of(input, op, "input");
    check_scale(op, scale, input, dim);
    const Tensor s = in_order(scale);
    return forward(op, dtype, input, read_data(s), scale.sizes()[0], residual, dim);
  }

  static std::tuple<Tensor, Tensor> scale_add_backward(Tensor grad, MaybeTensor input, Tensor scale,
                                                       int64_t dim, bool needs_input) {
    const char* op = "scale_add_backward";
    const Dtype dtype = dtype_of(grad, op, "grad");
    check_scale(op, scale, grad, dim);
    const Tensor s = in_order(scale);
    return backward(op, dtype, grad, input, read_data(s), scale.sizes()[0], dim, needs_input);
  }

  // The same, by the address of the scale, which the caller has checked.

  static Tensor forward(const char* op, Dtype dtype, const Tensor& input, const void* scale,
                        int64_t samples, const MaybeTensor& residual, int64_t dim) {
    ScaleForward call = {};
    call.dtype = dtype;
    const Backend backend(input);
    const Tensor x = with_channels(op, input, dim, samples, call.shape);
    Tensor r;
    call.residual = read_like<Backend>(op, "residual", residual, input, x, r);
    Tensor y = new_output<Backend>(x);
    if (x.numel() > 0) {
      call.x = read_data(x);
      call.scale = scale;
      call.y = write_data(y);
      backend.run(call);
    }
    return as_promised(y, x, input);
  }

  static std::tuple<Tensor, Tensor> backward(const char* op, Dtype dtype, const Tensor& grad,
                                             const MaybeTensor& input, const void* scale,
                                             int64_t samples, int64_t dim, bool needs_input) {
    ScaleBackward call = {};
    call.dtype = dtype;
    const Tensor& model = input.has_value() ? *input : grad;
    check_device<Backend>(op, "input", model, grad);
    check_same(grad, model, op, "grad", "input");
    const Backend backend(grad);
    const Tensor x = with_channels(op, model, dim, samples, call.shape);
    const Tensor g = dense_like(grad, x);
    Tensor gx =
        needs_input ? new_output<Backend>(x) : new_matrix<Backend>(grad, 0, 0, grad.scalar_type());
    Tensor sums = sums_for<Backend>(grad, call.shape, input.has_value());
    if (g.numel() > 0) {
      call.grad = read_data(g);
      call.scale = scale;
      if (input.has_value()) call.x = read_data(x);
      if (needs_input) call.grad_input = write_data(gx);
      if (input.has_value()) call.grad_scale = write_data(sums);
      backend.run(call);
    } else if (input.has_value()) {
      torch::stable::zero_(sums);
    }
    return {needs_input ? as_promised(gx, x, model) : gx, sums};
  }
};

FT_REGISTER(m) {
  m.impl("scale_add", TORCH_BOX(&ScaledSums<Backend>::scale_add));
  m.impl("scale_add_backward", TORCH_BOX(&ScaledSums<Backend>::scale_add_backward));
}

}  // namespace
}  // namespace fusedtrain
