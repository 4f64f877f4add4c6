// The gradient of batch norm's input, from d (the gradient of what is normalised) and its sums:
//   (d - averages[0] / count - averages[1] / count (x - mean) invstd) invstd weight
#include "batch_norm_gradient.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

template <class F, class S, bool kWide>
__global__ void __launch_bounds__(kThreads, 2)
    grad_input_kernel(Chosen<typename F::T> chosen, Walk w, Tensors<S> t, const double* averages,
                      double inverse) {
  using V = Vec<S, kWide>;
  using T = typename V::T;
  constexpr int kLanes = V::kLanes, kBatch = kWide ? 2 : sizeof(S) == 8 ? 4 : 8;
  const F formula(chosen);
  Position<kLanes> p(w);
  const Channels<kLanes> channels(w, p.column);
  const Affine<T, kLanes> affine(t, channels);
  T average[kLanes] = {}, slope[kLanes] = {};
  if (averages != nullptr) {
    double sum[kLanes];
    channels.get(averages, sum);
#pragma unroll
    for (int k = 0; k < kLanes; ++k) average[k] = T(sum[k] * inverse);
    channels.get(averages + w.channels, sum);
    channels.get(t.invstd, slope);
#pragma unroll
    for (int k = 0; k < kLanes; ++k) slope[k] *= T(sum[k] * inverse);
  }
  for_vectors<kBatch, Gradient<S, kWide>>(w, t, p, [&](const Gradient<S, kWide>& loaded) {
    V g, x;
    loaded.get(formula, affine, t.other != nullptr, g.lane, x.lane);
    if (t.grad_residual != nullptr) g.store(t.grad_residual + loaded.at);
    if (t.out == nullptr) return;
#pragma unroll
    for (int k = 0; k < kLanes; ++k) g.lane[k] *= loaded.scale;
    // A branch, not zeros: x may be infinite.
    if (averages != nullptr) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k)
        g.lane[k] -= average[k] + (x.lane[k] - affine.mean[k]) * slope[k];
    }
#pragma unroll
    for (int k = 0; k < kLanes; ++k) g.lane[k] *= affine.scale[k];
    g.store(t.out + loaded.at);
  });
}

template <class F, class S, bool kWide>
struct GradInput {
  static constexpr auto* kernel = &grad_input_kernel<F, S, kWide>;
};

}  // namespace

void grad_input(const BatchNorm& call, const BatchNormBackward& b, void* stream) {
  if (call.rows * call.channels * call.inner == 0) return;
  BatchNorm n = call;
  if (b.ready != nullptr) n.op = -1;                     // f' has been applied
  if (n.op < 0 && b.averages == nullptr) n.x = nullptr;  // nothing depends on it
  by_dtype(n.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    Tensors<S> t = tensors_of<S>(n, b);
    if (b.ready != nullptr) {
      t.grad = static_cast<const S*>(b.ready);
      t.other = nullptr;
    }
    t.out = static_cast<S*>(b.grad_input);
    Walk w = t.walk(n);
    w.adjacent &= aligned(b.averages);
    // equal (times two): blocks beyond the last group do nothing
    launch(kernel_of<GradInput, S>(n.op, w.wide), w.parts.value * w.groups, kThreads, stream, 0,
           chosen<S>(n.op, n.parameters), w, t, b.averages, 1.0 / b.count);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
