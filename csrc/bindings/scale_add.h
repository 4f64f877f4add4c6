// Scaled sums, the same for every backend: check, lay out, allocate, run.
//
// A backend supplies new_output(), on_device() and scale_add() of both calls of ops/scale_add.h.
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
    ScaleForward call = {};
    call.dtype = dtype_of(input, op, "input");
    check_scale(op, scale, input, dim);
    const Backend backend(input);
    const Tensor x = with_channels(op, input, dim, scale.sizes()[0], call.shape);
    const Tensor s = in_order(scale);
    Tensor r;
    if (residual.has_value()) {
      check_device<Backend>(op, "residual", *residual, input);
      check_same(*residual, input, op, "residual", "input");
      r = dense_like(*residual, x);
      call.residual = read_data(r);
    }
    Tensor y = Backend::new_output(x);
    if (x.numel() > 0) {
      call.x = read_data(x);
      call.scale = read_data(s);
      call.y = write_data(y);
      backend.scale_add(call);
    }
    return as_promised(y, input);
  }

  static std::tuple<Tensor, Tensor> scale_add_backward(Tensor grad, MaybeTensor input, Tensor scale,
                                                       int64_t dim, bool needs_input) {
    const char* op = "scale_add_backward";
    ScaleBackward call = {};
    const Tensor& model = input.has_value() ? *input : grad;
    call.dtype = dtype_of(grad, op, "grad");
    check_device<Backend>(op, "input", model, grad);
    check_same(grad, model, op, "grad", "input");
    check_scale(op, scale, grad, dim);
    const Backend backend(grad);
    const Tensor x = with_channels(op, model, dim, scale.sizes()[0], call.shape);
    const Tensor g = dense_like(grad, x), s = in_order(scale);
    Tensor gx =
        needs_input ? Backend::new_output(x) : Backend::new_matrix(grad, 0, 0, grad.scalar_type());
    Tensor sums = sums_for<Backend>(grad, call.shape, input.has_value());
    if (g.numel() > 0) {
      call.grad = read_data(g);
      call.scale = read_data(s);
      if (input.has_value()) call.x = read_data(x);
      if (needs_input) call.grad_input = write_data(gx);
      if (input.has_value()) call.grad_scale = write_data(sums);
      backend.scale_add(call);
    } else if (input.has_value()) {
      torch::stable::zero_(sums);
    }
    return {needs_input ? as_promised(gx, model) : gx, sums};
  }
};

#define FT_IMPLEMENT_SCALE_ADD(Backend)                                              \
  m.impl("scale_add", TORCH_BOX(&ScaledSums<Backend>::scale_add));                   \
  m.impl("scale_add_backward", TORCH_BOX(&ScaledSums<Backend>::scale_add_backward));

}  // namespace
}  // namespace fusedtrain
