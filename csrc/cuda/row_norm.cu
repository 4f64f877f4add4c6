// Norms of rows. Up to 8,192 elements (4,096 of float64) a block of threads keeps a row in
// registers, and backward the sums of its rows, too. Longer rows, and blocks whose elements are
// `inner` apart, are read again for each pass (from the cache, where they fit), and the gradients
// of weight and bias are sums over channels (channels.cuh).
#include "../ops/row_norm.h"
#include "../vecmath.h"
#include "channels.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kMostThreads = 512;
// Elements of a row that a thread keeps. With 16 doubles backward would spill 248 bytes.
template <class S>
constexpr int kMostOfThread = sizeof(S) == 8 ? 8 : 16;
template <class S>
constexpr int kMostElements = kMostThreads * kMostOfThread<S>;
constexpr int kFarThreads = 128;  // of far_forward_kernel and far_backward_kernel
constexpr int kChunk = 64;        // elements that a thread adds up in the type computed in
// At least. A block needs about 1 us for a row (a load, two sums over the block): with 16 rows a
// share backward of 1,024 rows would take 16 us, of 5 MB.
constexpr int64_t kRowsAShare = 4;

// In all threads: the sum over the block. Any number of whole warps.
template <class T>
__device__ __forceinline__ T total_of(T value, T* scratch) {
  value = warp_sum(value);
  __syncthreads();
  // equal (the next thread #1): lanes only change places
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  T total = T(0);
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) total += scratch[warp];
  return total;
}

// Element i of weight or bias.
template <class S>
__device__ __forceinline__ typename Compute<S>::T affine(const void* p, bool wide, int64_t i,
                                                         typename Compute<S>::T otherwise) {
  using T = typename Compute<S>::T;
  if (p == nullptr) return otherwise;
  return wide ? static_cast<const T*>(p)[i] : load_one(static_cast<const S*>(p)[i]);
}

// 1 / sqrt(variance + eps), of the averages of squares of distances, and of the distances. In
// float32 a step of Newton's from the approximate division and root; for 0 and infinity the guess
// is right, and the error NaN.
__device__ __forceinline__ float rstd_of(float squares, float off, double eps) {
  const float sum = formulas::math::at_least(squares - off * off, 0.0f) + float(eps),
              guess = 1.0f / sqrtf(sum), root = sum * guess;
  const float error = fmaf(-fmaf(sum, guess, -root), guess, fmaf(-root, guess, 1.0f));
  // equal (<= for <): the error is 1e-7 or NaN
  return fabsf(error) < 1.0f ? fmaf(0.5f * guess, error, guess) : guess;
}
__device__ __forceinline__ double rstd_of(double squares, double off, double eps) {
  return 1.0 / ::sqrt(formulas::math::at_least(squares - off * off, 0.0) + eps);
}

// The sum of input and residual, as it is stored.
template <class S>
__device__ __forceinline__ typename Compute<S>::T rounded(typename Compute<S>::T x) {
  return load_one(store_one<S>(x));
}

// --- rows in registers ---

