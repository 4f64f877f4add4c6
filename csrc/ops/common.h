// Entry points of a backend: what to compute, pointers, sizes. Plain C++, no torch; a header a
// family. Entries of cpu:: return when all is done; the order of their sums does not depend on the
// number of threads. Entries of cuda:: run on the current device, in order on a cudaStream_t; a
// launch that fails throws std::runtime_error.
//
// The data of one call are dense: element i of every pointer belongs to element i of the others.
// Input and output may be the same buffer. Zero elements are allowed.
#pragma once

#include <stdint.h>

namespace fusedtrain {

enum class Dtype : int { kFloat32, kFloat64, kFloat16, kBFloat16 };
constexpr int kMaxParameters = 2;

// Tensor that the backward of a formula takes beside the gradient.
enum Saved { kInput, kOutput };

// Entries of a call, which calls of fusedtrain::compute() find by the type of the last argument.
#define FT_ENTRIES(Call)                             \
  namespace cpu {                                    \
  void compute(const Call& call, Parallel parallel); \
  }                                                  \
  namespace cuda {                                   \
  void compute(const Call& call, void* stream);      \
  }                                                  \
  using cpu::compute;                                \
  using cuda::compute;

// Threads of the CPU's loops. run() calls part(state, first, last) for pieces of
// [0, n) of at least `grain`, on any thread in any order.
struct Parallel {
  using Part = void (*)(const void* state, int64_t first, int64_t last);
  void (*run)(int64_t n, int64_t grain, const void* state, Part part);
};

namespace cpu {

// Tells the system that a fresh output is about to be written whole, so that it may map it in huge
// pages (docs/decisions/0002-huge-pages.md). FUSEDTRAIN_HUGE_PAGES=0 turns this off.
void prepare_output(void* data, int64_t bytes);

// "default", "avx2" or "avx512": what this process uses.
const char* capability();

}  // namespace cpu

namespace cuda {

// The device that kernels are launched on from here, in this thread.
void set_device(int device);

}  // namespace cuda
}  // namespace fusedtrain
