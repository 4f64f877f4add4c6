// Bindings of batch norm for all backends: check, lay out, allocate and run a call.
//
// A Backend is made for one call, on the device of a tensor, and has (ops/batch_norm.h)
//   static Tensor prepared(Tensor output);               fresh memory, made ready
//   static bool on_device(const Tensor&);                whether its kernels can take it
//   void statistics(const BatchNorm&, const BatchNormStatistics&) const;      average, variance
//   void train(const BatchNorm&, const BatchNormStatistics&, const BatchNormForward&) const;
//                                                        statistics, mean, invstd, y
//   void evaluate(const BatchNorm&, const BatchNormStatistics&, const BatchNormForward&) const;
//                                                        mean and invstd from running_mean and
//                                                        running_var, y
//   void normalise(const BatchNorm&, const BatchNormForward&) const;          y
//   void restore(const BatchNorm&, const BatchNormRestore&) const;            x, from y
//   void reduce(const BatchNorm&, const BatchNormBackward&) const;            sums, grad_weight,
//                                                        grad_bias, grad_residual where not null
//   void grad_input(const BatchNorm&, const BatchNormBackward&) const;        grad_input,
//                                                        grad_residual where not null
//   void backward(const BatchNorm&, const BatchNormBackward&) const;          both, averages =
//   sums, or
//                                                        null with fixed statistics
#pragma once

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "../formulas.h"
#include "../ops/batch_norm.h"
#include "checks.h"

namespace fusedtrain {
namespace {

#define FT_COUNT(...) +1
constexpr int kBatchNormOps = 0 FT_POINTWISE(FT_COUNT);
#undef FT_COUNT
#define FT_SAVED(name, Formula, n, rounds, saved) saved,
constexpr Saved kSaved[] = {FT_POINTWISE(FT_SAVED)};
#undef FT_SAVED

template <class Backend>
struct BatchNormOps {
  using MaybeTensor = std::optional<Tensor>;
  using ScalarType = torch::headeronly::ScalarType;

  // A call on tensors of the layout of `x`, a dense one.
  struct Call {
    BatchNorm n = {};
    Tensor model;  // of the layout that results have
    Tensor x;
    ScalarType wide;
    std::vector<Tensor> kept;  // contiguous copies

    Call(const Tensor& input, const MaybeTensor& branch_scale, const MaybeTensor& weight,
         const MaybeTensor& bias, int64_t activation, double a, double b, bool by_sample = false)
        : model(checked_rank(input)), x(walkable(model, branch_scale.has_value() || by_sample)) {
      STD_TORCH_CHECK(activation >= -1 && activation < kBatchNormOps,
                      "fusedtrain::batch_norm_act: no such activation");
      n.op = static_cast<int>(activation);
      n.dtype = dtype_of(x, "batch_norm_act", "input");
      wide = n.dtype == Dtype::kFloat64 ? ScalarType::Double : ScalarType::Float;
      const int64_t samples = x.size(0), numel = x.numel();
      n.channels = x.size(1);
      n.inner = n.channels == 1 ? numel / (samples > 0 ? samples : 1) : x.stride(1);
      const int64_t of_row = n.channels * n.inner;
      n.rows = of_row > 0 ? numel / of_row : 0;
      n.rows_a_sample = samples > 0 && n.rows >= samples ? n.rows / samples : 1;
      n.parameters[0] = a;
      n.parameters[1] = b;
      n.branch_scale = vector(branch_scale, samples, "branch_scale");
      n.weight = vector(weight, n.channels, "weight");
      n.bias = vector(bias, n.channels, "bias");
    }

    static Tensor checked_rank(const Tensor& t) {
      STD_TORCH_CHECK(t.dim() >= 2, "fusedtrain::batch_norm_act: input must have 2 dimensions");
      return dense(t);
    }
    // A dense tensor, where samples are told apart with one sample after the other.
    static Tensor walkable(const Tensor& t, bool by_sample) {
      const int64_t samples = t.size(0);
      if ((by_sample || t.size(1) == 1) && samples > 1 && t.numel() > 0 &&
          t.stride(0) != t.numel() / samples)
        return torch::stable::contiguous(t);
      return t;
    }
    // A tensor computed in the layout of x, in the layout that results have.
    Tensor result(const Tensor& t) const { return t.numel() > 0 ? dense_like(t, model) : t; }

