// Gated products, scaled sums, bias + activation + dropout, the same for every backend: check, lay
// out, allocate, run.
//
// A backend supplies new_output(), on_device() and chain() of every such call of ops.h.
#pragma once

#include "binding_activations.h"

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace fusedtrain {
namespace {

template <class Backend>
struct Chains {
  using MaybeTensor = std::optional<Tensor>;
  using ScalarType = torch::headeronly::ScalarType;

  static void check_op(const char* op, int64_t activation) {
    constexpr int64_t kOps = sizeof kPointwiseNames / sizeof *kPointwiseNames;
    STD_TORCH_CHECK(activation >= -1 && activation < kOps, "fusedtrain::", op,
                    ": activation must be from -1 to ", kOps - 1);
  }
  static void check_device(const char* op, const char* name, const Tensor& t, const Tensor& model) {
    STD_TORCH_CHECK(Backend::on_device(t) && same_device(t, model), "fusedtrain::", op, ": ", name,
                    " is on another device");
  }

  // --- gated products ---

  // A tensor as runs of n elements that are `stride` apart, in the order of the dimensions in a
  // dense tensor; n is the longest that there is.
  struct Runs {
    int64_t n = 1, stride = 0;
    bool fits = true;
    Runs(const Tensor& t, const Tensor& model) {
      const auto sizes = t.sizes(), strides = t.strides(), order = model.strides();
      std::vector<size_t> dims;
      for (size_t d = 0; d < sizes.size(); ++d)
        if (sizes[d] != 1) dims.push_back(d);
      std::stable_sort(dims.begin(), dims.end(),
                       [&](size_t a, size_t b) { return order[a] < order[b]; });
      size_t i = 0;
      for (; i < dims.size() && strides[dims[i]] == n; ++i) n *= sizes[dims[i]];
      int64_t expected = stride = i < dims.size() ? strides[dims[i]] : n;
      for (; i < dims.size(); ++i) {
        fits = fits && strides[dims[i]] == expected && expected >= n;
        expected *= sizes[dims[i]];
      }
    }
    // The same as runs of m elements.
    bool cut(int64_t m) {
      if (m == n) return fits;
      if (!fits || stride != n || n % m != 0) return false;
      n = stride = m;
      return true;
    }
  };

  // Lays out a call; copies inputs that cannot be walked as they are.
  static void lay_out(Gated& call, Tensor& gate, Tensor& value, const Tensor& dense_one,
                      int64_t longest) {
    Runs g(gate, dense_one), v(value, dense_one);
    if (!g.fits) g = Runs(gate = dense_like(gate, dense_one), dense_one);
    if (!v.fits) v = Runs(value = dense_like(value, dense_one), dense_one);
    int64_t n = std::min({g.n, v.n, longest});
    if (!g.cut(n)) (g = Runs(gate = dense_like(gate, dense_one), dense_one)).cut(n);
    if (!v.cut(n)) (v = Runs(value = dense_like(value, dense_one), dense_one)).cut(n);
    call.n = n;
    call.rows = dense_one.numel() / n;
    call.gate = read_data(gate);
    call.value = read_data(value);
    call.gate_stride = g.stride;
    call.value_stride = v.stride;
  }

  static Tensor gated(Tensor gate, Tensor value, int64_t activation, double a, double b) {
    const char* op = "gated";
    check_op(op, activation);
    check_device(op, "gate", gate, value);
    check_same(gate, value, op, "gate", "value");
    GatedForward call = {};
    call.op = int(activation);
    call.dtype = dtype_of(value, op, "value");
    call.parameters[0] = a;
    call.parameters[1] = b;
    const Backend backend(value);
    Tensor y = Backend::new_output(value);
    if (y.numel() == 0) return y;
    lay_out(call, gate, value, y, y.numel());
    call.y = write_data(y);
    backend.chain(call);
    return y;
  }

  static void gated_backward(Tensor grad, Tensor gate, Tensor value, Tensor grad_gate,
                             Tensor grad_value, int64_t activation, double a, double b) {
    const char* op = "gated_backward";
    check_op(op, activation);
    for (const Tensor* t : {&grad, &gate, &grad_gate, &grad_value}) {
      check_device(op, "a tensor", *t, value);
      check_same(*t, value, op, "all tensors", "value");
    }
    GatedBackward call = {};
    call.op = int(activation);
    call.dtype = dtype_of(value, op, "value");
    call.parameters[0] = a;
    call.parameters[1] = b;
    if (value.numel() == 0) return;
    const Backend backend(value);
    const Tensor model = torch::stable::empty_like(value);
    const Tensor g = dense_like(grad, model);
    // Where the gradients cannot be walked together, by way of dense ones.
    Tensor to_gate = grad_gate, to_value = grad_value;
    Runs out_gate(to_gate, model), out_value(to_value, model);
    lay_out(call, gate, value, model, std::min(out_gate.n, out_value.n));
    if (!out_gate.cut(call.n)) (out_gate = Runs(to_gate = model, model)).cut(call.n);
    if (!out_value.cut(call.n)) {
      to_value = torch::stable::empty_like(model);
      (out_value = Runs(to_value, model)).cut(call.n);
    }
    call.grad = read_data(g);
    call.grad_gate = write_data(to_gate);
    call.grad_value = write_data(to_value);
    call.grad_gate_stride = out_gate.stride;
    call.grad_value_stride = out_value.stride;
    backend.chain(call);
    if (to_gate.const_data_ptr() != grad_gate.const_data_ptr())
      torch::stable::copy_(grad_gate, to_gate);
    if (to_value.const_data_ptr() != grad_value.const_data_ptr())
      torch::stable::copy_(grad_value, to_value);
  }

  // --- tensors with channels ---

  // Where the channels of a dense tensor are: dimension `dim` (-1: none), for so many samples.
  static bool find_channels(const Tensor& t, int64_t dim, int64_t samples, Channels& shape) {
    const auto sizes = t.sizes(), strides = t.strides();
    const int64_t numel = t.numel();
    const int64_t channels = dim < 0 ? 1 : sizes[dim];
    shape = {samples, 1, channels, numel / std::max<int64_t>(samples * channels, 1)};
    if (numel == 0) return true;
    if (channels > 1) {
      shape.inner = strides[dim];
      shape.rows = numel / (samples * channels * shape.inner);
    }
    return samples == 1 || sizes[0] == 1 || strides[0] * sizes[0] == numel;
  }

  // The input in a layout whose channels can be walked, and that layout.
  static Tensor with_channels(const char* op, const Tensor& input, int64_t dim, int64_t samples,
                              Channels& shape) {
    STD_TORCH_CHECK(dim >= -1 && dim < std::max<int64_t>(input.dim(), 0), "fusedtrain::", op,
                    ": dim is not a dimension of input");
    STD_TORCH_CHECK(samples == 1 || (dim != 0 && input.dim() > 0 && samples == input.sizes()[0]),
                    "fusedtrain::", op, ": there must be one sample, or as many as in dimension 0");
    Tensor x = dense(input);
    if (!find_channels(x, dim, samples, shape)) {
      x = torch::stable::contiguous(input);
      find_channels(x, dim, samples, shape);
    }
    return x;
  }

  // `result`, made in the layout of a copy, with the strides that the op promises.
  static Tensor as_promised(const Tensor& result, const Tensor& input) {
    Tensor promised = torch::stable::empty_like(input);
    if (same_layout(result, promised)) return result;
    torch::stable::copy_(promised, result);
    return promised;
  }

  static Tensor sums_for(const Tensor& model, const Channels& shape) {
    const bool wide = model.scalar_type() == ScalarType::Double;
    return torch::stable::new_empty(model, {shape.samples, shape.channels},
                                    wide ? ScalarType::Double : ScalarType::Float);
  }

  static void check_scale(const char* op, const Tensor& scale, const Tensor& input, int64_t dim) {
    check_device(op, "scale", scale, input);
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
    const Tensor s = torch::stable::contiguous(scale);
    Tensor r;
    if (residual.has_value()) {
      check_device(op, "residual", *residual, input);
      check_same(*residual, input, op, "residual", "input");
      r = dense_like(*residual, x);
      call.residual = read_data(r);
    }
    Tensor y = Backend::new_output(x);
    if (x.numel() > 0) {
      call.x = read_data(x);
      call.scale = read_data(s);
      call.y = write_data(y);
      backend.chain(call);
    }
    return as_promised(y, input);
  }

  static std::tuple<Tensor, Tensor> scale_add_backward(Tensor grad, MaybeTensor input, Tensor scale,
                                                       int64_t dim, bool needs_input) {
    const char* op = "scale_add_backward";
    ScaleBackward call = {};
    const Tensor& model = input.has_value() ? *input : grad;
    call.dtype = dtype_of(grad, op, "grad");
    check_device(op, "input", model, grad);
    check_same(grad, model, op, "grad", "input");
    check_scale(op, scale, grad, dim);
    const Backend backend(grad);
    const Tensor x = with_channels(op, model, dim, scale.sizes()[0], call.shape);
    const Tensor g = dense_like(grad, x), s = torch::stable::contiguous(scale);
    Tensor gx = needs_input ? Backend::new_output(x) : torch::stable::new_empty(grad, {0});
    Tensor sums = input.has_value() ? sums_for(grad, call.shape)
                                    : torch::stable::new_empty(grad, {0}, wide_type(grad));
    if (g.numel() > 0) {
      call.grad = read_data(g);
      call.scale = read_data(s);
      if (input.has_value()) call.x = read_data(x);
      if (needs_input) call.grad_input = write_data(gx);
      if (input.has_value()) call.grad_scale = write_data(sums);
      backend.chain(call);
    } else if (input.has_value()) {
      torch::stable::zero_(sums);
    }
    return {needs_input ? as_promised(gx, model) : gx, sums};
  }

  static ScalarType wide_type(const Tensor& t) {
    return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }

  // Everything of a call but input and output; keeps the tensors that its pointers are of.
  struct BiasArguments {
    Tensor bias, seed;
    BiasArguments(const char* op, BiasAct& call, const Tensor& input, const MaybeTensor& given,
                  const MaybeTensor& random, int64_t dim, int64_t activation, double a, double b,
                  double gain, double clamp, double p) {
      check_op(op, activation);
      call.op = int(activation);
      call.dtype = dtype_of(input, op, "input");
      call.parameters[0] = a;
      call.parameters[1] = b;
      call.gain = gain;
      call.clamp = clamp;
      STD_TORCH_CHECK(p >= 0 && p < 1, "fusedtrain::", op, ": p must be from 0 to below 1");
      if (given.has_value()) {
        check_device(op, "bias", *given, input);
        STD_TORCH_CHECK(dim >= 0 && dim < int64_t(input.dim()) && given->dim() == 1 &&
                            given->numel() == input.sizes()[dim],
                        "fusedtrain::", op, ": bias must have one element for each channel");
        STD_TORCH_CHECK(given->scalar_type() == input.scalar_type(), "fusedtrain::", op,
                        ": bias must have the dtype of input");
        bias = torch::stable::contiguous(*given);
        call.bias = read_data(bias);
      }
      if (random.has_value() && p > 0) {
        check_device(op, "seed", *random, input);
        STD_TORCH_CHECK(random->scalar_type() == ScalarType::Long && random->numel() == 2,
                        "fusedtrain::", op, ": seed must be two int64 numbers");
        seed = torch::stable::contiguous(*random);
        call.seed = static_cast<const int64_t*>(read_data(seed));
        call.threshold = uint32_t(p * 4294967296.0);
        call.keep = 1 / (1 - p);
      }
    }
  };

  static Tensor bias_act(Tensor input, MaybeTensor bias, MaybeTensor seed, int64_t dim,
                         int64_t activation, double a, double b, double gain, double clamp,
                         double p) {
    const char* op = "bias_act";
    check_device(op, "input", input, input);
    const Backend backend(input);
    BiasActForward call = {};
    const BiasArguments kept(op, call, input, bias, seed, dim, activation, a, b, gain, clamp, p);
    const Tensor x = with_channels(op, input, bias.has_value() ? dim : -1, 1, call.shape);
    Tensor y = Backend::new_output(x);
    if (x.numel() > 0) {
      call.x = read_data(x);
      call.y = write_data(y);
      backend.chain(call);
    }
    return y;
  }

  static std::tuple<Tensor, Tensor> bias_act_backward(Tensor grad, Tensor saved, MaybeTensor bias,
                                                      MaybeTensor seed, int64_t dim,
                                                      int64_t activation, double a, double b,
                                                      double gain, double clamp, double p,
                                                      bool needs_bias) {
    const char* op = "bias_act_backward";
    check_device(op, "grad", grad, saved);
    check_same(grad, saved, op, "grad", "saved");
    const Backend backend(saved);
    BiasActBackward call = {};
    const BiasArguments kept(op, call, saved, bias, seed, dim, activation, a, b, gain, clamp, p);
    const bool channels = bias.has_value() || needs_bias;
    const Tensor x = with_channels(op, saved, channels ? dim : -1, 1, call.shape);
    const Tensor g = dense_like(grad, x);
    Tensor gx = Backend::new_output(x);
    Tensor sums = needs_bias ? sums_for(saved, call.shape)
                             : torch::stable::new_empty(saved, {0}, wide_type(saved));
    if (x.numel() > 0) {
      call.grad = read_data(g);
      call.saved = read_data(x);
      call.grad_input = write_data(gx);
      if (needs_bias) call.grad_bias = write_data(sums);
      backend.chain(call);
    } else if (needs_bias) {
      torch::stable::zero_(sums);
    }
    return {gx, sums};
  }
};

#define FT_IMPLEMENT_CHAINS(Backend)                                             \
  m.impl("gated", TORCH_BOX(&Chains<Backend>::gated));                           \
  m.impl("gated_backward", TORCH_BOX(&Chains<Backend>::gated_backward));         \
  m.impl("scale_add", TORCH_BOX(&Chains<Backend>::scale_add));                   \
  m.impl("scale_add_backward", TORCH_BOX(&Chains<Backend>::scale_add_backward)); \
  m.impl("bias_act", TORCH_BOX(&Chains<Backend>::bias_act));                     \
  m.impl("bias_act_backward", TORCH_BOX(&Chains<Backend>::bias_act_backward));

}  // namespace
}  // namespace fusedtrain
