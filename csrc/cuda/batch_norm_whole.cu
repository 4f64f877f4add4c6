// Both passes of batch norm's training, in one launch each.
#include "batch_norm_whole.cuh"

#include "batch_norm_gradient.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// Sums as those of statistics_kernel: of x - shift and its square, `shift` being the mean of the
// first element of each thread and lane.
template <class F, class S>
__global__ void __launch_bounds__(kThreads, 2)
    train_kernel(Chosen<typename F::T> chosen, Walk w, Tensors<S> t, BatchNormStatistics s,
                 typename F::T* mean, typename F::T* invstd, double count) {
  using V = Vec<S>;
  using T = typename V::T;
  constexpr int kLanes = V::kLanes;
  FT_DYNAMIC_SHARED(memory);
  alignas(16) __shared__ T columns[kThreads * kLanes];
  __shared__ T shifts[kThreads];
  unsigned char* free = memory;
  Position<kLanes> p(w);
  const Kept<S> x(w, p, t.x, free), other(w, p, t.other, free);
  const F formula(chosen);
  const Channels<kLanes> channels(w, p.column);
  const Team team(w);
  settled();

  T shift[kLanes] = {}, sum[kLanes] = {}, squares[kLanes] = {};
  if (p.left > 0) x[0].get(shift);
  const int threads = kThreads / w.across;
  const T firsts = team.sum(w, shift, columns);
  if (team.leads()) {
    const int rows = w.vectors < threads ? int(w.vectors) : threads;
    const T average = firsts / T(rows * team.of_channel);
    // The mean of infinite x is infinite, but x - inf would be nan.
    // equal (< for <=): the bound less 1 is rounded to the bound
    shifts[team.segment] =
        formulas::math::abs(average) <= formulas::Constants<T>::kHuge ? average : T(0);
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kLanes; ++k)
    shift[k] = shifts[int(channels.first - team.first) + channels.after[k]];
  for (int j = 0; j < p.left; ++j) {
    T value[kLanes];
    x[j].get(value);
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      const T d = value[k] - shift[k];
      sum[k] += d;
      squares[k] += d * d;
    }
  }
  const T total = team.sum(w, sum, columns), of_squares = team.sum(w, squares, columns);
  if (team.leads()) {
    const double off = double(total) / count;
    const double rest = formulas::math::at_least(of_squares - total * T(off), T(0));
    finish(s, team.channel(), double(shifts[team.segment]) + off, rest / count, count, mean,
           invstd);
  }
  __syncthreads();

  const Affine<T, kLanes> affine(t, channels);
  for (int j = 0; j < p.left; ++j) {
    V y, residual;
    x[j].get(y.lane);
    other[j].get(residual.lane);
    const int64_t at = p.next(w);
    const T scale = t.scale_of(w, at);
#pragma unroll
    for (int k = 0; k < kLanes; ++k)
      y.lane[k] = formula.forward(affine(y.lane[k], k) * scale + residual.lane[k]);
    y.store(t.out + at);
  }
}

template <class F, class S>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(Chosen<typename F::T> chosen, Walk w, Tensors<S> t, typename F::T* grad_weight,
                    typename F::T* grad_bias, double inverse) {
  using V = Vec<S>;
  using T = typename V::T;
  constexpr int kLanes = V::kLanes;
  FT_DYNAMIC_SHARED(memory);
  alignas(16) __shared__ T columns[kThreads * kLanes];
  __shared__ T averages[2][kThreads];
  unsigned char* free = memory;
  Position<kLanes> p(w);
  const Kept<S> grad(w, p, t.grad, free), x(w, p, t.x, free), other(w, p, t.other, free);
  const F formula(chosen);
  const Channels<kLanes> channels(w, p.column);
  const Affine<T, kLanes> affine(t, channels);
  const Team team(w);
  settled();

  Gradient<S, true> loaded;
  const auto next = [&](int j, Position<kLanes>& p) {
    loaded.at = p.next(w);
    loaded.grad = grad[j];
    loaded.input = x[j];
    loaded.other = other[j];
    loaded.scale = t.scale_of(w, loaded.at);
  };
  V g, input;
  T sum[kLanes] = {}, product[kLanes] = {};
  Position<kLanes> first = p;
  for (int j = 0; j < p.left; ++j) {
    next(j, first);
    loaded.get(formula, affine, t.other != nullptr, g.lane, input.lane);
    if (t.grad_residual != nullptr) {
      g.store(t.grad_residual + loaded.at);
      grad.put(j, g);
    }
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      const T d = g.lane[k] * loaded.scale;
      sum[k] += d;
      product[k] += d * (input.lane[k] - affine.mean[k]);
    }
  }
  const T total = team.sum(w, sum, columns), of_products = team.sum(w, product, columns);
  if (team.leads()) {
    const int64_t channel = team.channel();
    const double slope = double(of_products) * double(t.invstd[channel]);
    if (grad_weight != nullptr) grad_weight[channel] = T(slope);
    if (grad_bias != nullptr) grad_bias[channel] = total;
    averages[0][team.segment] = T(double(total) * inverse);
    averages[1][team.segment] = t.invstd[channel] * T(slope * inverse);
  }
  __syncthreads();

  for (int j = 0; j < p.left; ++j) {
    next(j, p);
    if (t.grad_residual != nullptr) {  // f' has been applied
      loaded.grad.get(g.lane);
      loaded.input.get(input.lane);
    } else {
      loaded.get(formula, affine, t.other != nullptr, g.lane, input.lane);
    }
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      const int segment = int(channels.first - team.first) + channels.after[k];
      const T d = g.lane[k] * loaded.scale -
                  (averages[0][segment] + (input.lane[k] - affine.mean[k]) * averages[1][segment]);
      g.lane[k] = d * affine.scale[k];
    }
    g.store(t.out + loaded.at);
  }
}

// No kernels for vectors of one element.
template <class F, class S, bool kWide>
struct Train {
  static constexpr decltype(&train_kernel<F, S>) kernel = nullptr;
};
template <class F, class S>
struct Train<F, S, true> {
  static constexpr auto* kernel = &train_kernel<F, S>;
};
template <class F, class S, bool kWide>
struct Backward {
  static constexpr decltype(&backward_kernel<F, S>) kernel = nullptr;
};
template <class F, class S>
struct Backward<F, S, true> {
  static constexpr auto* kernel = &backward_kernel<F, S>;
};

// Calls f with a null pointer of the stored type, where there are wide vectors of it.
template <class F>
bool by_wide_dtype(Dtype dtype, F f) {
  bool launched = false;
  by_dtype(dtype, [&](auto* null) {
    if constexpr (sizeof *null < 8) launched = f(null);
  });
  return launched;
}

}  // namespace

bool train_whole(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f,
                 void* stream) {
  return by_wide_dtype(n.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    Tensors<S> t(n);
    t.other = static_cast<const S*>(f.residual);
    t.out = static_cast<S*>(f.y);
    return launch_whole<Train>(n, t, stream, s, static_cast<float*>(n.mean),
                               static_cast<float*>(n.invstd), double(n.rows * n.inner));
  });
}

bool backward_whole(const BatchNorm& n, const BatchNormBackward& b, void* stream) {
  return by_wide_dtype(n.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    Tensors<S> t = tensors_of<S>(n, b);
    t.out = static_cast<S*>(b.grad_input);
    return launch_whole<Backward>(n, t, stream, static_cast<float*>(b.grad_weight),
                                  static_cast<float*>(b.grad_bias), 1.0 / b.count);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
