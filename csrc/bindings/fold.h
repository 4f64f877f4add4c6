// fold_weight and its backward, the same for every backend: check, lay out, allocate, run.
#pragma once

#include "../ops/fold.h"
#include "checks.h"

#include <optional>
#include <tuple>

namespace fusedtrain {
namespace {

template <class Backend>
struct Folding {
  using MaybeTensor = std::optional<Tensor>;
  using ScalarType = torch::headeronly::ScalarType;

  // A call without its outputs, and the tensors that its pointers are of.
  struct Arguments {
    FoldWeight call = {};
    ScalarType wide;
    int64_t outputs;
    Tensor weight;
    Tensor vectors[5];
    int count = 0;

    Arguments(const char* op, const Tensor& w, const MaybeTensor& bias, const MaybeTensor& gamma,
              const Tensor& mean, const Tensor& var, double eps, bool transposed, int64_t groups)
        : weight(in_rows(w)) {
      call.dtype = dtype_of(w, op, "weight");
      wide = call.dtype == Dtype::kFloat64 ? ScalarType::Double : ScalarType::Float;
      const auto sizes = weight.sizes();
      STD_TORCH_CHECK(sizes.size() >= 2, "fusedtrain::", op, ": weight must have 2 dimensions");
      const int64_t numel = weight.numel();
      if (transposed) {
        STD_TORCH_CHECK(groups > 0 && sizes[0] % groups == 0, "fusedtrain::", op,
                        ": groups must divide the input channels");
        outputs = groups * sizes[1];
        call.channels = sizes[1];
        const bool plain = sizes[1] < 2 || numel == 0;
        call.inner = plain ? (outputs * sizes[0] > 0 ? numel / (sizes[0] * sizes[1]) : 1)
                           : weight.strides()[1];
        call.rows = numel > 0 ? numel / (call.channels * call.inner) : groups;
        call.rows_per_group = call.rows / groups;
      } else {
        outputs = call.channels = sizes[0];
        call.rows = call.rows_per_group = 1;
        call.inner = outputs > 0 ? numel / outputs : 0;
      }
      call.eps = eps;
      call.mean = vector(op, "running_mean", mean);
      call.var = vector(op, "running_var", var);
      call.bias = bias.has_value() ? vector(op, "bias", *bias) : nullptr;
      call.gamma = gamma.has_value() ? vector(op, "gamma", *gamma) : nullptr;
      call.weight = read_data(weight);
    }

    // One value an output channel, in the dtype of the math.
    const void* vector(const char* op, const char* name, const Tensor& t) {
      STD_TORCH_CHECK(Backend::on_device(t) && same_device(t, weight), "fusedtrain::", op, ": ",
                      name, " must be on the device of weight");
      STD_TORCH_CHECK(t.dim() == 1 && t.numel() == outputs, "fusedtrain::", op, ": ", name,
                      " must have one element for each of the ", outputs, " output channels");
      dtype_of(t, op, name);
      Tensor& kept = vectors[count++];
      if (t.scalar_type() == wide) {
        kept = torch::stable::contiguous(t);
      } else {
        kept = new_vector();
        torch::stable::copy_(kept, t);
      }
      return read_data(kept);
    }

    Tensor new_vector() const { return new_contiguous(weight, {outputs}, wide); }

    // The weight, or a contiguous copy where its first dimension is not the outermost in memory.
    static Tensor in_rows(const Tensor& t) {
      if (t.dim() < 1 || t.numel() == 0) return torch::stable::contiguous(t);
      const bool rows = t.sizes()[0] == 1 || t.strides()[0] * t.sizes()[0] == t.numel();
      return rows && is_dense(t) ? t : torch::stable::contiguous(t);
    }
  };

  static Tensor in_dtype(const Tensor& t, ScalarType dtype) {
    if (t.scalar_type() == dtype) return t;
    Tensor copy = new_contiguous(t, {t.numel()}, dtype);
    torch::stable::copy_(copy, t);
    return copy;
  }

  static std::tuple<Tensor, Tensor> forward(Tensor weight, MaybeTensor bias, MaybeTensor gamma,
                                            MaybeTensor beta, Tensor mean, Tensor var, double eps,
                                            bool transposed, int64_t groups) {
    const char* op = "fold_weight";
    check_device(op, weight);
    const Backend backend(weight);
    Arguments args(op, weight, bias, gamma, mean, var, eps, transposed, groups);
    FoldForward call = {};
    static_cast<FoldWeight&>(call) = args.call;
    call.beta = beta.has_value() ? args.vector(op, "beta", *beta) : nullptr;
    Tensor folded = new_output<Backend>(args.weight), folded_bias = args.new_vector();
    call.folded = write_data(folded);
    call.folded_bias = write_data(folded_bias);
    backend.run(call);
    return {folded, in_dtype(folded_bias, weight.scalar_type())};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor grad_weight, Tensor grad_bias,
                                                             Tensor weight, MaybeTensor bias,
                                                             MaybeTensor gamma, Tensor mean,
                                                             Tensor var, double eps,
                                                             bool transposed, int64_t groups) {
    const char* op = "fold_weight_backward";
    check_device(op, weight);
    check_same(grad_weight, weight, op, "grad_weight", "weight");
    const Backend backend(weight);
    Arguments args(op, weight, bias, gamma, mean, var, eps, transposed, groups);
    FoldBackward call = {};
    static_cast<FoldWeight&>(call) = args.call;
    const Tensor grad = dense_like(grad_weight, args.weight);
    call.grad_folded = read_data(grad);
    call.grad_folded_bias = args.vector(op, "grad_bias", grad_bias);
    Tensor out = new_output<Backend>(args.weight);
    Tensor out_bias = args.new_vector(), out_gamma = args.new_vector();
    call.grad_weight = write_data(out);
    call.grad_bias = write_data(out_bias);
    call.grad_gamma = write_data(out_gamma);
    backend.run(call);
    Tensor grad_beta = new_contiguous(mean, {args.outputs}, mean.scalar_type());
    torch::stable::copy_(grad_beta, grad_bias);
    return {out, in_dtype(out_bias, weight.scalar_type()), in_dtype(out_gamma, mean.scalar_type()),
            grad_beta};
  }

 private:
  static void check_device(const char* op, const Tensor& weight) {
    STD_TORCH_CHECK(Backend::on_device(weight), "fusedtrain::", op,
                    ": weight must be on the device of the other tensors");
  }
};

FT_REGISTER(m) {
  m.impl("fold_weight", TORCH_BOX(&Folding<Backend>::forward));
  m.impl("fold_weight_backward", TORCH_BOX(&Folding<Backend>::backward));
}

}  // namespace
}  // namespace fusedtrain