template <class S, bool kWide, int kPer>
__global__ void __launch_bounds__(kMostThreads, 1)
    rows_forward_kernel(const RowNormForward c, typename Compute<S>::T inverse) {
  using V = Vec<S, kWide>;
  using T = typename V::T;
  __shared__ T scratch[kMostThreads / kWarp];
  const int64_t row = blockIdx.x, start = row * c.n;
  const int each = int(c.n / V::kLanes);
  V x[kPer];
  T sum = T(0);
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x + j * blockDim.x;
    if (at >= each) continue;
    const int64_t place = start + int64_t(at) * V::kLanes;
    x[j].load(static_cast<const S*>(c.x) + place);
    if (c.residual != nullptr) {
      V other;
      other.load(static_cast<const S*>(c.residual) + place);
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) x[j].lane[l] = rounded<S>(x[j].lane[l] + other.lane[l]);
      x[j].store(static_cast<S*>(c.sum) + place);
    }
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) sum += x[j].lane[l];
  }
  const T mean = c.centered ? total_of(sum, scratch) * inverse : T(0);
  T squares = T(0), distances = T(0);
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (threadIdx.x + j * blockDim.x >= each) continue;
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) {
      x[j].lane[l] -= mean;
      distances += x[j].lane[l];
      squares += x[j].lane[l] * x[j].lane[l];
    }
  }
  const T off = c.centered ? total_of(distances, scratch) * inverse : T(0);
  const T rstd = rstd_of(total_of(squares, scratch) * inverse, off, c.eps);
  if (threadIdx.x == 0) {  // equal (the next thread): all threads have them
    if (c.centered) static_cast<T*>(c.mean)[row] = mean + off;
    static_cast<T*>(c.rstd)[row] = rstd;
  }
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x + j * blockDim.x;
    if (at >= each) continue;
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) {
      const int64_t i = int64_t(at) * V::kLanes + l;
      x[j].lane[l] = (x[j].lane[l] - off) * rstd * affine<S>(c.weight, c.wide_affine, i, T(1)) +
                     affine<S>(c.bias, c.wide_affine, i, T(0));
    }
    x[j].store(static_cast<S*>(c.y) + start + int64_t(at) * V::kLanes);
  }
}

// Sums of a thread, in stores of 16 bytes where its vectors are.
template <class V>
__device__ __forceinline__ void leave(const typename V::T (&sum)[V::kLanes],
                                      typename V::T* shares) {
  Vec<typename V::T, V::kIsWide> part;
#pragma unroll
  for (int l = 0; l < V::kLanes; ++l) {
    part.lane[l % part.kLanes] = sum[l];
    if (l % part.kLanes == part.kLanes - 1) part.store(shares + l - l % part.kLanes);
  }
}

// Rows blockIdx.x, blockIdx.x + gridDim.x, ...; shares is [blocks, 2, n] (or null).
template <class S, bool kWide, int kPer>
__global__ void __launch_bounds__(kMostThreads, 1)
    rows_backward_kernel(const RowNormBackward c, typename Compute<S>::T inverse) {
  using V = Vec<S, kWide>;
  using T = typename V::T;
  __shared__ T scratch[kMostThreads / kWarp];
  const int each = int(c.n / V::kLanes);
  T of_weight[kPer][V::kLanes] = {}, of_bias[kPer][V::kLanes] = {};
  for (int64_t row = blockIdx.x; row < c.rows; row += gridDim.x) {
    const int64_t start = row * c.n;
    const T rstd = static_cast<const T*>(c.rstd)[row];
    const T mean = c.centered ? static_cast<const T*>(c.mean)[row] : T(0);
    V x[kPer], g[kPer];  // the norm, and the gradient times weight
    T terms = T(0), products = T(0);
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int at = threadIdx.x + j * blockDim.x;
      if (at >= each) continue;
      x[j].load(static_cast<const S*>(c.x) + start + int64_t(at) * V::kLanes);
      g[j].load(static_cast<const S*>(c.grad) + start + int64_t(at) * V::kLanes);
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) {
        x[j].lane[l] = (x[j].lane[l] - mean) * rstd;
        of_weight[j][l] += g[j].lane[l] * x[j].lane[l];
        of_bias[j][l] += g[j].lane[l];
        g[j].lane[l] *= affine<S>(c.weight, c.wide_affine, int64_t(at) * V::kLanes + l, T(1));
        terms += g[j].lane[l];
        products += g[j].lane[l] * x[j].lane[l];
      }
    }
    const T of_mean = c.centered ? total_of(terms, scratch) * inverse : T(0);
    const T of_norm = total_of(products, scratch) * inverse;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int at = threadIdx.x + j * blockDim.x;
      if (at >= each) continue;
      const int64_t place = start + int64_t(at) * V::kLanes;
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l)
        g[j].lane[l] = (g[j].lane[l] - of_mean - x[j].lane[l] * of_norm) * rstd;
      if (c.grad_sum != nullptr) {
        V more;
        more.load(static_cast<const S*>(c.grad_sum) + place);
#pragma unroll
        for (int l = 0; l < V::kLanes; ++l) g[j].lane[l] += more.lane[l];
      }
      g[j].store(static_cast<S*>(c.grad_input) + place);
    }
  }
  if (c.grad_weight == nullptr && c.grad_bias == nullptr) return;
  T* share = shares_in<S>(c.shares) + int64_t(blockIdx.x) * 2 * c.n;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x + j * blockDim.x;
    if (at >= each) continue;
    leave<V>(of_weight[j], share + int64_t(at) * V::kLanes);
    leave<V>(of_bias[j], share + c.n + int64_t(at) * V::kLanes);
  }
}