    const void* vector(const MaybeTensor& t, int64_t size, const char* what) {
      if (!t.has_value()) return nullptr;
      kept.push_back(torch::stable::contiguous(checked(*t, size, what)));
      return read_data(kept.back());
    }
    void* written_vector(const MaybeTensor& t, int64_t size, const char* what) {
      if (!t.has_value()) return nullptr;
      STD_TORCH_CHECK(t->is_contiguous(), "fusedtrain::batch_norm_act: ", what,
                      " must be contiguous");
      return update_data(checked(*t, size, what));
    }
    const Tensor& checked(const Tensor& t, int64_t size, const char* what) const {
      STD_TORCH_CHECK(t.dim() == 1 && t.numel() == size, "fusedtrain::batch_norm_act: ", what,
                      " must have ", size, " elements");
      STD_TORCH_CHECK(t.scalar_type() == wide, "fusedtrain::batch_norm_act: ", what,
                      " must be float32 (float64 for a float64 input)");
      check_device(t, what);
      return t;
    }
    void check_device(const Tensor& t, const char* what) const {
      STD_TORCH_CHECK(Backend::on_device(t) && same_device(t, x),
                      "fusedtrain::batch_norm_act: ", what, " must be on the device of the input");
    }

    // Another tensor of the input's shape, in its layout.
    const void* companion(const MaybeTensor& t, const char* what) {
      if (!t.has_value()) return nullptr;
      check_same(*t, x, "batch_norm_act", what, "input");
      check_device(*t, what);
      kept.push_back(dense_like(*t, x));
      return read_data(kept.back());
    }

    Tensor new_vector(int64_t size) const { return new_matrix<Backend>(x, 0, size, wide); }
    Tensor new_sums() const { return new_matrix<Backend>(x, 2, n.channels, ScalarType::Double); }
    Tensor none() const { return new_matrix<Backend>(x, 0, 0, x.scalar_type()); }

    void use(const MaybeTensor& mean, const MaybeTensor& invstd) {
      n.mean = const_cast<void*>(vector(mean, n.channels, "mean"));
      n.invstd = const_cast<void*>(vector(invstd, n.channels, "invstd"));
    }
  };

  static std::tuple<Tensor, Tensor> stats(const Tensor& input) {
    Call call(input, {}, {}, {}, -1, 0, 0);
    call.check_device(input, "input");
    Tensor average = new_contiguous(call.x, {call.n.channels}, ScalarType::Double);
    Tensor variance = new_like(average);
    if (call.x.numel() == 0) {
      torch::stable::zero_(average);
      torch::stable::zero_(variance);
      return {average, variance};
    }
    call.n.x = read_data(call.x);
    BatchNormStatistics s = {};
    s.average = static_cast<double*>(write_data(average));
    s.variance = static_cast<double*>(write_data(variance));
    Backend(input).statistics(call.n, s);
    return {average, variance};
  }

  static std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, MaybeTensor residual,
                                                    MaybeTensor branch_scale, MaybeTensor weight,
                                                    MaybeTensor bias, MaybeTensor running_mean,
                                                    MaybeTensor running_var, bool training,
                                                    double momentum, double eps, int64_t activation,
                                                    double a, double b) {
    Call call(input, branch_scale, weight, bias, activation, a, b);
    call.check_device(input, "input");
    call.n.x = read_data(call.x);
    const void* added = call.companion(residual, "residual");
    Tensor output = new_output<Backend>(call.x);
    const auto [mean, invstd] =
        run(call, running_mean, running_var, training, momentum, eps, {added, write_data(output)});
    return {call.result(output), mean, invstd};
  }

  // The output takes the place of the input.
  static std::tuple<Tensor, Tensor> forward_in_place(const Tensor& input, MaybeTensor weight,
                                                     MaybeTensor bias, MaybeTensor running_mean,
                                                     MaybeTensor running_var, bool training,
                                                     double momentum, double eps,
                                                     int64_t activation, double a, double b) {
    Call call(input, {}, weight, bias, activation, a, b);
    call.check_device(input, "input");
    STD_TORCH_CHECK(call.x.const_data_ptr() == input.const_data_ptr(),
                    "fusedtrain::batch_norm_act_: input must be dense");
    void* data = update_data(call.x);
    call.n.x = data;
    return run(call, running_mean, running_var, training, momentum, eps, {nullptr, data});
  }

  // The input that an output in its place was made of.
  static Tensor restore(const Tensor& output, MaybeTensor weight, MaybeTensor bias,
                        const Tensor& mean, const Tensor& invstd, double slope) {
    Call call(output, {}, weight, bias, -1, 0, 0);
    call.check_device(output, "output");
    call.use(mean, invstd);
    call.n.x = read_data(call.x);
    Tensor input = new_output<Backend>(call.x);
    if (output.numel() > 0)
      Backend(output).restore(call.n, {slope, largest(call.n.dtype), write_data(input)});
    return call.result(input);
  }

