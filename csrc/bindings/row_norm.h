// Bindings of the norms of rows, the same for every backend: check, lay out, allocate, run.
#pragma once

#include "../ops/row_norm.h"
#include "channels.h"

#include <optional>
#include <tuple>
#include <vector>

namespace fusedtrain {
namespace {

template <class Backend>
struct RowNorms {
  using MaybeTensor = std::optional<Tensor>;

  // A call on a dense input whose dimensions start ... end are one in memory; the sizes and strides
  // of its statistics, which keep these dimensions.
  struct Shape {
    RowNorm call = {};
    int64_t start, end, statistics = 1;
    std::vector<int64_t> sizes, strides;
    std::vector<Tensor> kept;

    Shape(const char* op, const Tensor& x, int64_t start, int64_t end) : start(start), end(end) {
      call.dtype = dtype_of(x, op, "input");
      const int64_t dims = x.dim();
      STD_TORCH_CHECK(start >= 0 && start <= end && end < dims, "fusedtrain::", op,
                      ": start_dim and end_dim must be dimensions of input");
      STD_TORCH_CHECK(is_dense(x), "fusedtrain::", op, ": input must be dense");
      const auto of = x.sizes(), steps = x.strides();
      call.n = call.inner = 1;
      bool first = true;
      for (int64_t d = end; d >= start; --d) {
        if (of[d] != 1 && first) call.inner = steps[d];
        STD_TORCH_CHECK(of[d] == 1 || x.numel() == 0 || steps[d] == call.inner * call.n,
                        "fusedtrain::", op, ": the normalised dimensions must lie one in another");
        first = first && of[d] == 1;
        call.n *= of[d];
      }
      if (x.numel() == 0) call.inner = 1;
      for (int64_t d = 0; d < dims; ++d) {
        const bool normalised = d >= start && d <= end;
        sizes.push_back(normalised ? 1 : of[d]);
        const bool beyond = steps[d] >= call.inner * call.n && call.n > 0;
        strides.push_back(normalised ? 1 : beyond ? steps[d] / call.n : steps[d]);
        statistics *= sizes.back();
      }
      call.rows = statistics / call.inner;
    }
    Tensor new_statistics(const Tensor& x) const {
      return new_strided(x, int64_t(sizes.size()), sizes.data(), strides.data(), wide_type(x));
    }
    // Statistics in the order of the blocks.
    const void* statistics_of(const char* op, const char* name, const Tensor& t, const Tensor& x) {
      check_device<Backend>(op, name, t, x);
      STD_TORCH_CHECK(t.scalar_type() == wide_type(x) && t.numel() == statistics,
                      "fusedtrain::", op, ": ", name, " must have a number for each block");
      const Tensor model = new_statistics(x);
      STD_TORCH_CHECK(same_sizes(t, model) && same_layout(t, model), "fusedtrain::", op, ": ", name,
                      " must have the layout that row_norm returns");
      return read_data(t);
    }
    // All of one dtype, that of the input or of its math.
    const void* affine(const char* op, const char* name, const MaybeTensor& t, const Tensor& x) {
      if (!t.has_value()) return nullptr;
      check_device<Backend>(op, name, *t, x);
      const bool same = t->scalar_type() == x.scalar_type();
      STD_TORCH_CHECK(same || t->scalar_type() == wide_type(x), "fusedtrain::", op, ": ", name,
                      " must have the dtype of input, or that of its math");
      STD_TORCH_CHECK(t->numel() == call.n, "fusedtrain::", op, ": ", name, " must have ", call.n,
                      " elements");
      STD_TORCH_CHECK(kept.empty() || call.wide_affine == !same, "fusedtrain::", op,
                      ": weight and bias must have one dtype");
      call.wide_affine = !same;
      kept.push_back(in_order(*t));
      return read_data(kept.back());
    }
  };

