// Gated products, the same for every backend: check, lay out, allocate, run.
//
// A gate of
// one value for each sample and channel is activated, and is then the scale of a scaled sum.
#pragma once

#include "../ops/gated.h"
#include "activations.h"
#include "scale_add.h"

#include <algorithm>
#include <optional>
#include <tuple>

namespace fusedtrain {
namespace {

template <class Backend>
struct GatedProducts {
  // A tensor as runs of n elements that are `stride` apart, in the order of the dimensions in a
  // dense tensor; n is the longest that there is.
  struct Runs {
    int64_t n = 1, stride = 0;
    bool fits = true;
    Runs(const Tensor& t, const Tensor& model) {
      const auto sizes = t.sizes(), strides = t.strides(), order = model.strides();
      bool whole = true;  // so far no gap
      int64_t expected = 1;
      // The next dimension: of the smallest stride, the first of several. Memory for an order of
      // all would cost more than to look for each.
      for (size_t d = next(sizes, order, sizes.size()); d < sizes.size();
           d = next(sizes, order, d)) {
        if (whole && strides[d] == n) {
          n *= sizes[d];
          continue;
        }
        if (whole) expected = stride = strides[d];
        whole = false;
        fits = fits && strides[d] == expected && expected >= n;
        expected *= sizes[d];
      }
      if (whole) stride = n;
    }
    // The dimension behind `last` in the order of strides; the number of dimensions, too, is both
    // what comes before the first and what comes behind the last. Those of one element are left
    // out.
    template <class Numbers>
    static size_t next(const Numbers& sizes, const Numbers& order, size_t last) {
      const size_t dims = sizes.size();
      size_t found = dims;
      for (size_t d = 0; d < dims; ++d) {
        if (sizes[d] == 1) continue;
        const bool behind =
            last == dims || order[d] > order[last] || (order[d] == order[last] && d > last);
        if (behind && (found == dims || order[d] < order[found])) found = d;
      }
      return found;
    }
    // The same as runs of m elements.
    bool cut(int64_t m) {
      if (m == n) return fits;
      if (!fits || stride != n || n % m != 0) return false;
      n = stride = m;
      return true;
    }
  };

  // A dense tensor in whose order `value` is best walked; the gradient mostly is one.
  static Tensor dense_model(const Tensor& value, const Tensor& grad) {
    if (is_dense(value)) return value;
    return is_dense(grad) && Runs(value, grad).fits ? grad : new_like(value);
  }

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
    check_activation(op, activation);
    check_device<Backend>(op, "gate", gate, value);
    check_same(gate, value, op, "gate", "value");
    GatedForward call = {};
    call.op = int(activation);
    call.dtype = dtype_of(value, op, "value");
    call.parameters[0] = a;
    call.parameters[1] = b;
    const Backend backend(value);
    Tensor y = new_output<Backend>(value);
    if (y.numel() == 0) return y;
    lay_out(call, gate, value, y, y.numel());
    call.y = write_data(y);
    backend.run(call);
    return y;
  }

  static void gated_backward(Tensor grad, Tensor gate, Tensor value, Tensor grad_gate,
                             Tensor grad_value, int64_t activation, double a, double b) {
    const char* op = "gated_backward";
    check_activation(op, activation);
    for (const Tensor* t : {&grad, &gate, &grad_gate, &grad_value}) {
      check_device<Backend>(op, "a tensor", *t, value);
      check_same(*t, value, op, "all tensors", "value");
    }
    GatedBackward call = {};
    call.op = int(activation);
    call.dtype = dtype_of(value, op, "value");
    call.parameters[0] = a;
    call.parameters[1] = b;
    if (value.numel() == 0) return;
    const Backend backend(value);
    const Tensor model = dense_model(value, grad);
    const Tensor g = dense_like(grad, model);
    // Where the gradients cannot be walked together, by way of dense ones.
    Tensor to_gate = grad_gate, to_value = grad_value;
    Runs out_gate(to_gate, model), out_value(to_value, model);
    lay_out(call, gate, value, model, std::min(out_gate.n, out_value.n));
    if (!out_gate.cut(call.n)) {
      to_gate = new_like(model);
      (out_gate = Runs(to_gate, model)).cut(call.n);
    }
    if (!out_value.cut(call.n)) {
      to_value = new_like(model);
      (out_value = Runs(to_value, model)).cut(call.n);
    }
    call.grad = read_data(g);
    call.grad_gate = write_data(to_gate);
    call.grad_value = write_data(to_value);
    call.grad_gate_stride = out_gate.stride;
    call.grad_value_stride = out_value.stride;
    backend.run(call);
    if (to_gate.const_data_ptr() != grad_gate.const_data_ptr())
      torch::stable::copy_(grad_gate, to_gate);
    if (to_value.const_data_ptr() != grad_value.const_data_ptr())
      torch::stable::copy_(grad_value, to_value);
  }
};

template <class Backend>
struct GatedSpreads {
  // The gate in order, and where its activation is, one value for each sample and channel.
  struct Opened {
    Tensor gate;
    const void* values;

