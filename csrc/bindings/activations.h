// Bindings of activations for all backends: check, lay out, allocate and run a call.
//
// A Backend is made for one call, on the device of a tensor, and has
//   static Tensor prepared(Tensor output);                    fresh memory, made ready
//   static bool on_device(const Tensor&);                     whether its kernels can take it
//   void pointwise(const Call&, int64_t n) const;             ops/pointwise.h, every element
#pragma once

#include "../formulas.h"
#include "../ops/pointwise.h"
#include "checks.h"

namespace fusedtrain {
namespace {

#define FT_ENUM(name, ...) op_##name,
enum PointwiseOp { FT_POINTWISE(FT_ENUM) };
#undef FT_ENUM
#define FT_NAME(name, ...) #name,
constexpr const char* kPointwiseNames[] = {FT_POINTWISE(FT_NAME)};
#undef FT_NAME
#define FT_TAKES(name, Formula, n, rounds, saved) saved == kOutput,
constexpr bool kTakesOutput[] = {FT_POINTWISE(FT_TAKES)};
#undef FT_TAKES

// Checks an op's activation where the op takes it by its number.
inline void check_activation(const char* op, int64_t activation) {
  constexpr int64_t kOps = sizeof kPointwiseNames / sizeof *kPointwiseNames;
  STD_TORCH_CHECK(activation >= -1 && activation < kOps, "fusedtrain::", op,
                  ": activation must be from -1 to ", kOps - 1);
}

template <class Backend>
struct Activations {
  static Tensor forward(int op, const Tensor& input, double a = 0, double b = 0) {
    const Dtype dtype = dtype_of(input, kPointwiseNames[op], "input");
    const Backend backend(input);
    Tensor output = new_output<Backend>(input);
    // empty_like keeps the strides of a dense input. Another one is copied first, and then the
    // output is worked on in place.
    const bool copied = !is_dense(input);
    if (copied) torch::stable::copy_(output, input);
    const void* x = read_data(copied ? output : input);
    backend.run(PointwiseForward{op, dtype, x, write_data(output), {a, b}}, input.numel());
    return output;
  }

  static void forward_inplace(int op, Tensor input, double a = 0, double b = 0) {
    const Dtype dtype = dtype_of(input, kPointwiseNames[op], "input");
    const Backend backend(input);
    // Strided: by way of a dense copy. copy_ refuses to write to memory that elements share.
    Tensor work = dense(input);
    backend.run(PointwiseForward{op, dtype, read_data(work), write_data(work), {a, b}},
                input.numel());
    if (work.const_data_ptr() != input.const_data_ptr()) torch::stable::copy_(input, work);
  }

  static Tensor backward(int op, const Tensor& grad, const Tensor& saved, double a = 0,
                         double b = 0) {
    const char* name = kPointwiseNames[op];
    const Dtype dtype = dtype_of(saved, name, "saved");
    check_same(grad, saved, name, "grad", "saved");
    const Backend backend(saved);
    Tensor grad_input = new_output<Backend>(saved);
    const Tensor s = dense_like(saved, grad_input), g = dense_like(grad, grad_input);
    backend.run(
        PointwiseBackward{op, dtype, read_data(g), read_data(s), write_data(grad_input), {a, b}},
        saved.numel());
    return grad_input;
  }

  // One set of functions for each number of float parameters.
  template <int op>
  static Tensor forward0(Tensor x) {
    return forward(op, x);
  }
  template <int op>
  static Tensor forward1(Tensor x, double a) {
    return forward(op, x, a);
  }
  template <int op>
  static Tensor forward2(Tensor x, double a, double b) {
    return forward(op, x, a, b);
  }
  template <int op>
  static void inplace0(Tensor x) {
    forward_inplace(op, x);
  }
  template <int op>
  static void inplace1(Tensor x, double a) {
    forward_inplace(op, x, a);
  }
  template <int op>
  static void inplace2(Tensor x, double a, double b) {
    forward_inplace(op, x, a, b);
  }
  template <int op>
  static Tensor backward0(Tensor g, Tensor s) {
    return backward(op, g, s);
  }
  template <int op>
  static Tensor backward1(Tensor g, Tensor s, double a) {
    return backward(op, g, s, a);
  }
  template <int op>
  static Tensor backward2(Tensor g, Tensor s, double a, double b) {
    return backward(op, g, s, a, b);
  }
};

// Inside STABLE_TORCH_LIBRARY_IMPL(..., m), where Pointwise is Activations<the backend>.
FT_REGISTER(m) {
  using Ops = Activations<Backend>;
#define FT_IMPL(name, Formula, n, ...)                                \
  m.impl(#name, TORCH_BOX(&Ops::forward##n<op_##name>));              \
  m.impl(#name "_", TORCH_BOX(&Ops::inplace##n<op_##name>));          \
  m.impl(#name "_backward", TORCH_BOX(&Ops::backward##n<op_##name>));
  FT_POINTWISE(FT_IMPL)
#undef FT_IMPL
}

}  // namespace
}  // namespace fusedtrain