  static std::tuple<Tensor, Tensor, Tensor, Tensor> row_norm(Tensor input, MaybeTensor residual,
                                                             MaybeTensor weight, MaybeTensor bias,
                                                             int64_t start_dim, int64_t end_dim,
                                                             double eps, bool centered) {
    const char* op = "row_norm";
    Shape shape(op, input, start_dim, end_dim);
    const Tensor& x = input;
    shape.call.weight = shape.affine(op, "weight", weight, x);
    shape.call.bias = shape.affine(op, "bias", bias, x);
    shape.call.centered = centered;
    STD_TORCH_CHECK(centered || !bias.has_value(), "fusedtrain::", op,
                    ": only a centered norm has a bias");
    Tensor r, sum = new_contiguous(x, {0}, x.scalar_type());
    Tensor mean = new_contiguous(x, {0}, wide_type(x));
    const void* added = read_like<Backend>(op, "residual", residual, x, x, r);
    if (residual.has_value()) sum = new_output<Backend>(x);
    const Backend backend(x);
    Tensor y = new_output<Backend>(x), rstd = shape.new_statistics(x);
    if (centered) mean = shape.new_statistics(x);
    if (x.numel() > 0) {
      RowNormForward call = {};
      static_cast<RowNorm&>(call) = shape.call;
      call.eps = eps;
      call.x = read_data(x);
      call.residual = added;
      if (residual.has_value()) call.sum = write_data(sum);
      call.y = write_data(y);
      if (centered) call.mean = write_data(mean);
      call.rstd = write_data(rstd);
      backend.run(call);
    } else if (rstd.numel() > 0) {
      torch::stable::zero_(rstd);
      if (centered) torch::stable::zero_(mean);
    }
    return {y, mean, rstd, sum};
  }

  static std::tuple<Tensor, Tensor, Tensor> row_norm_backward(Tensor grad, MaybeTensor grad_sum,
                                                              Tensor input, MaybeTensor weight,
                                                              Tensor mean, Tensor rstd,
                                                              int64_t start_dim, int64_t end_dim,
                                                              bool needs_weight, bool needs_bias) {
    const char* op = "row_norm_backward";
    const Tensor& x = input;
    check_device<Backend>(op, "input", x, grad);
    Shape shape(op, x, start_dim, end_dim);
    check_same(grad, x, op, "grad", "input");
    shape.call.weight = shape.affine(op, "weight", weight, x);
    shape.call.centered = mean.numel() > 0;
    check_device<Backend>(op, "mean", mean, x);
    RowNormBackward call = {};
    static_cast<RowNorm&>(call) = shape.call;
    if (call.centered) call.mean = shape.statistics_of(op, "mean", mean, x);
    call.rstd = shape.statistics_of(op, "rstd", rstd, x);
    const Tensor g = dense_like(grad, x);
    Tensor more;
    call.grad_sum = read_like<Backend>(op, "grad_sum", grad_sum, x, x, more);
    const Backend backend(x);
    Tensor gx = new_output<Backend>(x);
    Tensor sums[] = {new_contiguous(x, {needs_weight ? call.n : 0}, wide_type(x)),
                     new_contiguous(x, {needs_bias ? call.n : 0}, wide_type(x))};
    if (x.numel() > 0) {
      call.grad = read_data(g);
      call.x = read_data(x);
      call.grad_input = write_data(gx);
      if (needs_weight) call.grad_weight = write_data(sums[0]);
      if (needs_bias) call.grad_bias = write_data(sums[1]);
      backend.run(call);
    } else {
      for (Tensor& t : sums)
        if (t.numel() > 0) torch::stable::zero_(t);
    }
    return {gx, sums[0], sums[1]};
  }
};

FT_REGISTER(m) {
  m.impl("row_norm", TORCH_BOX(&RowNorms<Backend>::row_norm));
  m.impl("row_norm_backward", TORCH_BOX(&RowNorms<Backend>::row_norm_backward));
}

}  // namespace
}  // namespace fusedtrain
