// Activations with a parameter for each channel, the same for every backend: check, lay out,
// allocate, run.
#pragma once

#include "../channelwise_formulas.h"
#include "../ops/channelwise.h"
#include "checks.h"

#include <tuple>

namespace fusedtrain {
namespace {

#define FT_ENUM(name, ...) op_##name,
enum ChannelwiseOp { FT_CHANNELWISE(FT_ENUM) };
#undef FT_ENUM
#define FT_NAME(name, ...) #name,
constexpr const char* kChannelwiseNames[] = {FT_CHANNELWISE(FT_NAME)};
#undef FT_NAME

template <class Backend>
struct ChannelwiseActivations {
  // Checks input and parameters; gives the input in a layout whose channels can be walked.
  struct Arguments {
    Dtype dtype;
    Tensor input, a, b;
    ChannelView view;
  };
  static Arguments arguments(int op, const Tensor& input, const Tensor& a, const Tensor& b) {
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

  static Tensor forward(int op, const Tensor& input, const Tensor& a, const Tensor& b) {
    check_device(op, input);
    const Backend backend(input);
    const Arguments args = arguments(op, input, a, b);
    Tensor output = new_output<Backend>(args.input);
    backend.run(ChannelwiseForward{op,
                                   args.dtype,
                                   args.view.rows,
                                   args.view.channels,
                                   args.view.inner,
                                   read_data(args.input),
                                   write_data(output),
                                   {read_data(args.a), read_data(args.b)}});
    return output;
  }

  static std::tuple<Tensor, Tensor, Tensor> backward(int op, const Tensor& grad,
                                                     const Tensor& input, const Tensor& a,
                                                     const Tensor& b, int parameters) {
    check_same(grad, input, kChannelwiseNames[op], "grad", "input");
    check_device(op, input);
    const Backend backend(input);
    const Arguments args = arguments(op, input, a, b);
    Tensor grad_input = new_output<Backend>(args.input);
    const Tensor g = dense_like(grad, args.input);
    Tensor grad_a = new_like(args.a);
    Tensor grad_b = parameters > 1 ? new_like(args.b) : grad_a;
    if (input.numel() == 0) {
      torch::stable::zero_(grad_a);
      torch::stable::zero_(grad_b);
      return {grad_input, grad_a, grad_b};
    }
    void* const to_a = write_data(grad_a);
    void* const to_b = parameters > 1 ? write_data(grad_b) : nullptr;
    backend.run(ChannelwiseBackward{op,
                                    args.dtype,
                                    args.view.rows,
                                    args.view.channels,
                                    args.view.inner,
                                    read_data(g),
                                    read_data(args.input),
                                    write_data(grad_input),
                                    {read_data(args.a), read_data(args.b)},
                                    parameters,
                                    {to_a, to_b},
                                    nullptr});
    return {grad_input, grad_a, grad_b};
  }

  // One set of functions for each number of parameter tensors.
  template <int op>
  static Tensor forward1(Tensor x, Tensor a) {
    return forward(op, x, a, a);
  }
  template <int op>
  static Tensor forward2(Tensor x, Tensor a, Tensor b) {
    return forward(op, x, a, b);
  }
  template <int op>
  static std::tuple<Tensor, Tensor> backward1(Tensor g, Tensor x, Tensor a) {
    auto [gx, ga, gb] = backward(op, g, x, a, a, 1);
    return {gx, ga};
  }
  template <int op>
  static std::tuple<Tensor, Tensor, Tensor> backward2(Tensor g, Tensor x, Tensor a, Tensor b) {
    return backward(op, g, x, a, b, 2);
  }
};

// Inside STABLE_TORCH_LIBRARY_IMPL(..., m), where Channelwise is ChannelwiseActivations<the
// backend>.
FT_REGISTER(m) {
  using Ops = ChannelwiseActivations<Backend>;
#define FT_IMPL(name, Formula, n)                                     \
  m.impl(#name, TORCH_BOX(&Ops::forward##n<op_##name>));              \
  m.impl(#name "_backward", TORCH_BOX(&Ops::backward##n<op_##name>));
  FT_CHANNELWISE(FT_IMPL)
#undef FT_IMPL
}

}  // namespace
}  // namespace fusedtrain