  static double largest(Dtype dtype) {
    constexpr double kHalf = 65504, kFloat = std::numeric_limits<float>::max();
    constexpr double kBFloat16 = kFloat * (1 - 0x1p-8);  // rounds to its largest
    return dtype == Dtype::kFloat64    ? std::numeric_limits<double>::max()
           : dtype == Dtype::kFloat32  ? kFloat
           : dtype == Dtype::kBFloat16 ? kBFloat16
                                       : kHalf;
  }

  // Writes f.y; returns mean and invstd.
  static std::tuple<Tensor, Tensor> run(Call& call, const MaybeTensor& running_mean,
                                        const MaybeTensor& running_var, bool training,
                                        double momentum, double eps, const BatchNormForward& f) {
    STD_TORCH_CHECK(running_mean.has_value() == running_var.has_value() &&
                        (training || running_mean.has_value()),
                    "fusedtrain::batch_norm_act: running_mean and running_var");
    const int64_t channels = call.n.channels;
    BatchNormStatistics s = {};
    s.momentum = momentum;
    s.eps = eps;
    if (training) {
      s.running_mean = call.written_vector(running_mean, channels, "running_mean");
      s.running_var = call.written_vector(running_var, channels, "running_var");
    } else {
      s.running_mean = const_cast<void*>(call.vector(running_mean, channels, "running_mean"));
      s.running_var = const_cast<void*>(call.vector(running_var, channels, "running_var"));
    }
    const Backend backend(call.x);
    Tensor mean = call.new_vector(channels), invstd = call.new_vector(channels);
    call.n.mean = write_data(mean);
    call.n.invstd = write_data(invstd);
    if (call.x.numel() == 0) {
      torch::stable::zero_(mean);
      torch::stable::zero_(invstd);
    } else if (training) {
      Tensor sums = call.new_sums();
      s.average = static_cast<double*>(write_data(sums));
      s.variance = s.average + channels;
      backend.train(call.n, s, f);
    } else {
      backend.evaluate(call.n, s, f);
    }
    return {mean, invstd};
  }

  static Tensor apply(const Tensor& input, MaybeTensor residual, MaybeTensor branch_scale,
                      MaybeTensor weight, MaybeTensor bias, const Tensor& mean,
                      const Tensor& invstd, int64_t activation, double a, double b) {
    Call call(input, branch_scale, weight, bias, activation, a, b);
    call.check_device(input, "input");
    call.use(mean, invstd);
    call.n.x = read_data(call.x);
    const void* added = call.companion(residual, "residual");
    Tensor output = new_output<Backend>(call.x);
    if (input.numel() > 0) Backend(input).normalise(call.n, {added, write_data(output)});
    return call.result(output);
  }

  // Common part of the three ops of backward. Without an input the layout is that of `saved`.
  struct Backward : Call {
    BatchNormBackward b = {};
    Tensor sums, grad_input, grad_residual, grad_weight, grad_bias;

    Backward(const Tensor& grad, const MaybeTensor& input, const MaybeTensor& saved,
             const MaybeTensor& branch_scale, const MaybeTensor& weight, const MaybeTensor& bias,
             const Tensor& mean, const Tensor& invstd, int64_t activation, double p0, double p1)
        : Call(input.has_value() ? *input : (saved.has_value() ? *saved : grad), branch_scale,
               weight, bias, activation, p0, p1) {
      this->check_device(grad, "grad");
      this->use(mean, invstd);
      const bool by_output = activation >= 0 && kSaved[activation] == kOutput;
      STD_TORCH_CHECK(input.has_value() || activation < 0 || (by_output && saved.has_value()),
                      "fusedtrain::batch_norm_act_backward: this activation needs the input");
      if (input.has_value()) this->n.x = read_data(this->x);
      b.saved = activation < 0 ? nullptr : this->companion(saved, "saved");
      b.grad = this->companion(grad, "grad");
    }

    // A result that is not wanted has no elements: what an op returns may not share memory.
    void make_residual(bool wanted) {
      grad_residual = wanted ? new_output<Backend>(this->x) : this->none();
      if (wanted) b.grad_residual = write_data(grad_residual);
    }
    void make_input(bool wanted) {
      grad_input = wanted ? new_output<Backend>(this->x) : this->none();
      if (wanted) b.grad_input = write_data(grad_input);
    }
    void make_sums() {
      sums = this->new_sums();
      b.sums = static_cast<double*>(write_data(sums));
    }
    void make_affine(bool wanted) {
      grad_weight = this->new_vector(wanted ? this->n.channels : 0);
      grad_bias = this->new_vector(wanted ? this->n.channels : 0);
      if (wanted) b.grad_weight = write_data(grad_weight);
      if (wanted) b.grad_bias = write_data(grad_bias);
    }
  };

