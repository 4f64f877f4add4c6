// y = f(x) and grad_input = grad f'(saved), for every formula of FT_POINTWISE.
//
// A block walks over tiles of kThreads * kItems elements; each thread has kItems / kLanes loads of
// 16 bytes in flight. The last tile, and buffers that are not aligned to 16 bytes, go element by
// element through the same formula.
#include "../formulas.h"
#include "../ops/pointwise.h"
#include "launch.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 64;  // four times what fits: late blocks even out the end

// Elements of a thread in one tile: 4 loads of float or double, 2 of 16-bit types.
template <class S>
constexpr int kItems = sizeof(S) == 8 ? 8 : 16;

// Blocks that must fit on a multiprocessor: 1024 threads of 64 registers, or 512 of 128. Without
// the number ptxas aims at 32 registers and spills a few.
template <class S>
constexpr int kResident = sizeof(S) == 8 ? 4 : 8;

template <class S, class Formula>
__global__ void __launch_bounds__(kThreads, kResident<S>)
    forward_kernel(Formula formula, const S* x, S* y, int64_t n, bool wide) {
  using V = Vec<S>;
  constexpr int kTile = kThreads * kItems<S>, kVecs = kItems<S> / V::kLanes;
  // equal (<= for <): nothing lies beyond the last element
  for (int64_t start = int64_t(blockIdx.x) * kTile; start < n;
       start += int64_t(gridDim.x) * kTile) {
    // equal (> for >=): the last whole tile goes element by element
    if (wide && n - start >= kTile) {
      const int64_t first = start + threadIdx.x * V::kLanes;
      V v[kVecs];
#pragma unroll
      for (int j = 0; j < kVecs; ++j) v[j].load(x + first + j * kThreads * V::kLanes);
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
#pragma unroll
        for (int k = 0; k < V::kLanes; ++k) v[j].lane[k] = formula.forward(v[j].lane[k]);
        v[j].store(y + first + j * kThreads * V::kLanes);
      }
    } else {
      const int64_t end = n - start < kTile ? n : start + kTile;
      for (int64_t i = start + threadIdx.x; i < end; i += kThreads)
        y[i] = store_one<S>(formula.forward(load_one(x[i])));
    }
  }
}

template <class S, class Formula>
__global__ void __launch_bounds__(kThreads, kResident<S>)
    backward_kernel(Formula formula, const S* grad, const S* saved, S* grad_input, int64_t n,
                    bool wide) {
  using V = Vec<S>;
  constexpr int kTile = kThreads * kItems<S>, kVecs = kItems<S> / V::kLanes;
  // equal (<= for <): nothing lies beyond the last element
  for (int64_t start = int64_t(blockIdx.x) * kTile; start < n;
       start += int64_t(gridDim.x) * kTile) {
    // equal (> for >=): the last whole tile goes element by element
    if (wide && n - start >= kTile) {
      const int64_t first = start + threadIdx.x * V::kLanes;
      V g[kVecs], s[kVecs];
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        g[j].load(grad + first + j * kThreads * V::kLanes);
        s[j].load(saved + first + j * kThreads * V::kLanes);
      }
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
#pragma unroll
        for (int k = 0; k < V::kLanes; ++k)
          g[j].lane[k] = formula.backward(g[j].lane[k], s[j].lane[k]);
        g[j].store(grad_input + first + j * kThreads * V::kLanes);
      }
    } else {
      const int64_t end = n - start < kTile ? n : start + kTile;
      for (int64_t i = start + threadIdx.x; i < end; i += kThreads)
        grad_input[i] = store_one<S>(formula.backward(load_one(grad[i]), load_one(saved[i])));
    }
  }
}

template <class S>
int64_t blocks_for(int64_t n) {
  // equal (times two): the speed alone changes
  const int64_t tiles = ceil_div(n, kThreads * kItems<S>);
  const int64_t most = int64_t(multiprocessors()) * kBlocksPerMultiprocessor;
  return tiles < most ? tiles : most;
}

template <template <class> class Formula, bool kRounds>
void run(const PointwiseForward& call, int64_t n, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    using F = Formula<typename Compute<S>::T>;
    const S* x = static_cast<const S*>(call.x);
    S* y = static_cast<S*>(call.y);
    launch(forward_kernel<S, F>, blocks_for<S>(n), kThreads, stream, 0,
           F(Parameters<S>(call.parameters, kRounds).value), x, y, n, aligned(x, y));
  });
}

template <template <class> class Formula, bool kRounds>
void run(const PointwiseBackward& call, int64_t n, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    using F = Formula<typename Compute<S>::T>;
    const S* grad = static_cast<const S*>(call.grad);
    const S* saved = static_cast<const S*>(call.saved);
    S* grad_input = static_cast<S*>(call.grad_input);
    launch(backward_kernel<S, F>, blocks_for<S>(n), kThreads, stream, 0,
           F(Parameters<S>(call.parameters, kRounds).value), grad, saved, grad_input, n,
           aligned(grad, saved, grad_input));
  });
}

template <class Call>
void run_op(const Call& call, int64_t n, void* stream) {
  using Run = void (*)(const Call&, int64_t, void*);
#define FT_RUN(name, Formula, parameters, rounds, saved) &run<formulas::Formula, rounds>,
  static constexpr Run kRuns[] = {FT_POINTWISE(FT_RUN)};
#undef FT_RUN
  if (n > 0) kRuns[call.op](call, n, stream);
}

}  // namespace

void set_device(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

extern "C" __attribute__((visibility("default"))) int64_t fusedtrain_cuda_launches() {
  return launches.load(std::memory_order_relaxed);
}

void compute(const PointwiseForward& call, int64_t n, void* stream) { run_op(call, n, stream); }
void compute(const PointwiseBackward& call, int64_t n, void* stream) { run_op(call, n, stream); }

}  // namespace cuda
}  // namespace fusedtrain
