// The statistics of batch norm: mean and variance of each channel.
//
// Blocks add up in float (consumer GPUs do 64 float operations in the time of a double one), and
// what they leave is merged in double. They add up x - shift and its square, `shift` being the mean
// of the first element of each thread and lane of a channel: one subtraction more than plain sums,
// where Welford's method takes a division. Rounding errs by eps n shift error^2 in the sum of n
// squares. However far off an outlier pulls the shift, n / threads <= kMostVectors of this is
// real: 1.5e-5 of the variance at worst. With the first element of all as the shift it could be eps
// n, which is 4e-3 in a block of 65536.
#include "batch_norm_whole.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// Calls f(segment, mean, squares) for each segment, in one thread: the mean, and the sum of the
// squares of what is left without it. `load(vector, p, number)` loads a thread's.
template <class S, bool kWide, class Load, class F>
__device__ __forceinline__ void for_statistics(const Walk& w,
                                               const Position<Vec<S, kWide>::kLanes>& begin,
                                               Load load, F f) {
  using V = Vec<S, kWide>;
  using T = typename V::T;
  constexpr int kLanes = V::kLanes, kBatch = kWide ? 4 : 16;
  __shared__ Columns<T, kLanes> columns[2];
  __shared__ T shifts[kWarp * kLanes];  // of segments

  T shift[kLanes] = {};
  Position<kLanes> p = begin;
  if (p.left > 0) {
    Packed<S, kWide> first;
    load(first, p, 0);
    first.get(shift);
  }
  p = begin;
  gather(shift, w.across, columns[0]);
  __syncthreads();
  const int vectors = Block(w).vectors(w), threads = kThreads / w.across;
  for_segments<1, kLanes>(w, columns, [&](int segment, int of_segment, const T(&sums)[1]) {
    const T mean = sums[0] / T((vectors < threads ? vectors : threads) * of_segment);
    // The mean of infinite x is infinite, but x - inf would be nan.
    // equal (< for <=): the bound less 1 is rounded to the bound
    shifts[segment] = formulas::math::abs(mean) <= formulas::Constants<T>::kHuge ? mean : T(0);
  });
  __syncthreads();
  const Channels<kLanes> channels(w, p.column);
  const int segment = int(channels.first - Block(w).first_column / w.of_channel);
#pragma unroll
  for (int k = 0; k < kLanes; ++k) shift[k] = shifts[segment + channels.after[k]];

  T sum[kLanes] = {}, squares[kLanes] = {};
  for (int done = 0; p.left > 0; p.left -= kBatch, done += kBatch) {  // equal (>= for >): the end
    Packed<S, kWide> loaded[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (j < p.left) load(loaded[j], p, done + j);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (j >= p.left) continue;
      T value[kLanes];
      loaded[j].get(value);
#pragma unroll
      for (int k = 0; k < kLanes; ++k) {
        const T d = value[k] - shift[k];
        sum[k] += d;
        squares[k] += d * d;
      }
    }
  }
  gather(sum, w.across, columns[0]);
  gather(squares, w.across, columns[1]);
  __syncthreads();
  for_segments<2, kLanes>(w, columns, [&](int segment, int of_segment, const T(&sums)[2]) {
    // In double, once a segment: the quotient of floats is off by 2 ULP, and so would be the mean
    // of a constant, or of numbers with a few far off.
    const double mean = double(sums[0]) / (double(vectors) * of_segment);
    f(segment, double(shifts[segment]) + mean,
      formulas::math::at_least(sums[1] - sums[0] * T(mean), T(0)));
  });
}

template <class S, bool kWide>
__global__ void __launch_bounds__(kThreads, 3)
    statistics_kernel(Walk w, const S* x, double* shares) {
  const Position<Vec<S, kWide>::kLanes> p(w);
  const auto load = [&](auto& v, auto& p, int) { v.load(x + p.next(w)); };
  for_statistics<S, kWide>(w, p, load, [&](int segment, double mean, double squares) {
    double* share = share_of(w, shares, segment);
    share[0] = mean;
    share[w.groups * share_width(w)] = squares;
  });
}

// How many elements are in a share.
__device__ __forceinline__ double in_share(const Walk& w, int64_t group, int columns) {
  const int64_t left = w.vectors - group * w.per_group;
  return double(left < w.per_group ? left : w.per_group) * columns;
}

// Keeps what later passes and eval mode take of a channel's statistics.
template <class T>
__device__ __forceinline__ void finish(const BatchNormStatistics& s, int64_t channel,
                                       double average, double variance, double count, T* mean,
                                       T* invstd) {
  mean[channel] = T(average);
  invstd[channel] = T(1.0 / formulas::math::sqrt(variance + s.eps));
  if (s.running_mean == nullptr) return;
  const auto move = [&](void* running, double to) {
    T* value = static_cast<T*>(running) + channel;
    *value = T((1.0 - s.momentum) * double(*value) + s.momentum * to);
  };
  move(s.running_mean, average);
  move(s.running_var, variance * (count / (count - 1.0)));
}

