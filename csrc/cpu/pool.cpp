// Max pooling: how it is cut into tasks, and what a row of the backward needs.
#include "../ops/pool.h"

#include <memory>

#include "cut.h"

namespace fusedtrain {
namespace cpu {
namespace {

constexpr int64_t kBlocks = 32;  // of 256 outputs, to a task

int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t blocks_of(const MaxPool& call) { return ceil_div(call.outputs(), 256); }

int64_t rows_of(const MaxPool& call) { return call.outputs() > 0 ? call.planes * call.height : 0; }
int64_t rows_a_task(const MaxPool& call) {
  return larger(1, kTask / larger(1, call.width * call.channels));
}

MaxPoolRows plan_for(const MaxPool& call) {
  MaxPoolRows r = {};
  // A single window has no stride, and one far beyond the input would take as many sums.
  r.stride = call.out_width > 1 ? call.stride_w : call.kernel_w;
  const int64_t reached = call.out_width + (call.kernel_w - 1) / r.stride;
  r.steps = larger(reached, ceil_div(call.width + call.pad_w, r.stride));
  r.sums = call.channels == 1 ? r.stride * r.steps : 0;
  r.kept = larger(1, smaller(call.out_height, (call.kernel_h - 1) / call.stride_h + 1));
  const int64_t length = call.out_width * call.channels, size = call.width * call.channels;
  // Codes; 16-bit gradients and results as numbers, too.
  const bool narrow = call.dtype == Dtype::kFloat16 || call.dtype == Dtype::kBFloat16;
  r.scratch = r.sums + r.kept * length * (narrow ? 2 : 1) + (narrow ? size : 0);
  return r;
}

}  // namespace

void compute(const MaxPoolForward& call, Parallel parallel) {
  const int64_t blocks = blocks_of(call);
  by_dtype(call.dtype, kernels().max_pool, [&](const auto& k) {
    in_parts(parallel, ceil_div(blocks, kBlocks), 2, [&](int64_t first, int64_t last) {
      k.forward(call, first * kBlocks, smaller(last * kBlocks, blocks));
    });
  });
}

void compute(const MaxPoolBackward& call, Parallel parallel) {
  const MaxPoolRows plan = plan_for(call);
  const int64_t rows = rows_of(call), each = rows_a_task(call);
  const int64_t number = call.dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
  by_dtype(call.dtype, kernels().max_pool, [&](const auto& k) {
    in_parts(parallel, ceil_div(rows, each), 2, [&](int64_t first, int64_t last) {
      // Not set to anything.
      const std::unique_ptr<double[]> scratch(new double[ceil_div(plan.scratch * number, 8)]);
      k.backward(call, plan, first * each, smaller(last * each, rows), scratch.get());
    });
  });
}

}  // namespace cpu
}  // namespace fusedtrain
