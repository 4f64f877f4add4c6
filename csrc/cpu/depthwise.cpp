// Depthwise convolutions: how they are cut into tasks, and the sums of the tasks.
#include "../ops/depthwise.h"

#include <memory>

#include "dispatch.h"

namespace fusedtrain {
namespace cpu {
namespace {

constexpr int64_t kLaid = 32768;     // numbers that are laid out for a band: half of a small L2
constexpr int64_t kSummed = 32768;   // elements that are added up as floats
constexpr int64_t kTogether = 4096;  // elements of planes that are neighbours

int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a) { return ceil_div(a, 16) * 16; }

struct Plan {
  DepthwiseRoom room;
  DepthwiseCut cut;
  int64_t forward_tasks, backward_tasks, bytes;
};

// Rows of a band of which `slices` of `row` numbers each are laid out, as rows * by + more of them.
int64_t rows_of_band(int64_t rows, int64_t by, int64_t more, int64_t row) {
  const int64_t fit = (kLaid / larger(row, 1) - more) / by;
  if (fit >= rows) return rows;
  // In fours, of about the same size.
  const int64_t bands = ceil_div(rows, larger(fit, 4));
  return ceil_div(ceil_div(rows, bands), 4) * 4;
}

// A single output has no stride: one far beyond the input would take as much room.
template <class Call>
Call without_idle_strides(Call call) {
  for (int d = 0; d < 3; ++d)
    if (call.out[d] == 1) call.stride[d] = 1;
  return call;
}

Plan plan_for(const Depthwise& call, int64_t lanes, bool narrow) {
  Plan p = {};
  const int64_t unit = call.last ? kDepthwiseUnit : 1;
  const int64_t reach[3] = {(call.kernel[0] - 1) * call.dilation[0],
                            (call.kernel[1] - 1) * call.dilation[1],
                            (call.kernel[2] - 1) * call.dilation[2]};
  // Inputs of a band of outputs.
  const int64_t pitch = call.last ? ((call.out[2] - 1) * call.stride[2] + reach[2] + 1) * unit
                                  : call.stride[2] * (call.out[2] + reach[2] / call.stride[2]);
  const int64_t row = call.kernel[0] * pitch;
  const int64_t more = reach[1] + 1 - call.stride[1];
  p.cut.rows_of_outputs = rows_of_band(call.out[1], call.stride[1], more, row);
  // Gradients of outputs of a band of inputs.
  const int64_t grad_pitch = (ceil_div(call.in[2] + reach[2], call.stride[2]) + 1) * unit;
  const int64_t grad_row = call.kernel[0] * call.multiplier * grad_pitch;
  const int64_t grad_more = reach[1] / call.stride[1] + 2;
  const int64_t fit = rows_of_band(ceil_div(call.in[1], call.stride[1]), 1, grad_more, grad_row);
  p.cut.rows_of_inputs = smaller(call.in[1], fit * call.stride[1]);

  p.room.laid =
      round_up(larger(row * ((p.cut.rows_of_outputs - 1) * call.stride[1] + reach[1] + 1),
                      grad_row * (ceil_div(p.cut.rows_of_inputs, call.stride[1]) + grad_more)) +
               4 * lanes);
  const int64_t joined = call.stride[2] * ceil_div(call.in[2], call.stride[2]);
  p.room.values =
      round_up(larger(p.cut.rows_of_outputs * call.out[2] * unit,
                      joined * ceil_div(p.cut.rows_of_inputs, call.stride[1]) + call.in[2]) +
               2 * lanes);
  p.room.line = round_up(larger(narrow ? call.in[2] : 0, call.multiplier * call.taps()));
  p.room.weights = round_up(call.multiplier * call.taps() * unit);
  p.room.offsets = 2 * call.multiplier * call.taps();

  const int64_t units = call.last ? ceil_div(call.out_channels(), unit) : call.channels;
  p.forward_tasks =
      call.samples * units * call.out[0] * ceil_div(call.out[1], p.cut.rows_of_outputs);
  const int64_t outputs = larger(call.outputs(), 1);
  p.cut.samples = smaller(larger(call.samples, 1), larger(1, kSummed / outputs));
  p.cut.channels = call.last ? unit : smaller(16, larger(1, kTogether / outputs));
  p.cut.lanes =
      round_up(p.cut.channels * call.multiplier * (call.taps() + 1) * (call.last ? 1 : lanes));
  p.cut.sums = p.cut.channels * call.multiplier * (call.taps() + 1);
  p.backward_tasks =
      ceil_div(call.samples, p.cut.samples) * ceil_div(call.channels, p.cut.channels);
  const int64_t number = call.dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
  p.bytes = (p.cut.lanes + p.room.laid + p.room.values + p.room.line + p.room.weights) * number +
            p.room.offsets * 8;
  return p;
}

bool is_narrow(Dtype dtype) { return dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16; }

// Not set to anything; begins on a cache line.
struct Scratch {
  std::unique_ptr<char[]> all;
  explicit Scratch(int64_t bytes) : all(new char[bytes + 64]) {}
  void* get() const {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(all.get()) + 63) / 64 * 64);
  }
};