// An approximate division in a kernel would leave (scaled - mean) rstd 2 ULP of `scaled`, times a
// large rstd.
template <class T>
T inverse_of(const RowNorm& c) {
  return T(1.0 / double(c.n));
}

int64_t blocks_of(const RowNorm& c) {
  const int64_t most = int64_t(multiprocessors()) * 4, wanted = ceil_div(c.rows, kRowsAShare);
  return wanted < most ? wanted : most;
}

bool is_near(const RowNorm& c) {
  const bool wide = c.dtype == Dtype::kFloat64;
  return c.inner == 1 && c.n <= (wide ? kMostElements<double> : kMostElements<float>);
}

// Calls launched(kernels, threads) with the instance for rows of so many elements.
template <class S, class F>
void with_rows(const RowNorm& c, bool aligned, const F& f) {
  const auto by_length = [&](auto wide) {
    constexpr bool kWide = decltype(wide)::value;
    constexpr int kLanes = Vec<S, kWide>::kLanes;
    const int64_t each = c.n / kLanes;
    // equal (< for <=): longer rows of one vector a thread take more of them
    if (each <= kMostThreads)
      f(wide, std::integral_constant<int, 1>(), int(ceil_div(each, kWarp) * kWarp));
    else
      f(wide, std::integral_constant<int, kMostOfThread<S> / kLanes>(),
        int(ceil_div(each, kWarp * kMostOfThread<S> / kLanes) * kWarp));
  };
  if constexpr (sizeof(S) < 8)
    if (aligned && c.n % Vec<S>::kLanes == 0) return by_length(std::true_type());
  by_length(std::false_type());
}

// --- blocks that are read again for each pass ---

// kColumns: a thread has a block of elements `inner` apart. Else a block of threads has a row.
template <class T, bool kColumns>
struct Far {
  T* scratch;
  int64_t n, first, step, place, stride;
  int64_t statistic;
  bool exists;

  __device__ __forceinline__ Far(const RowNorm& c, T* scratch) : scratch(scratch), n(c.n) {
    statistic = kColumns ? int64_t(blockIdx.x) * kFarThreads + threadIdx.x : blockIdx.x;
    exists = statistic < c.rows * c.inner;
    const int64_t row = statistic / c.inner;
    place = row * c.n * c.inner + (statistic - row * c.inner);
    stride = c.inner;
    first = kColumns ? 0 : threadIdx.x;
    step = kColumns ? 1 : kFarThreads;
    if (!exists) n = 0;
  }
  // f(place, number within the block) for the thread's elements.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    for (int64_t k = first; k < n; k += step) f(place + k * stride, k);
  }
  // The sum over the block of what f returns.
  template <class F>
  __device__ __forceinline__ double sum(const F& f) const {
    double total = 0;
    for (int64_t k = first; k < n;) {
      T part = T(0);
      for (int i = 0; i < kChunk && k < n; ++i, k += step) part += f(place + k * stride, k);
      total += double(part);
    }
    return kColumns ? total : double(total_of(T(total), scratch));
  }
};

