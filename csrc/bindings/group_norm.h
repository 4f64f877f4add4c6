// Group norm, the same for every backend: batch norm's loops over one or all samples, and between
// them what is computed of vectors.
#pragma once

#include "../ops/group_norm.h"
#include "batch_norm.h"

namespace fusedtrain {
namespace {

template <class Backend>
struct GroupNorms {
  using Norms = BatchNormOps<Backend>;
  using MaybeTensor = std::optional<Tensor>;
  using ScalarType = torch::headeronly::ScalarType;

  // A call in parts: of a sample, or of all where the channels of a sample follow each other in
  // memory. Its vectors are [samples, channels]; n and g are those of the first part.
  struct Call : Norms::Call {
    using Norms::Call::n, Norms::Call::x, Norms::Call::wide;
    const char* op;
    GroupNorm g = {};
    int64_t samples;

    Call(const char* op, const Tensor& input, int64_t groups, const MaybeTensor& weight,
         const MaybeTensor& bias, const MaybeTensor& scale, const MaybeTensor& shift,
         int64_t activation, double a, double b)
        : Norms::Call(input, {}, {}, {}, activation, a, b, true), op(op), samples(x.size(0)) {
      this->check_device(input, "input");
      g.dtype = n.dtype;
      g.groups = groups;
      g.channels = n.channels;
      STD_TORCH_CHECK(groups > 0 && g.channels % groups == 0, "fusedtrain::", op,
                      ": num_groups must divide the channels");
      STD_TORCH_CHECK(
          !weight.has_value() || !bias.has_value() || weight->scalar_type() == bias->scalar_type(),
          "fusedtrain::", op, ": weight and bias must have one dtype");
      for (const MaybeTensor* t : {&weight, &bias})
        if (t->has_value()) g.wide_affine = (*t)->scalar_type() != x.scalar_type();
      const ScalarType dtype = g.wide_affine ? wide : x.scalar_type();
      g.weight = values(weight, "weight", 1, g.channels, dtype);
      g.bias = values(bias, "bias", 1, g.channels, dtype);
      g.scale = values(scale, "scale", 2, samples * g.channels, x.scalar_type());
      g.shift = values(shift, "shift", 2, samples * g.channels, x.scalar_type());
      n.x = read_data(x);
      const bool planes = n.rows == samples;
      g.samples = planes ? samples : 1;
      n.rows = planes || samples == 0 ? 1 : n.rows / samples;
      n.rows_a_sample = n.rows;
      n.channels *= g.samples;
    }

    const void* values(const MaybeTensor& t, const char* name, int64_t dims, int64_t size,
                       ScalarType dtype) {
      if (!t.has_value()) return nullptr;
      check_device<Backend>(op, name, *t, x);
      STD_TORCH_CHECK(t->scalar_type() == dtype, "fusedtrain::", op, ": ", name,
                      " must have the dtype of input, or weight and bias that of its math");
      STD_TORCH_CHECK(
          t->dim() == dims && t->numel() == size && (dims != 2 || t->size(0) == samples),
          "fusedtrain::", op, ": ", name, " must have ", size, " elements");
      this->kept.push_back(in_order(*t));
      return read_data(this->kept.back());
    }
    Tensor new_vectors() const {
      return Backend::prepared(new_contiguous(x, {4, samples, g.channels}, wide));
    }
    const void* vectors_of(const Tensor& t) {
      STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == 4 && t.size(1) == samples, "fusedtrain::", op,
                      ": vectors must be [4, N, C]");
      return values(t, "vectors", 3, 4 * samples * g.channels, wide);
    }
    void use(const void* vectors) {
      const auto row = [&](int64_t i) {
        return const_cast<void*>(after(vectors, i * samples * g.channels, wide));
      };
      n.mean = row(0);
      n.invstd = row(1);
      n.weight = row(2);
      n.bias = row(3);
    }

    // Calls f(n, g, elements before it, values of vectors before it) of each part.
    template <class F>
    void each_part(const F& f) const {
      for (int64_t sample = 0; sample < samples; sample += g.samples) {
        BatchNorm part = n;
        GroupNorm of_part = g;
        const int64_t elements = sample * (x.numel() / samples), values = sample * g.channels;
        part.x = after(n.x, elements, x.scalar_type());
        part.mean = after(n.mean, values, wide);
        part.invstd = after(n.invstd, values, wide);
        part.weight = after(n.weight, values, wide);
        part.bias = after(n.bias, values, wide);
        of_part.scale = after(g.scale, values, x.scalar_type());
        of_part.shift = after(g.shift, values, x.scalar_type());
        f(part, of_part, elements, values);
      }
    }
    template <class P>
    static P* after(P* data, int64_t elements, ScalarType dtype) {
      using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
      const int64_t size = dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2;
      return data == nullptr ? nullptr : static_cast<Byte*>(data) + elements * size;
    }
    Tensor new_doubles(int64_t rows, int64_t columns) const {
      return new_matrix<Backend>(x, rows, columns, ScalarType::Double);
    }
  };
  static double* doubles_of(const Tensor& t) { return static_cast<double*>(write_data(t)); }

