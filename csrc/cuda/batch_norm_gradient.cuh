// First step of both passes of backward: the gradient of the activation's input.
#pragma once

#include "batch_norm.cuh"
#include "formula.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// grad f'(s), for a vector; its x as well.
template <class S, bool kWide>
struct Gradient {
  using V = Vec<S, kWide>;
  using T = typename V::T;
  static constexpr int kLanes = V::kLanes;

  Packed<S, kWide> grad, input, other;
  int64_t at;
  T scale;

  __device__ __forceinline__ void load(const Walk& w, const Tensors<S>& t, int64_t here) {
    at = here;
    grad.load(t.grad + at);
    input.load_if(t.x, at);
    other.load_if(t.other, at);
    scale = t.scale_of(w, at);
  }

  template <class F>
  __device__ __forceinline__ void get(const F& formula, const Affine<T, kLanes>& affine,
                                      bool has_other, T (&g)[kLanes], T (&x)[kLanes]) const {
    T saved[kLanes];
    grad.get(g);
    input.get(x);
    other.get(saved);
    if (!formula.saves_output() || !has_other) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) {
        const T s = affine(x[k], k) * scale + saved[k];
        saved[k] = formula.saves_output() ? formula.forward(s) : s;
      }
    }
#pragma unroll
    for (int k = 0; k < kLanes; ++k) g[k] = formula.backward(g[k], saved[k]);
  }
};

template <class S>
Tensors<S> tensors_of(const BatchNorm& n, const BatchNormBackward& b) {
  Tensors<S> t(n);
  t.grad = static_cast<const S*>(b.grad);
  t.other = static_cast<const S*>(b.saved);
  t.grad_residual = static_cast<S*>(b.grad_residual);
  return t;
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