template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_statistics_kernel(Walk w, const double* shares, BatchNormStatistics s, T* mean, T* invstd,
                            double count) {
  // equal (- for +, the next thread): lanes, or blocks, only change places
  const int64_t channel = int64_t(blockIdx.x) * kMergeChannels + threadIdx.x % kMergeChannels;
  double a = 0, b = 0, shift = 0;
  if (channel < w.channels && w.groups > 0) {
    shift = shares[channel + channel * w.of_channel.value / w.block_columns];
    // equal (< for <=): the bound less 1 is rounded to the bound
    if (!(formulas::math::abs(shift) <= formulas::Constants<double>::kHuge)) shift = 0;
    for_shares(w, channel, [&](int64_t at, int64_t group, int columns) {
      const double n = in_share(w, group, columns), d = shares[at] - shift;
      a += n * d;
      b += shares[w.groups * share_width(w) + at] + n * d * d;
    });
  }
  const Pair sum = merge(a, b);
  if (threadIdx.x >= kMergeChannels || channel >= w.channels) return;
  const double off = sum.a / count, average = shift + off;
  const double variance = formulas::math::at_least((sum.b - sum.a * off) / count, 0.0);
  s.average[channel] = average;
  s.variance[channel] = variance;
  if (mean != nullptr) finish(s, channel, average, variance, count, mean, invstd);
}

// All of a training forward, of whole channels.
template <class S, class T>
__global__ void __launch_bounds__(kThreads, 3)
    train_kernel(Chosen<T> chosen, Walk w, Tensors<S> t, BatchNormStatistics s, T* mean, T* invstd,
                 double count) {
  constexpr int kLanes = Vec<S>::kLanes;
  Position<kLanes> p(w);
  Kept<S> kept(w, p);
  const Packed<S>*x = kept.begin(t.x), *other = kept.begin(t.other);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  const auto load = [&](auto& v, auto&, int j) { v = kept.get(x, j); };
  for_statistics<S, true>(w, p, load, [&](int segment, double average, double squares) {
    const int64_t channel = Block(w).first_column / w.of_channel + segment;
    finish(s, channel, average, squares / count, count, mean, invstd);
  });
  __syncthreads();
  const Affine<T, kLanes> affine(t, Channels<kLanes>(w, p.column));
  with_formula(chosen, [&](const auto& formula) {
    for (int j = 0; j < p.left; ++j) {
      Vec<S> y, residual;
      kept.get(x, j).get(y.lane);
      kept.get(other, j).get(residual.lane);
      const int64_t at = p.next(w);
      const T scale = t.scale_of(w, at);
#pragma unroll
      for (int k = 0; k < kLanes; ++k)
        y.lane[k] = formula.forward(affine(y.lane[k], k) * scale + residual.lane[k]);
      y.store(t.out + at);
    }
  });
}

}  // namespace

int64_t batch_norm_workspace(const BatchNorm& n) {
  if (n.rows * n.channels * n.inner == 0) return 0;
  int64_t most = 0;
  by_kind(n.dtype, [&](auto* null, auto wide) {
    const int64_t shares = shares_of(walk_for(n, 16 / sizeof *null, wide));
    if (shares > most) most = shares;
  });
  return most;
}

void statistics(const BatchNorm& n, const BatchNormStatistics& s, double* workspace, void* stream) {
  if (n.channels == 0) return;
  const int64_t count = n.rows * n.inner;
  by_dtype(n.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    using T = typename Compute<S>::T;
    Walk w = {};
    w.channels = n.channels;
    if (count > 0) {
      const Tensors<S> t(n);
      w = t.walk(n);
      auto* kernel = &statistics_kernel<S, false>;
      if constexpr (sizeof(S) < 8)
        if (w.wide) kernel = &statistics_kernel<S, true>;
      launch(kernel, w.parts.value * w.groups, kThreads, stream, 0, w, t.x, workspace);
    }
    launch(&merge_statistics_kernel<T>, ceil_div(n.channels, kMergeChannels), kMergeThreads, stream,
           0, w, static_cast<const double*>(workspace), s, static_cast<T*>(n.mean),
           static_cast<T*>(n.invstd), double(count > 0 ? count : 1));
  });
}

bool train_whole(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f,
                 void* stream) {
  bool launched = false;
  by_dtype(n.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    if constexpr (sizeof(S) < 8) {
      Tensors<S> t(n);
      t.other = static_cast<const S*>(f.residual);
      t.out = static_cast<S*>(f.y);
      launched = launch_whole(&train_kernel<S, float>, n, t, stream, s, static_cast<float*>(n.mean),
                              static_cast<float*>(n.invstd), double(n.rows * n.inner));
    }
  });
  return launched;
}

}  // namespace cuda
}  // namespace fusedtrain