  static std::tuple<Tensor, Tensor> forward(const Tensor& input, int64_t groups, MaybeTensor weight,
                                            MaybeTensor bias, MaybeTensor scale, MaybeTensor shift,
                                            double eps, int64_t activation, double a, double b) {
    Call call("group_norm_act", input, groups, weight, bias, scale, shift, activation, a, b);
    Tensor output = new_output<Backend>(call.x), vectors = call.new_vectors();
    if (input.numel() == 0) {
      torch::stable::zero_(vectors);
      return {output, vectors};
    }
    call.use(write_data(vectors));
    const Tensor statistics = call.new_doubles(2, call.n.channels);
    BatchNormStatistics s = {};
    s.average = doubles_of(statistics);
    s.variance = s.average + call.n.channels;
    void* y = write_data(output);
    const Backend backend(input);
    call.each_part([&](const BatchNorm& n, const GroupNorm& g, int64_t elements, int64_t) {
      BatchNorm only = n;
      only.mean = nullptr;
      backend.statistics(only, s);
      backend.run(GroupNormVectors{g, eps, s.average, s.variance, n.mean, n.invstd,
                                   const_cast<void*>(n.weight), const_cast<void*>(n.bias)});
      backend.normalise(n, {nullptr, Call::after(y, elements, call.x.scalar_type())});
    });
    return {call.result(output), vectors};
  }

  static Tensor apply(const Tensor& input, Tensor vectors, int64_t activation, double a, double b) {
    Call call("group_norm_act_apply", input, 1, {}, {}, {}, {}, activation, a, b);
    call.use(call.vectors_of(vectors));
    Tensor output = new_output<Backend>(call.x);
    if (input.numel() == 0) return output;
    void* y = write_data(output);
    const Backend backend(input);
    call.each_part([&](const BatchNorm& n, const GroupNorm&, int64_t elements, int64_t) {
      backend.normalise(n, {nullptr, Call::after(y, elements, call.x.scalar_type())});
    });
    return call.result(output);
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
      const Tensor& grad, const Tensor& input, int64_t groups, MaybeTensor weight, MaybeTensor bias,
      MaybeTensor scale, MaybeTensor shift, Tensor vectors, int64_t activation, double a, double b,
      bool needs_input, bool needs_weight, bool needs_bias, bool needs_scale, bool needs_shift) {
    const char* op = "group_norm_act_backward";
    Call call(op, input, groups, weight, bias, scale, shift, activation, a, b);
    call.use(call.vectors_of(vectors));
    const void* of_output = call.companion(grad, "grad");
    const Tensor& x = call.x;
    const auto new_gradient = [&](const MaybeTensor& t, bool needed) {
      if (!needed || !t.has_value()) return call.none();
      return Backend::prepared(new_contiguous(x, t->sizes(), t->scalar_type()));
    };
    Tensor results[] = {new_gradient(weight, needs_weight), new_gradient(bias, needs_bias),
                        new_gradient(scale, needs_scale), new_gradient(shift, needs_shift)};
    Tensor grad_input = needs_input ? new_output<Backend>(x) : call.none();
    if (input.numel() == 0) {
      for (Tensor& t : results) torch::stable::zero_(t);
      return {grad_input, results[0], results[1], results[2], results[3]};
    }
    const Tensor all_sums = call.new_doubles(call.samples, 2 * call.g.channels);
    const Tensor all_averages = call.new_doubles(needs_input ? 2 : 0, call.n.channels);
    const Tensor all_factors = call.new_vector(needs_input ? call.n.channels : 0);
    double *sums = doubles_of(all_sums), *averages = doubles_of(all_averages);
    void *factors = write_data(all_factors), *written = write_data(grad_input);
    const Backend backend(input);
    call.each_part([&](const BatchNorm& n, const GroupNorm& g, int64_t elements, int64_t values) {
      BatchNormBackward b = {};
      b.grad = Call::after(of_output, elements, x.scalar_type());
      b.sums = sums + 2 * values;
      void* to = needs_input ? Call::after(written, elements, x.scalar_type()) : nullptr;
      if (Backend::kStoresGradient && n.op >= 0) b.grad_residual = to;
      backend.reduce(n, b);
      if (!needs_input) return;
      backend.run(GroupNormAverages{g, n.weight, b.sums, averages, factors});
      BatchNorm last = n;
      last.weight = factors;
      b.ready = b.grad_residual;
      b.grad_residual = nullptr;
      b.grad_input = to;
      b.averages = averages;
      b.count = static_cast<double>(n.rows * n.inner);
      backend.grad_input(last, b);
    });
    void* to[4] = {};
    for (int i = 0; i < 4; ++i)
      if (results[i].numel() > 0) to[i] = write_data(results[i]);
    if (to[0] || to[1] || to[2] || to[3]) {
      GroupNorm all = call.g;
      all.samples = call.samples;
      backend.run(GroupNormGradients{all, call.g.samples, sums, to[0], to[1], to[2], to[3]});
    }
    return {call.result(grad_input), results[0], results[1], results[2], results[3]};
  }
};

FT_REGISTER(m) {
  m.impl("group_norm_act", TORCH_BOX(&GroupNorms<Backend>::forward));
  m.impl("group_norm_act_apply", TORCH_BOX(&GroupNorms<Backend>::apply));
  m.impl("group_norm_act_backward", TORCH_BOX(&GroupNorms<Backend>::backward));
}

}  // namespace
}  // namespace fusedtrain