  static std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
      const Tensor& grad, MaybeTensor input, MaybeTensor saved, MaybeTensor branch_scale,
      MaybeTensor weight, MaybeTensor bias, const Tensor& mean, const Tensor& invstd, bool training,
      int64_t activation, double p0, double p1, bool needs_input, bool needs_residual,
      bool needs_affine) {
    STD_TORCH_CHECK(input.has_value() || !(training || needs_affine),
                    "fusedtrain::batch_norm_act_backward: input");
    Backward call(grad, input, saved, branch_scale, weight, bias, mean, invstd, activation, p0, p1);
    const Backend backend(grad);
    call.make_residual(needs_residual);
    call.make_affine(training || needs_affine);
    if (training || needs_affine) call.make_sums();
    call.make_input(needs_input);
    if (grad.numel() == 0) {
      torch::stable::zero_(call.grad_weight);
      torch::stable::zero_(call.grad_bias);
    } else if (needs_input && (training || needs_affine)) {
      if (training) call.b.averages = call.b.sums;
      call.b.count = static_cast<double>(call.n.rows * call.n.inner);
      backend.backward(call.n, call.b);
    } else if (training || needs_affine) {
      backend.reduce(call.n, call.b);
    } else if (needs_input || needs_residual) {
      backend.grad_input(call.n, call.b);
    }
    return {call.result(call.grad_input), call.result(call.grad_residual), call.grad_weight,
            call.grad_bias};
  }

  static std::tuple<Tensor, Tensor> reduce(const Tensor& grad, const Tensor& input,
                                           MaybeTensor saved, MaybeTensor branch_scale,
                                           MaybeTensor weight, MaybeTensor bias, const Tensor& mean,
                                           const Tensor& invstd, int64_t activation, double p0,
                                           double p1, bool needs_residual) {
    Backward call(grad, input, saved, branch_scale, weight, bias, mean, invstd, activation, p0, p1);
    call.make_sums();
    call.make_residual(needs_residual);
    if (grad.numel() == 0)
      torch::stable::zero_(call.sums);
    else
      Backend(grad).reduce(call.n, call.b);
    return {call.sums, call.result(call.grad_residual)};
  }

  static std::tuple<Tensor, Tensor> backward_apply(const Tensor& grad, MaybeTensor input,
                                                   MaybeTensor saved, MaybeTensor branch_scale,
                                                   MaybeTensor weight, MaybeTensor bias,
                                                   const Tensor& mean, const Tensor& invstd,
                                                   MaybeTensor averages, int64_t activation,
                                                   double p0, double p1, bool needs_residual) {
    Backward call(grad, input, saved, branch_scale, weight, bias, mean, invstd, activation, p0, p1);
    call.make_input(true);
    call.make_residual(needs_residual);
    if (averages.has_value()) {
      STD_TORCH_CHECK(input.has_value() && averages->numel() == 2 * call.n.channels &&
                          averages->scalar_type() == ScalarType::Double,
                      "fusedtrain::batch_norm_act_backward_apply: averages");
      call.check_device(*averages, "averages");
      call.kept.push_back(torch::stable::contiguous(*averages));
      call.b.averages = static_cast<const double*>(read_data(call.kept.back()));
      call.b.count = 1;
    }
    if (grad.numel() > 0) Backend(grad).grad_input(call.n, call.b);
    return {call.result(call.grad_input), call.result(call.grad_residual)};
  }
};

FT_REGISTER(m) {
  m.impl("batch_norm_stats", TORCH_BOX(&BatchNormOps<Backend>::stats));
  m.impl("batch_norm_act", TORCH_BOX(&BatchNormOps<Backend>::forward));
  m.impl("batch_norm_act_", TORCH_BOX(&BatchNormOps<Backend>::forward_in_place));
  m.impl("batch_norm_act_restore", TORCH_BOX(&BatchNormOps<Backend>::restore));
  m.impl("batch_norm_act_apply", TORCH_BOX(&BatchNormOps<Backend>::apply));
  m.impl("batch_norm_act_backward", TORCH_BOX(&BatchNormOps<Backend>::backward));
  m.impl("batch_norm_act_backward_reduce", TORCH_BOX(&BatchNormOps<Backend>::reduce));
  m.impl("batch_norm_act_backward_apply", TORCH_BOX(&BatchNormOps<Backend>::backward_apply));
}

}  // namespace
}  // namespace fusedtrain
