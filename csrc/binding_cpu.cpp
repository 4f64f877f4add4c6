// torch::stable tensors -> cpu entry points of ops.h. Schemas are defined in fusedtrain/_ops.py.
#include "checks.h"
#include "formulas.h"

#include <tuple>
#include <vector>

namespace fusedtrain {
namespace {

// Elements a thread takes at least; torch's own pointwise kernels use the same number.
constexpr int64_t kGrain = 32768;

#define FT_ENUM(name, ...) op_##name,
enum PointwiseOp { FT_POINTWISE(FT_ENUM) };
enum ChannelwiseOp { FT_CHANNELWISE(FT_ENUM) };
#define FT_NAME(name, ...) #name,
constexpr const char* kPointwiseNames[] = {FT_POINTWISE(FT_NAME)};
constexpr const char* kChannelwiseNames[] = {FT_CHANNELWISE(FT_NAME)};

Tensor new_output(const Tensor& model) {
  Tensor output = torch::stable::empty_like(model);
  cpu::prepare_output(output.mutable_data_ptr(), output.numel() * output.element_size());
  return output;
}

template <class Call>
void run_pointwise(const Call& call, int64_t n) {
  if (n <= kGrain) {
    cpu::pointwise(call, 0, n);
    return;
  }
  torch::stable::parallel_for(
      0, n, kGrain, [&](int64_t begin, int64_t end) { cpu::pointwise(call, begin, end); });
}

Tensor forward(int op, const Tensor& input, double a = 0, double b = 0) {
  const Dtype dtype = dtype_of(input, kPointwiseNames[op], "input");
  Tensor output = new_output(input);
  const void* x = input.const_data_ptr();
  if (!is_dense(input)) {
    torch::stable::copy_(output, input);
    x = output.const_data_ptr();
  }
  run_pointwise(PointwiseForward{op, dtype, x, output.mutable_data_ptr(), {a, b}}, input.numel());
  return output;
}

void forward_inplace(int op, Tensor input, double a = 0, double b = 0) {
  const Dtype dtype = dtype_of(input, kPointwiseNames[op], "input");
  // Strided: by way of a dense copy. copy_ refuses to write to memory that several elements share.
  Tensor work = dense(input);
  run_pointwise(PointwiseForward{op, dtype, work.const_data_ptr(), work.mutable_data_ptr(), {a, b}},
                input.numel());
  if (work.const_data_ptr() != input.const_data_ptr()) torch::stable::copy_(input, work);
}

Tensor backward(int op, const Tensor& grad, const Tensor& saved, double a = 0, double b = 0) {
  const char* name = kPointwiseNames[op];
  const Dtype dtype = dtype_of(saved, name, "saved");
  check_same(grad, saved, name, "grad", "saved");
  Tensor grad_input = new_output(saved);
  const Tensor s = dense_like(saved, grad_input), g = dense_like(grad, grad_input);
  run_pointwise(
      PointwiseBackward{
          op, dtype, g.const_data_ptr(), s.const_data_ptr(), grad_input.mutable_data_ptr(), {a, b}},
      saved.numel());
  return grad_input;
}

// One set of functions for each number of float parameters.
template <int op>
Tensor forward0(Tensor x) {
  return forward(op, x);
}
template <int op>
Tensor forward1(Tensor x, double a) {
  return forward(op, x, a);
}
template <int op>
Tensor forward2(Tensor x, double a, double b) {
  return forward(op, x, a, b);
}
template <int op>
void inplace0(Tensor x) {
  forward_inplace(op, x);
}
template <int op>
void inplace1(Tensor x, double a) {
  forward_inplace(op, x, a);
}
template <int op>
void inplace2(Tensor x, double a, double b) {
  forward_inplace(op, x, a, b);
}
template <int op>
Tensor backward0(Tensor g, Tensor s) {
  return backward(op, g, s);
}
template <int op>
Tensor backward1(Tensor g, Tensor s, double a) {
  return backward(op, g, s, a);
}
template <int op>
Tensor backward2(Tensor g, Tensor s, double a, double b) {
  return backward(op, g, s, a, b);
}

template <class Call>
void run_channelwise(const Call& call) {
  const int64_t tasks = cpu::channelwise_tasks(call.rows, call.channels, call.inner);
  torch::stable::parallel_for(
      0, tasks, 2, [&](int64_t first, int64_t last) { cpu::channelwise(call, first, last); });
}

// Checks input and parameters; gives the input in a layout whose channels can be walked.
struct ChannelArguments {
  Dtype dtype;
  Tensor input, a, b;
  ChannelView view;
};
ChannelArguments channel_arguments(int op, const Tensor& input, const Tensor& a, const Tensor& b) {
  const char* name = kChannelwiseNames[op];
  const Dtype dtype = dtype_of(input, name, "input");
  const int64_t n = a.numel();
  const int64_t channels = input.dim() < 2 ? 1 : input.size(1);
  STD_TORCH_CHECK(n == 1 || n == channels, "fusedtrain::", name,
                  ": the parameter must have one element or one for each of the ", channels,
                  " channels, not ", n);
  STD_TORCH_CHECK(b.numel() == n, "fusedtrain::", name, ": parameters must have the same size");
  STD_TORCH_CHECK(a.scalar_type() == input.scalar_type() && b.scalar_type() == input.scalar_type(),
                  "fusedtrain::", name, ": parameters must have the dtype of the input");
  STD_TORCH_CHECK(a.is_cpu() && b.is_cpu(), "fusedtrain::", name,
                  ": parameters must be on the device of the input");
  const Tensor x = dense(input);
  return {dtype, x, torch::stable::contiguous(a), torch::stable::contiguous(b),
          *channel_view(x, n == 1)};
}

Tensor channel_forward(int op, const Tensor& input, const Tensor& a, const Tensor& b) {
  const ChannelArguments args = channel_arguments(op, input, a, b);
  Tensor output = new_output(args.input);
  run_channelwise(ChannelwiseForward{op,
                                     args.dtype,
                                     args.view.rows,
                                     args.view.channels,
                                     args.view.inner,
                                     args.input.const_data_ptr(),
                                     output.mutable_data_ptr(),
                                     {args.a.const_data_ptr(), args.b.const_data_ptr()}});
  return output;
}

Tensor parameter_gradient(const ChannelwiseBackward& call, int which, const Tensor& parameter) {
  Tensor gradient = torch::stable::empty_like(parameter);
  std::vector<int64_t> sizes(parameter.sizes().begin(), parameter.sizes().end());
  Tensor sums = torch::stable::empty(sizes, torch::headeronly::ScalarType::Double);
  torch::stable::zero_(sums);
  // An empty input is seen as one channel, whatever the number of values of the parameter.
  if (call.rows * call.channels * call.inner > 0)
    cpu::add_shares(call, which, static_cast<double*>(sums.mutable_data_ptr()));
  torch::stable::copy_(gradient, sums);
  return gradient;
}

std::tuple<Tensor, Tensor, Tensor> channel_backward(int op, const Tensor& grad, const Tensor& input,
                                                    const Tensor& a, const Tensor& b) {
  check_same(grad, input, kChannelwiseNames[op], "grad", "input");
  const ChannelArguments args = channel_arguments(op, input, a, b);
  Tensor grad_input = new_output(args.input);
  const Tensor g = dense_like(grad, args.input);
  std::vector<double> shares(
      cpu::channelwise_shares(args.view.rows, args.view.channels, args.view.inner), 0.0);
  const ChannelwiseBackward call{op,
                                 args.dtype,
                                 args.view.rows,
                                 args.view.channels,
                                 args.view.inner,
                                 g.const_data_ptr(),
                                 args.input.const_data_ptr(),
                                 grad_input.mutable_data_ptr(),
                                 {args.a.const_data_ptr(), args.b.const_data_ptr()},
                                 shares.data()};
  run_channelwise(call);
  const Tensor grad_a = parameter_gradient(call, 0, args.a);
  const Tensor grad_b = parameter_gradient(call, 1, args.b);
  return {grad_input, grad_a, grad_b};
}

template <int op>
Tensor channel_forward1(Tensor x, Tensor a) {
  return channel_forward(op, x, a, a);
}
template <int op>
Tensor channel_forward2(Tensor x, Tensor a, Tensor b) {
  return channel_forward(op, x, a, b);
}
template <int op>
std::tuple<Tensor, Tensor> channel_backward1(Tensor g, Tensor x, Tensor a) {
  auto [gx, ga, gb] = channel_backward(op, g, x, a, a);
  return {gx, ga};
}
template <int op>
std::tuple<Tensor, Tensor, Tensor> channel_backward2(Tensor g, Tensor x, Tensor a, Tensor b) {
  return channel_backward(op, g, x, a, b);
}

}  // namespace
}  // namespace fusedtrain

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) {
  using namespace fusedtrain;
#define FT_REGISTER(name, Formula, n, rounds)                    \
  m.impl(#name, TORCH_BOX(&forward##n<op_##name>));              \
  m.impl(#name "_", TORCH_BOX(&inplace##n<op_##name>));          \
  m.impl(#name "_backward", TORCH_BOX(&backward##n<op_##name>));
  FT_POINTWISE(FT_REGISTER)
#define FT_REGISTER_CHANNELWISE(name, Formula, n)                        \
  m.impl(#name, TORCH_BOX(&channel_forward##n<op_##name>));              \
  m.impl(#name "_backward", TORCH_BOX(&channel_backward##n<op_##name>));
  FT_CHANNELWISE(FT_REGISTER_CHANNELWISE)
}