    Opened(const char* op, const Tensor& given, const Tensor& value, int64_t activation, double a,
           double b)
        : gate(in_order(given)) {
      check_activation(op, activation);
      check_device<Backend>(op, "gate", gate, value);
      const auto sizes = gate.sizes(), wanted = value.sizes();
      STD_TORCH_CHECK(sizes.size() == wanted.size() && sizes.size() >= 2 && sizes[0] == wanted[0] &&
                          sizes[1] == wanted[1] && gate.numel() == sizes[0] * sizes[1],
                      "fusedtrain::", op, ": gate must be [samples, channels, 1, ...]");
      STD_TORCH_CHECK(gate.scalar_type() == value.scalar_type(), "fusedtrain::", op,
                      ": gate and value must have the same dtype");
      const Dtype dtype = dtype_of(gate, op, "gate");
      values = read_data(gate);
      if (activation < 0) return;
      const Backend backend(gate);
      void* const opened = new_values();
      backend.run(PointwiseForward{int(activation), dtype, values, opened, {a, b}}, gate.numel());
      values = opened;
    }
    Opened(const Opened&) = delete;

    int64_t samples() const { return gate.sizes()[0]; }
    Dtype dtype(const char* op) const { return dtype_of(gate, op, "gate"); }

   private:
    // Values of a small gate on the CPU, where a new tensor takes 0.2 us.
    alignas(64) unsigned char small_[Backend::kSmall];
    Tensor large_;

    void* new_values() {
      if (gate.numel() * gate.element_size() <= Backend::kSmall) return small_;
      large_ = new_output<Backend>(gate);
      return update_data(large_);
    }
  };

  static Tensor gated_spread(Tensor gate, Tensor value, int64_t activation, double a, double b) {
    const char* op = "gated_spread";
    const Opened opened(op, gate, value, activation, a, b);
    return ScaledSums<Backend>::forward(op, opened.dtype(op), value, opened.values,
                                        opened.samples(), std::nullopt, 1);
  }

  static std::tuple<Tensor, Tensor> gated_spread_backward(Tensor grad, Tensor gate,
                                                          std::optional<Tensor> value,
                                                          int64_t activation, double a, double b,
                                                          bool needs_value) {
    const char* op = "gated_spread_backward";
    const Opened opened(op, gate, grad, activation, a, b);
    const Tensor& g = opened.gate;
    auto [grad_value, sums] = ScaledSums<Backend>::backward(
        op, opened.dtype(op), grad, value, opened.values, opened.samples(), 1, needs_value);
    if (!value.has_value()) return {sums, grad_value};
    Tensor grad_gate = new_output<Backend>(g);
    if (activation < 0) {
      torch::stable::copy_(grad_gate, torch::stable::view(sums, g.sizes()));
      return {grad_gate, grad_value};
    }
    if (sums.scalar_type() != g.scalar_type()) sums = torch::stable::to(sums, g.scalar_type());
    const void* saved = kTakesOutput[activation] ? opened.values : read_data(g);
    const Backend backend(g);
    backend.run(PointwiseBackward{int(activation),
                                  opened.dtype(op),
                                  read_data(sums),
                                  saved,
                                  write_data(grad_gate),
                                  {a, b}},
                g.numel());
    return {grad_gate, grad_value};
  }
};

FT_REGISTER(m) {
  m.impl("gated", TORCH_BOX(&GatedProducts<Backend>::gated));
  m.impl("gated_backward", TORCH_BOX(&GatedProducts<Backend>::gated_backward));
  m.impl("gated_spread", TORCH_BOX(&GatedSpreads<Backend>::gated_spread));
  m.impl("gated_spread_backward", TORCH_BOX(&GatedSpreads<Backend>::gated_spread_backward));
}

}  // namespace
}  // namespace fusedtrain
