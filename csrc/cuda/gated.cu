// Gated products.
#include "../ops/gated.h"
#include "formula.cuh"
#include "launch.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 16;

template <class F, class S, bool kWide>
__global__ void __launch_bounds__(kThreads)
    gated_kernel(const GatedForward call, const Chosen<typename F::T> chosen) {
  using V = Vec<S, kWide>;
  const F formula(chosen);
  const int64_t each = call.n / V::kLanes;
  for (int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x; k < call.rows * each;
       k += int64_t(gridDim.x) * kThreads) {
    const int64_t row = k / each, i = (k - row * each) * V::kLanes;
    V gate, value;
    gate.load(static_cast<const S*>(call.gate) + row * call.gate_stride + i);
    value.load(static_cast<const S*>(call.value) + row * call.value_stride + i);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) value.lane[l] *= formula.forward(gate.lane[l]);
    value.store(static_cast<S*>(call.y) + row * call.n + i);
  }
}

template <class F, class S, bool kWide>
struct GatedForwardPass {
  static constexpr auto* kernel = gated_kernel<F, S, kWide>;
};

template <class F, class S, bool kWide>
__global__ void __launch_bounds__(kThreads)
    gated_backward_kernel(const GatedBackward call, const Chosen<typename F::T> chosen) {
  using V = Vec<S, kWide>;
  const F formula(chosen);
  const int64_t each = call.n / V::kLanes;
  for (int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x; k < call.rows * each;
       k += int64_t(gridDim.x) * kThreads) {
    const int64_t row = k / each, i = (k - row * each) * V::kLanes;
    V grad, gate, value;
    grad.load(static_cast<const S*>(call.grad) + row * call.n + i);
    gate.load(static_cast<const S*>(call.gate) + row * call.gate_stride + i);
    value.load(static_cast<const S*>(call.value) + row * call.value_stride + i);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) {
      const auto open = formula.forward(gate.lane[l]);
      const auto saved = formula.saves_output() ? open : gate.lane[l];
      gate.lane[l] = formula.backward(grad.lane[l] * value.lane[l], saved);
      grad.lane[l] *= open;
    }
    gate.store(static_cast<S*>(call.grad_gate) + row * call.grad_gate_stride + i);
    grad.store(static_cast<S*>(call.grad_value) + row * call.grad_value_stride + i);
  }
}

template <class F, class S, bool kWide>
struct GatedBackwardPass {
  static constexpr auto* kernel = gated_backward_kernel<F, S, kWide>;
};

bool strides_fit(const GatedForward& call, int lanes) {
  return aligned(static_cast<const char*>(call.gate), static_cast<const char*>(call.value),
                 static_cast<const char*>(call.y)) &&
         (call.n | call.gate_stride | call.value_stride) % lanes == 0;
}
bool strides_fit(const GatedBackward& call, int lanes) {
  return aligned(static_cast<const char*>(call.gate), static_cast<const char*>(call.value),
                 static_cast<const char*>(call.grad), static_cast<const char*>(call.grad_gate),
                 static_cast<const char*>(call.grad_value)) &&
         (call.n | call.gate_stride | call.value_stride | call.grad_gate_stride |
          call.grad_value_stride) %
                 lanes ==
             0;
}

template <template <class, class, bool> class Pass, class Call>
void run_gated(const Call& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    // equal (<= for <): the speed alone changes
    const bool wide = strides_fit(call, Vec<S>::kLanes) && sizeof(S) < 8;
    // equal (times two): the speed alone changes
    const int64_t vectors = call.rows * (call.n / (wide ? Vec<S>::kLanes : 1));
    const int64_t most = int64_t(multiprocessors()) * kBlocksPerMultiprocessor;
    const int64_t blocks = ceil_div(vectors, kThreads);
    launch(kernel_of<Pass, S>(call.op, wide), blocks < most ? blocks : most, kThreads, stream, 0,
           call, chosen<S>(call.op, call.parameters));
  });
}

}  // namespace

void compute(const GatedForward& call, void* stream) { run_gated<GatedForwardPass>(call, stream); }
void compute(const GatedBackward& call, void* stream) {
  run_gated<GatedBackwardPass>(call, stream);
}

}  // namespace cuda
}  // namespace fusedtrain
