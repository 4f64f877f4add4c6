// y = f((x - mean) invstd weight + bias, times branch_scale, plus the residual). In eval mode mean
// and invstd are made of running statistics at the beginning of the same kernel.
#include "batch_norm.cuh"
#include "formula.cuh"

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

// Eval mode, where mean and invstd of the tensors are the running ones: the mean and the variance.
template <class T>
struct Running {
  T* mean;  // what backward is to have; null: not eval mode
  T* invstd;
  T eps, eps_rest;  // their sum is the double
};

// 1 / sqrt(variance + eps), rounded as if in double, of which consumer GPUs do few a second: the
// sum in two floats, and a step of Newton's from what the approximate division gives.
__device__ __forceinline__ float inverse_deviation(float variance, const Running<float>& running) {
  const float sum = variance + running.eps, added = sum - variance;
  const float rest = (variance - (sum - added)) + (running.eps - added) + running.eps_rest;
  const float guess = 1.0f / formulas::math::sqrt(sum);
  const float root = sum * guess;
  float error = fmaf(-root, guess, 1.0f);
  error = fmaf(-fmaf(sum, guess, -root), guess, error);
  error = fmaf(-rest * guess, guess, error);
  // For 0 and infinity the guess is right, and the error nan.
  // equal (<= for <): the error is 1e-7 or NaN
  return formulas::math::abs(error) < 1.0f ? fmaf(0.5f * guess, error, guess) : guess;
}
__device__ __forceinline__ double inverse_deviation(double variance,
                                                    const Running<double>& running) {
  return 1.0 / formulas::math::sqrt(variance + running.eps);
}

template <class F, class S, bool kWide>
__global__ void __launch_bounds__(kThreads, 2)
    normalise_kernel(Chosen<typename F::T> chosen, Walk w, Tensors<S> t,
                     Running<typename F::T> running) {
  using V = Vec<S, kWide>;
  using T = typename V::T;
  constexpr int kLanes = V::kLanes, kBatch = kWide ? 4 : 8;
  const F formula(chosen);
  Position<kLanes> p(w);
  const Channels<kLanes> channels(w, p.column);
  const Affine<T, kLanes> affine(t, channels, [&](T(&mean)[kLanes], T(&invstd)[kLanes]) {
    if (running.mean == nullptr) return;
    // A channel's first column is in one block of group 0, and in one thread of its first vectors.
    const bool first = p.left > 0 && threadIdx.x < w.across && blockIdx.x < w.parts.value;
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      invstd[k] = inverse_deviation(invstd[k], running);
      const int64_t channel = channels.first + channels.after[k];
      if (!first || p.column + k != channel * w.of_channel.value) continue;
      running.mean[channel] = mean[k];
      running.invstd[channel] = invstd[k];
    }
  });
  for_vectors<kBatch, Branch<S, kWide>>(w, t, p, [&](const Branch<S, kWide>& branch) {
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

// With the statistics of eval mode, or null.
void normalise(const BatchNorm& n, const BatchNormStatistics* s, const BatchNormForward& f,
               void* stream) {
  if (n.rows * n.channels * n.inner == 0) return;
  by_dtype(n.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    using T = typename Compute<S>::T;
    Tensors<S> t(n);
    t.other = static_cast<const S*>(f.residual);
    t.out = static_cast<S*>(f.y);
    Running<T> running = {};
    if (s != nullptr) {
      const T eps = T(s->eps);
      running = {static_cast<T*>(n.mean), static_cast<T*>(n.invstd), eps, T(s->eps - double(eps))};
      t.mean = static_cast<const T*>(s->running_mean);
      t.invstd = static_cast<const T*>(s->running_var);
    }
    const Walk w = t.walk(n);
    // equal (times two): blocks beyond the last group do nothing
    launch(kernel_of<Normalise, S>(n.op, w.wide), w.parts.value * w.groups, kThreads, stream, 0,
           chosen<S>(n.op, n.parameters), w, t, running);
  });
}

}  // namespace

void normalise(const BatchNorm& n, const BatchNormForward& f, void* stream) {
  normalise(n, nullptr, f, stream);
}
void evaluate(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f,
              void* stream) {
  normalise(n, &s, f, stream);
}

}  // namespace cuda
}  // namespace fusedtrain
