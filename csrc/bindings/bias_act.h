// Bias, activation and dropout, the same for every backend: check, lay out, allocate, run.
#pragma once

#include "../ops/bias_act.h"
#include "activations.h"
#include "channels.h"

#include <optional>
#include <tuple>

namespace fusedtrain {
namespace {

template <class Backend>
struct BiasActivation {
  using MaybeTensor = std::optional<Tensor>;

  // Everything of a call but input and output; keeps the tensors that its pointers are of.
  struct BiasArguments {
    Tensor bias, seed;
    BiasArguments(const char* op, BiasAct& call, const Tensor& input, const MaybeTensor& given,
                  const MaybeTensor& random, int64_t dim, int64_t activation, double a, double b,
                  double gain, double clamp, double p) {
      check_activation(op, activation);
      call.op = int(activation);
      call.dtype = dtype_of(input, op, "input");
      call.parameters[0] = a;
      call.parameters[1] = b;
      call.gain = gain;
      call.clamp = clamp;
      STD_TORCH_CHECK(p >= 0 && p < 1, "fusedtrain::", op, ": p must be from 0 to below 1");
      if (given.has_value()) {
        check_device<Backend>(op, "bias", *given, input);
        STD_TORCH_CHECK(dim >= 0 && dim < int64_t(input.dim()) && given->dim() == 1 &&
                            given->numel() == input.sizes()[dim],
                        "fusedtrain::", op, ": bias must have one element for each channel");
        STD_TORCH_CHECK(given->scalar_type() == input.scalar_type(), "fusedtrain::", op,
                        ": bias must have the dtype of input");
        bias = in_order(*given);
        call.bias = read_data(bias);
      }
      if (random.has_value() && p > 0) {
        check_device<Backend>(op, "seed", *random, input);
        STD_TORCH_CHECK(random->scalar_type() == ScalarType::Long && random->numel() == 2,
                        "fusedtrain::", op, ": seed must be two int64 numbers");
        seed = in_order(*random);
        call.seed = static_cast<const int64_t*>(read_data(seed));
        call.threshold = uint32_t(p * 4294967296.0);
        call.keep = 1 / (1 - p);
      }
    }
  };

  static Tensor bias_act(Tensor input, MaybeTensor bias, MaybeTensor seed, MaybeTensor residual,
                         int64_t dim, int64_t activation, double a, double b, double gain,
                         double clamp, double p) {
    const char* op = "bias_act";
    check_device<Backend>(op, "input", input, input);
    const Backend backend(input);
    BiasActForward call = {};
    const BiasArguments kept(op, call, input, bias, seed, dim, activation, a, b, gain, clamp, p);
    const Tensor x = with_channels(op, input, bias.has_value() ? dim : -1, 1, call.shape);
    Tensor r;
    call.residual = read_like<Backend>(op, "residual", residual, input, x, r);
    Tensor y = new_output<Backend>(x);
    if (x.numel() > 0) {
      call.x = read_data(x);
      call.y = write_data(y);
      backend.run(call);
    }
    return y;
  }

  static std::tuple<Tensor, Tensor> bias_act_backward(Tensor grad, Tensor saved, MaybeTensor bias,
                                                      MaybeTensor seed, int64_t dim,
                                                      int64_t activation, double a, double b,
                                                      double gain, double clamp, double p,
                                                      bool needs_bias) {
    const char* op = "bias_act_backward";
    check_device<Backend>(op, "grad", grad, saved);
    check_same(grad, saved, op, "grad", "saved");
    const Backend backend(saved);
    BiasActBackward call = {};
    const BiasArguments kept(op, call, saved, bias, seed, dim, activation, a, b, gain, clamp, p);
    const bool channels = bias.has_value() || needs_bias;
    const Tensor x = with_channels(op, saved, channels ? dim : -1, 1, call.shape);
    const Tensor g = dense_like(grad, x);
    Tensor gx = new_output<Backend>(x);
    Tensor sums = sums_for<Backend>(saved, call.shape, needs_bias);
    if (x.numel() > 0) {
      call.grad = read_data(g);
      call.saved = read_data(x);
      call.grad_input = write_data(gx);
      if (needs_bias) call.grad_bias = write_data(sums);
      backend.run(call);
    } else if (needs_bias) {
      torch::stable::zero_(sums);
    }
    return {gx, sums};
  }
};

FT_REGISTER(m) {
  m.impl("bias_act", TORCH_BOX(&BiasActivation<Backend>::bias_act));
  m.impl("bias_act_backward", TORCH_BOX(&BiasActivation<Backend>::bias_act_backward));
}

}  // namespace
}  // namespace fusedtrain
