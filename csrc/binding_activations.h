// What the bindings of all backends do with a call of an activation: check, lay out, allocate, run.
//
// A Backend is made for one call, on the device of a tensor, and has
//   static Tensor new_output(const Tensor& model);            fresh memory, as empty_like
//   static bool on_device(const Tensor&);                     whether its kernels can take it
//   void pointwise(const Call&, int64_t n) const;             ops.h, every element
//   void channelwise(const ChannelwiseForward&) const;
//   void channelwise(ChannelwiseBackward, Tensor* const* gradients) const;  one for each parameter
#pragma once

#include "checks.h"
#include "formulas.h"

#include <tuple>

namespace fusedtrain {
namespace {

#define FT_ENUM(name, ...) op_##name,
enum PointwiseOp { FT_POINTWISE(FT_ENUM) };
enum ChannelwiseOp { FT_CHANNELWISE(FT_ENUM) };
#undef FT_ENUM
#define FT_NAME(name, ...) #name,
constexpr const char* kPointwiseNames[] = {FT_POINTWISE(FT_NAME)};
constexpr const char* kChannelwiseNames[] = {FT_CHANNELWISE(FT_NAME)};
#undef FT_NAME

template <class Backend>
struct Activations {
  static Tensor forward(int op, const Tensor& input, double a = 0, double b = 0) {
    const Dtype dtype = dtype_of(input, kPointwiseNames[op], "input");
    const Backend backend(input);
    Tensor output = Backend::new_output(input);
    // empty_like keeps the strides of a dense input. Another one is copied first, and then the
    // output is worked on in place.
    const bool copied = !is_dense(input);
    if (copied) torch::stable::copy_(output, input);
    const void* x = read_data(copied ? output : input);
    backend.pointwise(PointwiseForward{op, dtype, x, write_data(output), {a, b}}, input.numel());
    return output;
  }

  static void forward_inplace(int op, Tensor input, double a = 0, double b = 0) {
    const Dtype dtype = dtype_of(input, kPointwiseNames[op], "input");
    const Backend backend(input);
    // Strided: by way of a dense copy. copy_ refuses to write to memory that elements share.
    Tensor work = dense(input);
    backend.pointwise(PointwiseForward{op, dtype, read_data(work), write_data(work), {a, b}},
                      input.numel());
    if (work.const_data_ptr() != input.const_data_ptr()) torch::stable::copy_(input, work);
  }

  static Tensor backward(int op, const Tensor& grad, const Tensor& saved, double a = 0,
                         double b = 0) {
    const char* name = kPointwiseNames[op];
    const Dtype dtype = dtype_of(saved, name, "saved");
    check_same(grad, saved, name, "grad", "saved");
    const Backend backend(saved);
    Tensor grad_input = Backend::new_output(saved);
    const Tensor s = dense_like(saved, grad_input), g = dense_like(grad, grad_input);
    backend.pointwise(
        PointwiseBackward{op, dtype, read_data(g), read_data(s), write_data(grad_input), {a, b}},
        saved.numel());
    return grad_input;
  }

  // Checks input and parameters; gives the input in a layout whose channels can be walked.
  struct ChannelArguments {
    Dtype dtype;
    Tensor input, a, b;
    ChannelView view;
  };
  static ChannelArguments channel_arguments(int op, const Tensor& input, const Tensor& a,
                                            const Tensor& b) {
    const char* name = kChannelwiseNames[op];
    const Dtype dtype = dtype_of(input, name, "input");
    const int64_t n = a.numel();
    const int64_t channels = input.dim() < 2 ? 1 : input.size(1);
    STD_TORCH_CHECK(n == 1 || n == channels, "fusedtrain::", name,
                    ": the parameter must have one element or one for each of the ", channels,
                    " channels, not ", n);
    STD_TORCH_CHECK(b.numel() == n, "fusedtrain::", name, ": parameters must have the same size");
    STD_TORCH_CHECK(
        a.scalar_type() == input.scalar_type() && b.scalar_type() == input.scalar_type(),
        "fusedtrain::", name, ": parameters must have the dtype of the input");
    STD_TORCH_CHECK(Backend::on_device(a) && Backend::on_device(b) && same_device(a, input) &&
                        same_device(b, input),
                    "fusedtrain::", name, ": parameters must be on the device of the input");
    const Tensor x = dense(input);
    return {dtype, x, torch::stable::contiguous(a), torch::stable::contiguous(b),
            channel_view(x, n == 1)};
  }

