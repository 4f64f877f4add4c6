// The sums of batch norm's backward: of d and of d (x - mean) invstd, where d is the gradient of
// what is normalised. Each thread adds up in float, at most kMostVectors numbers a lane. With fixed
// statistics the gradient of the input, d invstd weight, depends on no sum and is written as well.
#include "batch_norm_gradient.cuh"
#include "batch_norm_whole.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

template <class F, class S, bool kWide>
__global__ void __launch_bounds__(kThreads, 2)
    reduce_kernel(Chosen<typename F::T> chosen, Walk w, Tensors<S> t, double* shares) {
  using V = Vec<S, kWide>;
  using T = typename V::T;
  constexpr int kLanes = V::kLanes, kBatch = kWide ? 2 : sizeof(S) == 8 ? 4 : 8;
  __shared__ Columns<T, kLanes> columns[2];
  const F formula(chosen);
  Position<kLanes> p(w);
  const Affine<T, kLanes> affine(t, Channels<kLanes>(w, p.column));
  T sum[kLanes] = {}, product[kLanes] = {};
  for_vectors<kBatch, Gradient<S, kWide>>(w, t, p, [&](const Gradient<S, kWide>& loaded) {
    V g, x;
    loaded.get(formula, affine, t.other != nullptr, g.lane, x.lane);
    if (t.grad_residual != nullptr) g.store(t.grad_residual + loaded.at);
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      const T d = g.lane[k] * loaded.scale;
      sum[k] += d;
      product[k] += d * (x.lane[k] - affine.mean[k]);
      g.lane[k] = d * affine.scale[k];
    }
    if (t.out != nullptr) g.store(t.out + loaded.at);
  });
  gather(sum, w.across, columns[0]);
  gather(product, w.across, columns[1]);
  __syncthreads();
  for_segments<2, kLanes>(w, columns, [&](int segment, int, const T(&sums)[2]) {
    double* share = share_of(w, shares, segment);
    share[0] = sums[0];
    share[w.groups * share_width(w)] = sums[1];
  });
}

template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_sums_kernel(Walk w, const double* shares, const T* invstd, double* sums, T* grad_weight,
                      T* grad_bias) {
  // equal (- for +, the next thread): lanes, or blocks, only change places
  const int64_t channel = int64_t(blockIdx.x) * kMergeChannels + threadIdx.x % kMergeChannels;
  double a = 0, b = 0;
  if (channel < w.channels) {
    for_shares(w, channel, [&](int64_t at, int64_t, int) {
      a += shares[at];
      b += shares[w.groups * share_width(w) + at];
    });
  }
  Pair sum = merge(a, b);
  if (threadIdx.x >= kMergeChannels || channel >= w.channels) return;
  sum.b *= double(invstd[channel]);
  sums[channel] = sum.a;
  sums[w.channels + channel] = sum.b;
  if (grad_weight != nullptr) grad_weight[channel] = T(sum.b);
  if (grad_bias != nullptr) grad_bias[channel] = T(sum.a);
}

template <class F, class S, bool kWide>
struct Reduce {
  static constexpr auto* kernel = &reduce_kernel<F, S, kWide>;
};

// All of a training backward, of whole channels. f' is computed twice.
template <class S, class T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(Chosen<T> chosen, Walk w, Tensors<S> t, T* grad_weight, T* grad_bias,
                    double inverse) {
  using V = Vec<S>;
  constexpr int kLanes = V::kLanes;
  __shared__ Columns<T, kLanes> columns;
  __shared__ T averages[2][kWarp * kLanes];  // of segments: of d, of d (x - mean) invstd^2
  const Position<kLanes> begin(w);
  Kept<S> kept(w, begin);
  const Packed<S>*grad = kept.begin(t.grad), *x = kept.begin(t.x), *other = kept.begin(t.other);
  const Channels<kLanes> channels(w, begin.column);
  const Affine<T, kLanes> affine(t, channels);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  // Calls f(at, scale, g, x) for each of the thread's vectors.
  const auto for_gradients = [&](auto f) {
    with_formula(chosen, [&](const auto& formula) {
      Position<kLanes> p = begin;
      for (int j = 0; j < p.left; ++j) {
        V g, input;
        const int64_t at = p.next(w);
        const Gradient<S, true> loaded = {kept.get(grad, j), kept.get(x, j), kept.get(other, j), at,
                                          t.scale_of(w, at)};
        loaded.get(formula, affine, t.other != nullptr, g.lane, input.lane);
        f(at, loaded.scale, g, input);
      }
    });
  };
  T sum[kLanes] = {}, product[kLanes] = {};
  for_gradients([&](int64_t at, T scale, V& g, const V& input) {
    if (t.grad_residual != nullptr) g.store(t.grad_residual + at);
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      const T d = g.lane[k] * scale;
      sum[k] += d;
      product[k] += d * (input.lane[k] - affine.mean[k]);
    }
  });
  const int64_t first = Block(w).first_column / w.of_channel;
  gather(sum, w.across, columns);
  __syncthreads();
  for_segments<1, kLanes>(w, &columns, [&](int segment, int, const T(&sums)[1]) {
    if (grad_bias != nullptr) grad_bias[first + segment] = sums[0];
    averages[0][segment] = T(double(sums[0]) * inverse);
  });
  __syncthreads();
  gather(product, w.across, columns);
  __syncthreads();
  for_segments<1, kLanes>(w, &columns, [&](int segment, int, const T(&sums)[1]) {
    const T invstd = t.invstd[first + segment];
    const double slope = double(sums[0]) * double(invstd);
    if (grad_weight != nullptr) grad_weight[first + segment] = T(slope);
    averages[1][segment] = invstd * T(slope * inverse);
  });
  __syncthreads();
  for_gradients([&](int64_t at, T scale, V& g, const V& input) {
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      const int segment = int(channels.first - first) + channels.after[k];
      const T slope = averages[1][segment], centered = input.lane[k] - affine.mean[k];
      g.lane[k] = (g.lane[k] * scale - (averages[0][segment] + centered * slope)) * affine.scale[k];
    }
    g.store(t.out + at);
  });
}

}  // namespace

void reduce(const BatchNorm& n, const BatchNormBackward& b, double* workspace, void* stream) {
  if (n.rows * n.channels * n.inner == 0) return;
  by_dtype(n.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    using T = typename Compute<S>::T;
    Tensors<S> t = tensors_of<S>(n, b);
    if (b.averages == nullptr) t.out = static_cast<S*>(b.grad_input);
    const Walk w = t.walk(n);
    launch(kernel_of<Reduce, S>(n.op, w.wide), w.parts.value * w.groups, kThreads, stream, 0,
           chosen<S>(n.op, n.parameters), w, t, workspace);
    launch(&merge_sums_kernel<T>, ceil_div(n.channels, kMergeChannels), kMergeThreads, stream, 0, w,
           static_cast<const double*>(workspace), t.invstd, b.sums, static_cast<T*>(b.grad_weight),
           static_cast<T*>(b.grad_bias));
  });
}

bool backward_whole(const BatchNorm& n, const BatchNormBackward& b, void* stream) {
  bool launched = false;
  by_dtype(n.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    if constexpr (sizeof(S) < 8) {
      Tensors<S> t = tensors_of<S>(n, b);
      t.out = static_cast<S*>(b.grad_input);
      launched =
          launch_whole(&backward_kernel<S, float>, n, t, stream, static_cast<float*>(b.grad_weight),
                       static_cast<float*>(b.grad_bias), 1.0 / b.count);
    }
  });
  return launched;
}

}  // namespace cuda
}  // namespace fusedtrain
