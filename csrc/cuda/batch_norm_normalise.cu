// y = f((x - mean) invstd weight + bias, times branch_scale, plus the residual).
#include "batch_norm.cuh"
#include "batch_norm_formula.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// A vector of the branch and of the residual, on their way.
template <class S, bool kWide>
struct Branch {
  Packed<S, kWide> x, residual;
  int64_t at;
  typename Vec<S, kWide>::T scale;

  __device__ __forceinline__ void load(const Walk& w, const Tensors<S>& t, int64_t here) {
    at = here;
    x.load(t.x + at);
    residual.load_if(t.other, at);
    scale = t.scale_of(w, at);
  }
};

template <class F, class S, bool kWide>
__global__ void __launch_bounds__(kThreads, 3)
    normalise_kernel(Chosen<typename F::T> chosen, Walk w, Tensors<S> t) {
  using V = Vec<S, kWide>;
  constexpr int kLanes = V::kLanes;
  const F formula(chosen);
  Position<kLanes> p(w);
  const Affine<typename V::T, kLanes> affine(t, Channels<kLanes>(w, p.column));
  for_vectors<Branch<S, kWide>>(w, t, p, [&](const Branch<S, kWide>& branch) {
    V y, residual;
    branch.x.get(y.lane);
    branch.residual.get(residual.lane);
#pragma unroll
    for (int k = 0; k < kLanes; ++k)
      y.lane[k] = formula.forward(affine(y.lane[k], k) * branch.scale + residual.lane[k]);
    y.store(t.out + branch.at);
  });
}

template <class F, class S, bool kWide>
struct Normalise {
  static constexpr auto* kernel = &normalise_kernel<F, S, kWide>;
};

}  // namespace

void normalise(const BatchNorm& n, const BatchNormForward& f, void* stream) {
  if (n.rows * n.channels * n.inner == 0) return;
  by_dtype(n.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    Tensors<S> t(n);
    t.other = static_cast<const S*>(f.residual);
    t.out = static_cast<S*>(f.y);
    const Walk w = t.walk(n, false);
    launch(kernel_of<Normalise, S>(n.op, w.wide), w.parts.value * w.groups, kThreads, stream, 0,
           chosen<S>(n), w, t);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