template <class S, bool kColumns>
__global__ void __launch_bounds__(kFarThreads, 1)
    far_forward_kernel(const RowNormForward c, typename Compute<S>::T inverse) {
  using T = typename Compute<S>::T;
  __shared__ T scratch[kFarThreads / kWarp];
  const Far<T, kColumns> block(c, scratch);
  const S* x = static_cast<const S*>(c.x);
  if (c.residual != nullptr) {
    S* sum = static_cast<S*>(c.sum);
    block.each([&](int64_t at, int64_t) {
      sum[at] = store_one<S>(load_one(x[at]) + load_one(static_cast<const S*>(c.residual)[at]));
    });
    x = sum;  // each thread reads what it has written
  }
  T mean = T(0);
  if (c.centered)
    mean = T(block.sum([&](int64_t at, int64_t) { return load_one(x[at]); })) * inverse;
  const auto distance = [&](int64_t at, int64_t) { return load_one(x[at]) - mean; };
  const T off = c.centered ? T(block.sum(distance)) * inverse : T(0);
  const T squares = T(block.sum([&](int64_t at, int64_t k) {
    const T d = distance(at, k);
    return d * d;
  }));
  const T rstd = rstd_of(squares * inverse, off, c.eps);
  block.each([&](int64_t at, int64_t k) {
    const T y = (distance(at, k) - off) * rstd * affine<S>(c.weight, c.wide_affine, k, T(1)) +
                affine<S>(c.bias, c.wide_affine, k, T(0));
    static_cast<S*>(c.y)[at] = store_one<S>(y);
  });
  if (!block.exists || block.first != 0) return;
  if (c.centered) static_cast<T*>(c.mean)[block.statistic] = mean + off;
  static_cast<T*>(c.rstd)[block.statistic] = rstd;
}

template <class S, bool kColumns>
__global__ void __launch_bounds__(kFarThreads, 1)
    far_backward_kernel(const RowNormBackward c, typename Compute<S>::T inverse) {
  using T = typename Compute<S>::T;
  __shared__ T scratch[kFarThreads / kWarp];
  const Far<T, kColumns> block(c, scratch);
  const S *x = static_cast<const S*>(c.x), *g = static_cast<const S*>(c.grad);
  const T rstd = block.exists ? static_cast<const T*>(c.rstd)[block.statistic] : T(0);
  const T mean = block.exists && c.centered ? static_cast<const T*>(c.mean)[block.statistic] : T(0);
  const auto scaled = [&](int64_t at, int64_t k) {
    return load_one(g[at]) * affine<S>(c.weight, c.wide_affine, k, T(1));
  };
  const auto norm = [&](int64_t at) { return (load_one(x[at]) - mean) * rstd; };
  T of_mean = T(0);
  if (c.centered) of_mean = T(block.sum(scaled)) * inverse;
  const T of_norm =
      T(block.sum([&](int64_t at, int64_t k) { return scaled(at, k) * norm(at); }) / double(c.n));
  block.each([&](int64_t at, int64_t k) {
    T d = (scaled(at, k) - of_mean - norm(at) * of_norm) * rstd;
    if (c.grad_sum != nullptr) d += load_one(static_cast<const S*>(c.grad_sum)[at]);
    static_cast<S*>(c.grad_input)[at] = store_one<S>(d);
  });
}