  static void check_device(int op, const Tensor& input) {
    STD_TORCH_CHECK(Backend::on_device(input), "fusedtrain::", kChannelwiseNames[op],
                    ": input must be on the device of the parameters");
  }

  static Tensor channel_forward(int op, const Tensor& input, const Tensor& a, const Tensor& b) {
    check_device(op, input);
    const Backend backend(input);
    const ChannelArguments args = channel_arguments(op, input, a, b);
    Tensor output = Backend::new_output(args.input);
    backend.channelwise(ChannelwiseForward{op,
                                           args.dtype,
                                           args.view.rows,
                                           args.view.channels,
                                           args.view.inner,
                                           read_data(args.input),
                                           write_data(output),
                                           {read_data(args.a), read_data(args.b)}});
    return output;
  }

  static std::tuple<Tensor, Tensor, Tensor> channel_backward(int op, const Tensor& grad,
                                                             const Tensor& input, const Tensor& a,
                                                             const Tensor& b, int parameters) {
    check_same(grad, input, kChannelwiseNames[op], "grad", "input");
    check_device(op, input);
    const Backend backend(input);
    const ChannelArguments args = channel_arguments(op, input, a, b);
    Tensor grad_input = Backend::new_output(args.input);
    const Tensor g = dense_like(grad, args.input);
    Tensor grad_a = torch::stable::empty_like(args.a);
    Tensor grad_b = parameters > 1 ? torch::stable::empty_like(args.b) : grad_a;
    if (input.numel() == 0) {
      torch::stable::zero_(grad_a);
      torch::stable::zero_(grad_b);
      return {grad_input, grad_a, grad_b};
    }
    Tensor* const gradients[] = {&grad_a, parameters > 1 ? &grad_b : nullptr};
    backend.channelwise(ChannelwiseBackward{op,
                                            args.dtype,
                                            args.view.rows,
                                            args.view.channels,
                                            args.view.inner,
                                            read_data(g),
                                            read_data(args.input),
                                            write_data(grad_input),
                                            {read_data(args.a), read_data(args.b)},
                                            parameters,
                                            nullptr},
                        gradients);
    return {grad_input, grad_a, grad_b};
  }

  // One set of functions for each number of float parameters, ...
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
  // ... and of parameter tensors.
  template <int op>
  static Tensor channel_forward1(Tensor x, Tensor a) {
    return channel_forward(op, x, a, a);
  }
  template <int op>
  static Tensor channel_forward2(Tensor x, Tensor a, Tensor b) {
    return channel_forward(op, x, a, b);
  }
  template <int op>
  static std::tuple<Tensor, Tensor> channel_backward1(Tensor g, Tensor x, Tensor a) {
    auto [gx, ga, gb] = channel_backward(op, g, x, a, a, 1);
    return {gx, ga};
  }
  template <int op>
  static std::tuple<Tensor, Tensor, Tensor> channel_backward2(Tensor g, Tensor x, Tensor a,
                                                              Tensor b) {
    return channel_backward(op, g, x, a, b, 2);
  }
};

// Inside STABLE_TORCH_LIBRARY_IMPL(..., m), where Ops is Activations<the backend>.
#define FT_IMPLEMENT_POINTWISE(name, Formula, n, ...)                 \
  m.impl(#name, TORCH_BOX(&Ops::forward##n<op_##name>));              \
  m.impl(#name "_", TORCH_BOX(&Ops::inplace##n<op_##name>));          \
  m.impl(#name "_backward", TORCH_BOX(&Ops::backward##n<op_##name>));
#define FT_IMPLEMENT_CHANNELWISE(name, Formula, n)                            \
  m.impl(#name, TORCH_BOX(&Ops::channel_forward##n<op_##name>));              \
  m.impl(#name "_backward", TORCH_BOX(&Ops::channel_backward##n<op_##name>));

}  // namespace
}  // namespace fusedtrain
