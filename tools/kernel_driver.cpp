// Runs kernels of the CPU without torch: the calls of tools/aarch64.py, on files of numbers.
//
//     kernel_driver CALLS NUMBERS RESULTS
//
// CALLS has a line a call. NUMBERS has its inputs one after the other, RESULTS gets its outputs.
#include <stdio.h>
#include <string.h>

#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "../csrc/cpu/dispatch.h"
#include "../csrc/ops/batch_norm.h"
#include "../csrc/ops/optimizers.h"
#include "../csrc/ops/pointwise.h"

using namespace fusedtrain;

namespace {

using Bytes = std::vector<char>;

std::ifstream numbers;
std::ofstream results;

Bytes read(int64_t bytes) {
  Bytes data(static_cast<size_t>(bytes));
  numbers.read(data.data(), bytes);
  if (!numbers) throw std::runtime_error("NUMBERS is too short");
  return data;
}
// NaN in all of its elements, until a kernel writes them.
Bytes fresh(int64_t bytes) { return Bytes(static_cast<size_t>(bytes), char(0xff)); }
void write(const Bytes& data) { results.write(data.data(), int64_t(data.size())); }

// In pieces of an odd size, the last first, as threads may take them.
const Parallel kPieces{[](int64_t n, int64_t grain, const void* state, Parallel::Part part) {
  const int64_t each = grain + 3, last = (n - 1) / each;
  for (int64_t k = last; k >= 0; --k) part(state, k * each, k == last ? n : (k + 1) * each);
}};

// pointwise OP DTYPE N PARAMETER PARAMETER: x, grad -> y, grad_input
void pointwise(std::istream& line) {
  int op, dtype;
  int64_t n;
  double p[kMaxParameters];
  line >> op >> dtype >> n >> p[0] >> p[1];
  const int64_t sizes[] = {4, 8, 2, 2};
  const int64_t bytes = n * sizes[dtype];
  const Bytes x = read(bytes), grad = read(bytes);
  Bytes y = fresh(bytes), grad_input = fresh(bytes);
  const Dtype type = static_cast<Dtype>(dtype);
  cpu::compute(PointwiseForward{op, type, x.data(), y.data(), {p[0], p[1]}}, n, kPieces);
  const void* saved = cpu::takes_output(op) ? y.data() : x.data();
  cpu::compute(PointwiseBackward{op, type, grad.data(), saved, grad_input.data(), {p[0], p[1]}}, n,
               kPieces);
  write(y);
  write(grad_input);
}

// batch_norm OP ROWS CHANNELS INNER: x, grad, weight, bias -> y, grad_input, their gradients
void batch_norm(std::istream& line) {
  BatchNorm n{};
  line >> n.op >> n.rows >> n.channels >> n.inner;
  n.dtype = Dtype::kFloat32;
  n.rows_a_sample = 1;
  const int64_t bytes = 4 * n.rows * n.channels * n.inner, vector = 4 * n.channels;
  const Bytes x = read(bytes), grad = read(bytes), weight = read(vector), bias = read(vector);
  Bytes mean = fresh(vector), invstd = fresh(vector), y = fresh(bytes), grad_input = fresh(bytes);
  Bytes grad_weight = fresh(vector), grad_bias = fresh(vector);
  n.x = x.data(), n.weight = weight.data(), n.bias = bias.data();
  n.mean = mean.data(), n.invstd = invstd.data();
  std::vector<double> average(n.channels), variance(n.channels), sums(2 * n.channels);
  cpu::statistics(n, {average.data(), variance.data(), nullptr, nullptr, 0.1, 1e-5}, kPieces);
  cpu::normalise(n, {nullptr, y.data()}, kPieces);
  BatchNormBackward b{};
  b.grad = grad.data(), b.grad_input = grad_input.data(), b.sums = sums.data();
  b.saved = cpu::takes_output(n.op) ? y.data() : nullptr;
  b.grad_weight = grad_weight.data(), b.grad_bias = grad_bias.data();
  b.averages = sums.data(), b.count = double(n.rows * n.inner);
  cpu::backward(n, b, kPieces);
  for (const Bytes* out : {&y, &grad_input, &grad_weight, &grad_bias}) write(*out);
}

// adamw N STEPS LR WEIGHT_DECAY: parameters, gradients of each step -> parameters
void adamw(std::istream& line) {
  int64_t n;
  int steps;
  OptionGroup group{};
  line >> n >> steps >> group.lr >> group.weight_decay;
  group.lr_index = -1, group.sign = 1;
  const double options[] = {0.9, 0.999, 1e-8, 1, 0};  // decoupled, with bias correction
  memcpy(group.option, options, sizeof options);
  Bytes param = read(4 * n), first(size_t(4 * n)), second(size_t(4 * n));
  const StepOptions step{};
  float scalars[kTensorScalars] = {}, control[kControls] = {};
  double sums[kTensorSums] = {}, trial_sums[kTrialSums] = {};
  for (int k = 0; k < steps; ++k) {
    Bytes grad = read(4 * n);
    OptimizerTensor tensor{};
    tensor.param = param.data(), tensor.grad = grad.data();
    tensor.state[0] = first.data(), tensor.state[1] = second.data();
    tensor.numel = tensor.inner = n, tensor.units = 1;
    OptimizerCall call{};
    call.rule = 2, call.states = 2, call.count = 1, call.tensors = &tensor;
    call.group_count = 1, call.groups = &group, call.options = &step;
    call.scalar_count = 1, call.scalars = scalars, call.control = control;
    call.sums = sums, call.trial_sums = trial_sums;
    cpu::optimizer_step(call, false, false, kPieces);
  }
  write(param);
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return 2;
  std::ifstream calls(words[1]);
  numbers.open(words[2], std::ios::binary);
  results.open(words[3], std::ios::binary);
  for (std::string text; std::getline(calls, text);) {
    std::istringstream line(text);
    std::string name;
    line >> name;
    if (name == "pointwise") pointwise(line);
    if (name == "batch_norm") batch_norm(line);
    if (name == "adamw") adamw(line);
    if (!line) throw std::runtime_error("a bad line: " + text);
  }
  std::cout << cpu::capability() << std::endl;
  return results.good() ? 0 : 1;
}
