// Restores x after an output took its place: (s - bias) / (invstd weight) + mean, s = f^-1(y).
#include "batch_norm.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

template <class S, bool kWide>
struct Output {
  Packed<S, kWide> y;
  int64_t at;

  __device__ __forceinline__ void load(const Walk&, const Tensors<S>& t, int64_t here) {
    at = here;
    y.load(t.x + at);
  }
};

template <class S, bool kWide>
__global__ void __launch_bounds__(kThreads, 3)
    restore_kernel(Walk w, Tensors<S> t, typename Compute<S>::T below,
                   typename Compute<S>::T largest) {
  using V = Vec<S, kWide>;
  using T = typename V::T;
  constexpr int kLanes = V::kLanes, kBatch = kWide ? 4 : 8;
  Position<kLanes> p(w);
  Affine<T, kLanes> affine(t, Channels<kLanes>(w, p.column));
#pragma unroll
  for (int k = 0; k < kLanes; ++k) affine.scale[k] = T(1) / affine.scale[k];
  for_vectors<kBatch, Output<S, kWide>>(w, t, p, [&](const Output<S, kWide>& loaded) {
    V x;
    loaded.y.get(x.lane);
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      const T s = x.lane[k] > T(0) ? x.lane[k] : x.lane[k] * below;
      const T restored = (s - affine.bias[k]) * affine.scale[k] + affine.mean[k];
      const T bounded = restored > largest ? largest : restored;
      x.lane[k] = bounded < -largest ? -largest : bounded;
    }
    x.store(t.out + loaded.at);
  });
}

}  // namespace

void restore(const BatchNorm& n, const BatchNormRestore& r, void* stream) {
  if (n.rows * n.channels * n.inner == 0) return;
  by_dtype(n.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    using T = typename Compute<S>::T;
    Tensors<S> t(n);
    t.out = static_cast<S*>(r.x);
    const Walk w = t.walk(n);
    auto* kernel = &restore_kernel<S, false>;
    if constexpr (sizeof(S) < 8)
      if (w.wide) kernel = &restore_kernel<S, true>;
    // equal (times two): blocks beyond the last group do nothing
    launch(kernel, w.parts.value * w.groups, kThreads, stream, 0, w, t, T(1) / T(r.slope),
           T(r.largest));
  });
}

}  // namespace cuda
}  // namespace fusedtrain