// The sums of grad (kInputs 1), or of grad times norm, for channels.cuh.
template <class S_, int kInputs_>
struct AffineJob {
  using S = S_;
  using T = typename Compute<S>::T;
  static constexpr bool kSums = true;
  static constexpr int kInputs = kInputs_;
  const S *grad, *x;
  const T *mean, *rstd;
  int64_t n, inner;
  __device__ __forceinline__ T coefficient(int64_t) const { return T(0); }
  template <class V>
  __device__ __forceinline__ void fetch(int64_t at, Packed<S, V::kIsWide> (&in)[kInputs]) const {
    in[0].load(grad + at);
    if constexpr (kInputs > 1) in[1].load(x + at);
  }
  template <class V>
  __device__ __forceinline__ void run(int64_t at, const Packed<S, V::kIsWide> (&in)[kInputs],
                                      const T (&)[V::kLanes], T (&sum)[V::kLanes]) const {
    const V g = in[0].get();
    if constexpr (kInputs == 1) {
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) sum[l] += g.lane[l];
    } else {
      const V v = in[1].get();
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) {
        const int64_t row = (at + l) / (n * inner), statistic = row * inner + (at + l) % inner;
        const T average = mean == nullptr ? T(0) : mean[statistic];
        sum[l] += g.lane[l] * (v.lane[l] - average) * rstd[statistic];
      }
    }
  }
};

template <class Call, class T>
void run_far(void (*columns)(Call, T), void (*row)(Call, T), const Call& call, void* stream) {
  const int64_t blocks = call.rows * call.inner;
  const bool by_column = call.inner > 1;
  launch(by_column ? columns : row, by_column ? ceil_div(blocks, kFarThreads) : blocks, kFarThreads,
         stream, 0, call, inverse_of<T>(call));
}

}  // namespace

int64_t row_norm_shares(const RowNormBackward& call) {
  if (call.grad_weight == nullptr && call.grad_bias == nullptr) return 0;
  if (is_near(call)) return blocks_of(call) * 2 * call.n;
  return chain_shares({1, call.rows, call.n, call.inner});
}

void compute(const RowNormForward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    if (!is_near(call))
      return run_far(&far_forward_kernel<S, true>, &far_forward_kernel<S, false>, call, stream);
    with_rows<S>(call,
                 aligned(static_cast<const char*>(call.x), static_cast<const char*>(call.residual),
                         static_cast<const char*>(call.sum), static_cast<const char*>(call.y)),
                 [&](auto wide, auto per, int threads) {
                   launch(&rows_forward_kernel<S, decltype(wide)::value, decltype(per)::value>,
                          call.rows, threads, stream, 0, call,
                          inverse_of<typename Compute<S>::T>(call));
                 });
  });
}

void compute(const RowNormBackward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    using T = typename Compute<S>::T;
    const bool fits =
        aligned(static_cast<const char*>(call.grad), static_cast<const char*>(call.grad_sum),
                static_cast<const char*>(call.x), static_cast<const char*>(call.grad_input));
    T *of_weight = static_cast<T*>(call.grad_weight), *of_bias = static_cast<T*>(call.grad_bias);
    if (is_near(call)) {
      const int64_t blocks = blocks_of(call);
      with_rows<S>(call, fits, [&](auto wide, auto per, int threads) {
        launch(&rows_backward_kernel<S, decltype(wide)::value, decltype(per)::value>, blocks,
               threads, stream, 0, call, inverse_of<T>(call));
      });
      if (of_weight != nullptr || of_bias != nullptr)
        add_shares(shares_in<T>(call.shares), of_weight, 2 * call.n, blocks, 1, 2 * call.n, stream,
                   of_bias, call.n);
      return;
    }
    run_far(&far_backward_kernel<S, true>, &far_backward_kernel<S, false>, call, stream);
    const Channels shape = {1, call.rows, call.n, call.inner};
    const S *grad = static_cast<const S*>(call.grad), *x = static_cast<const S*>(call.x);
    const T *mean = static_cast<const T*>(call.mean), *rstd = static_cast<const T*>(call.rstd);
    if (of_weight != nullptr)
      run_job(AffineJob<S, 2>{grad, x, mean, rstd, call.n, call.inner}, shape, fits, call.shares,
              of_weight, stream);
    if (of_bias != nullptr)
      run_job(AffineJob<S, 1>{grad, x, mean, rstd, call.n, call.inner}, shape, fits, call.shares,
              of_bias, stream);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
