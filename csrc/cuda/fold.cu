// A batch norm folded into the weight before it, and the gradients of both: one launch each way.
#include "../formulas.h"
#include "../ops/fold.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kFoldWarps = 8;
constexpr int kFoldThreads = kFoldWarps * kWarp;

__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

template <class T>
__device__ __forceinline__ T at(const void* values, int64_t i, T otherwise) {
  return values == nullptr ? otherwise : static_cast<const T*>(values)[i];
}

template <class T>
struct Channel {
  T invstd, scale, centre;
  __device__ __forceinline__ Channel(const FoldWeight& call, int64_t i)
      : invstd(T(1) / root(static_cast<const T*>(call.var)[i] + T(call.eps))),
        scale(at<T>(call.gamma, i, T(1)) * invstd),
        centre(at<T>(call.bias, i, T(0)) - static_cast<const T*>(call.mean)[i]) {}
};

// A thread an element; the first ones also make the bias.
template <class S>
__global__ void __launch_bounds__(kFoldThreads) fold_kernel(const FoldForward call, int64_t numel) {
  using T = typename Compute<S>::T;
  const int64_t i = int64_t(blockIdx.x) * kFoldThreads + threadIdx.x;
  if (i < numel) {
    const int64_t run = i / call.inner, row = run / call.channels;
    const int64_t output = row / call.rows_per_group * call.channels + (run - row * call.channels);
    const Channel<T> c(call, output);
    const T w = load_one(static_cast<const S*>(call.weight)[i]);
    static_cast<S*>(call.folded)[i] = store_one<S>(c.scale * w);
  }
  if (i < call.rows / call.rows_per_group * call.channels) {
    const Channel<T> c(call, i);
    static_cast<T*>(call.folded_bias)[i] = at<T>(call.beta, i, T(0)) + c.scale * c.centre;
  }
}

// A block an output channel: the order of its sum is fixed.
template <class S>
__global__ void __launch_bounds__(kFoldThreads) fold_backward_kernel(const FoldBackward call) {
  using T = typename Compute<S>::T;
  const int64_t output = blockIdx.x, group = output / call.channels;
  const int64_t channel = output - group * call.channels;
  const Channel<T> c(call, output);
  T sum = T(0);
  for (int64_t e = threadIdx.x; e < call.rows_per_group * call.inner; e += kFoldThreads) {
    const int64_t r = e / call.inner, row = group * call.rows_per_group + r;
    const int64_t i = (row * call.channels + channel) * call.inner + (e - r * call.inner);
    const T g = load_one(static_cast<const S*>(call.grad_folded)[i]);
    sum += g * load_one(static_cast<const S*>(call.weight)[i]);
    static_cast<S*>(call.grad_weight)[i] = store_one<S>(c.scale * g);
  }
  __shared__ T scratch[kFoldWarps];
  sum = block_sum<kFoldWarps>(sum, scratch);
  if (threadIdx.x == 0) {
    const T g = static_cast<const T*>(call.grad_folded_bias)[output];
    static_cast<T*>(call.grad_bias)[output] = c.scale * g;
    static_cast<T*>(call.grad_gamma)[output] = c.invstd * (sum + c.centre * g);
  }
}

}  // namespace

void compute(const FoldForward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const int64_t numel = call.rows * call.channels * call.inner;
    const int64_t threads = numel > call.outputs() ? numel : call.outputs();
    if (threads > 0)
      launch(&fold_kernel<S>, ceil_div(threads, kFoldThreads), kFoldThreads, stream, 0, call,
             numel);
  });
}

void compute(const FoldBackward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    if (call.outputs() > 0)
      launch(&fold_backward_kernel<S>, call.outputs(), kFoldThreads, stream, 0, call);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
