// Scaled sums.
#include "../ops/scale_add.h"
#include "channels.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

template <class S_, bool kAdds>
struct ScaleForwardJob {
  using S = S_;
  using T = typename Compute<S>::T;
  static constexpr bool kSums = false;
  static constexpr int kInputs = kAdds ? 2 : 1;
  const S *x, *scale, *residual;
  S* y;
  __device__ __forceinline__ T coefficient(int64_t i) const { return load_one(scale[i]); }
  template <class V>
  __device__ __forceinline__ void fetch(int64_t at, Packed<S, V::kIsWide> (&in)[kInputs]) const {
    in[0].load(x + at);
    if constexpr (kAdds) in[1].load(residual + at);
  }
  template <class V>
  __device__ __forceinline__ void run(int64_t at, const Packed<S, V::kIsWide> (&in)[kInputs],
                                      const T (&c)[V::kLanes], T (&)[V::kLanes]) const {
    V v = in[0].get();
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) v.lane[l] *= c[l];
    if constexpr (kAdds) {
      const V r = in[1].get();
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) v.lane[l] += r.lane[l];
    }
    v.store(y + at);
  }
};

// kSums: x is there. grad_input may be null.
template <class S_, bool kSums_>
struct ScaleBackwardJob {
  using S = S_;
  using T = typename Compute<S>::T;
  static constexpr bool kSums = kSums_;
  static constexpr int kInputs = kSums ? 2 : 1;
  const S *grad, *x, *scale;
  S* grad_input;
  __device__ __forceinline__ T coefficient(int64_t i) const { return load_one(scale[i]); }
  template <class V>
  __device__ __forceinline__ void fetch(int64_t at, Packed<S, V::kIsWide> (&in)[kInputs]) const {
    in[0].load(grad + at);
    if constexpr (kSums) in[1].load(x + at);
  }
  template <class V>
  __device__ __forceinline__ void run(int64_t at, const Packed<S, V::kIsWide> (&in)[kInputs],
                                      const T (&c)[V::kLanes], T (&sum)[V::kLanes]) const {
    V g = in[0].get();
    if constexpr (kSums) {
      const V v = in[1].get();
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) sum[l] += g.lane[l] * v.lane[l];
    }
    if (grad_input == nullptr) return;
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) g.lane[l] *= c[l];
    g.store(grad_input + at);
  }
};

}  // namespace

// Enough for either walk of any dtype.
int64_t chain_shares(const Channels& c) {
  int64_t most = 0;
  const auto consider = [&](const Plan& plan) {
    if (plan.groups * plan.shares > most) most = plan.groups * plan.shares;
  };
  for (const bool aligned : {false, true}) {
    // No fewer groups than with more steps together.
    consider(plan_for<float>(c, aligned, 1));
    consider(plan_for<double>(c, aligned, 1));
    consider(plan_for<__half>(c, aligned, 1));
  }
  return most;
}

void compute(const ScaleForward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const S *x = static_cast<const S*>(call.x), *scale = static_cast<const S*>(call.scale),
            *residual = static_cast<const S*>(call.residual);
    S* y = static_cast<S*>(call.y);
    if (residual != nullptr)
      run_job(ScaleForwardJob<S, true>{x, scale, residual, y}, call.shape, aligned(x, residual, y),
              nullptr, nullptr, stream);
    else
      run_job(ScaleForwardJob<S, false>{x, scale, residual, y}, call.shape, aligned(x, y), nullptr,
              nullptr, stream);
  });
}

void compute(const ScaleBackward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const S *grad = static_cast<const S*>(call.grad), *x = static_cast<const S*>(call.x),
            *scale = static_cast<const S*>(call.scale);
    S* out = static_cast<S*>(call.grad_input);
    if (x != nullptr)
      run_job(ScaleBackwardJob<S, true>{grad, x, scale, out}, call.shape, aligned(grad, x, out),
              call.shares, call.grad_scale, stream);
    else
      run_job(ScaleBackwardJob<S, false>{grad, x, scale, out}, call.shape, aligned(grad, x, out),
              nullptr, nullptr, stream);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