template <class S>
void write_number(S* to, double value, const Format*) {
  *to = S(value);
}
void write_number(uint16_t* to, double value, const Format* format) {
  const float number = float(value);
  format->store(&number, to, 1);
}

}  // namespace

void compute(const DepthwiseForward& asked, Parallel parallel) {
  const DepthwiseForward call = without_idle_strides(asked);
  if (call.samples == 0 || call.channels == 0 || call.outputs() == 0) return;
  by_dtype(call.dtype, kernels().depthwise, [&](const auto& k) {
    const Plan p = plan_for(call, k.lanes, is_narrow(call.dtype));
    const int64_t each = call.samples * call.out_channels() * call.outputs() / p.forward_tasks;
    in_parts(parallel, p.forward_tasks, ceil_div(kGrain / 8, each + 1),
             [&](int64_t first, int64_t last) {
               const Scratch scratch(p.bytes);
               k.forward(call, p.room, p.cut, first, last, scratch.get());
             });
  });
}

void compute(const DepthwiseBackward& asked, Parallel parallel) {
  const DepthwiseBackward call = without_idle_strides(asked);
  by_dtype(call.dtype, kernels().depthwise, [&](const auto& k) {
    const Plan p = plan_for(call, k.lanes, is_narrow(call.dtype));
    const bool adds = call.grad_weight || call.grad_bias;
    const std::unique_ptr<double[]> sums(new double[adds ? p.backward_tasks * p.cut.sums : 0]);
    const int64_t each = call.samples * call.out_channels() * call.outputs();
    in_parts(parallel, p.backward_tasks,
             ceil_div(kGrain / 8, each / larger(p.backward_tasks, 1) + 1),
             [&](int64_t first, int64_t last) {
               const Scratch scratch(p.bytes);
               k.backward(call, p.room, p.cut, first, last, scratch.get(), sums.get());
             });
    if (!adds) return;
    // In the order of the tasks, whatever thread did them.
    const int64_t groups = ceil_div(call.channels, p.cut.channels), taps = call.taps();
    const int64_t chunks = groups ? p.backward_tasks / groups : 0, m = call.multiplier;
    using S = typename std::remove_reference<decltype(k)>::type::Number;
    const Format* const format = is_narrow(call.dtype) ? &format_of(call.dtype) : nullptr;
    in_parts(parallel, call.out_channels(), 64, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) {
        const int64_t group = c / (p.cut.channels * m), place = c % (p.cut.channels * m);
        const auto total = [&](int64_t i) {
          double sum = 0;
          for (int64_t n = 0; n < chunks; ++n) sum += sums[(n * groups + group) * p.cut.sums + i];
          return sum;
        };
        if (call.grad_weight)
          for (int64_t t = 0; t < taps; ++t)
            write_number(at<S>(call.grad_weight, c * taps + t), total(place * taps + t), format);
        if (call.grad_bias)
          write_number(at<S>(call.grad_bias, c), total(p.cut.channels * m * taps + place), format);
      }
    });
  });
}

}  // namespace cpu
}  // namespace fusedtrain
