// Max pooling: how it is cut into tasks, and what a row of the backward needs.
#include <memory>

#include "cut.h"
#include "kernels.h"

namespace fusedtrain {
namespace cpu {
namespace {

constexpr int64_t kBlocks = 32;  // of 256 outputs, to a task

const MaxPoolKernels& loops_of(Dtype dtype) {
  const Kernels& k = kernels();
  switch (dtype) {
    case Dtype::kFloat32:
      return k.max_pool_f32;
    case Dtype::kFloat64:
      return k.max_pool_f64;
    case Dtype::kFloat16:
      return k.max_pool_f16;
    default:
      return k.max_pool_bf16;
  }
}

int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t blocks_of(const MaxPool& call) { return ceil_div(call.outputs(), 256); }

int64_t rows_of(const MaxPool& call) { return call.outputs() > 0 ? call.planes * call.height : 0; }
int64_t rows_a_task(const MaxPool& call) {
  return larger(1, kTask / larger(1, call.width * call.channels));
}

MaxPoolRows plan(const MaxPool& call) {
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

int64_t max_pool2d_tasks(const MaxPoolForward& call) { return ceil_div(blocks_of(call), kBlocks); }
int64_t max_pool2d_tasks(const MaxPoolBackward& call) {
  return ceil_div(rows_of(call), rows_a_task(call));
}

void max_pool2d(const MaxPoolForward& call, int64_t first_task, int64_t last_task) {
  loops_of(call.dtype)
      .forward(call, first_task * kBlocks, smaller(last_task * kBlocks, blocks_of(call)));
}

void max_pool2d(const MaxPoolBackward& call, int64_t first_task, int64_t last_task) {
  const MaxPoolRows rows = plan(call);
  const int64_t each = rows_a_task(call);
  const int64_t number = call.dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
  // Not set to anything.
  const std::unique_ptr<double[]> scratch(new double[ceil_div(rows.scratch * number, 8)]);
  loops_of(call.dtype)
      .backward(call, rows, first_task * each, smaller(last_task * each, rows_of(call)),
                scratch.get());
}

}  // namespace cpu
}  // namespace fusedtrain
