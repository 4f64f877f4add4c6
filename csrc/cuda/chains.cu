// Gated products, scaled sums, and bias + activation + dropout.
//
// A tensor with channels is walked in one of two ways. Where `inner` is long (channels first) a
// block takes a part of one sample and channel; where it is short (channels last, or few elements a
// plane) a lane keeps its columns, and the warps of a block share the rows. Sums meet in the block,
// and blocks leave shares that a second kernel adds up: their order is fixed for a device.
#include "../formulas.h"
#include "../philox.h"
#include "batch_norm_formula.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

using formulas::Philox;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kBlocksPerMultiprocessor = 16;

template <class S, class T = typename Compute<S>::T, class Call>
Chosen<T> formula_of(const Call& call) {
  BatchNorm n = {};
  n.op = call.op;
  for (int k = 0; k < kMaxParameters; ++k) n.parameters[k] = call.parameters[k];
  return chosen<S>(n);
}

// --- gated products ---

template <class F, class S, bool kWide>
__global__ void __launch_bounds__(kThreads)
    gated_kernel(const GatedForward call, const Chosen<typename F::T> chosen) {
  using V = Vec<S, kWide>;
  const F formula(chosen);
  const int64_t each = call.n / V::kLanes;
  for (int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x; k < call.rows * each;
       k += int64_t(gridDim.x) * kThreads) {
    const int64_t row = k / each, i = (k - row * each) * V::kLanes;
    V gate, value;
    gate.load(static_cast<const S*>(call.gate) + row * call.gate_stride + i);
    value.load(static_cast<const S*>(call.value) + row * call.value_stride + i);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) value.lane[l] *= formula.forward(gate.lane[l]);
    value.store(static_cast<S*>(call.y) + row * call.n + i);
  }
}

template <class F, class S, bool kWide>
struct GatedForwardPass {
  static constexpr auto* kernel = gated_kernel<F, S, kWide>;
};

template <class F, class S, bool kWide>
__global__ void __launch_bounds__(kThreads)
    gated_backward_kernel(const GatedBackward call, const Chosen<typename F::T> chosen) {
  using V = Vec<S, kWide>;
  const F formula(chosen);
  const int64_t each = call.n / V::kLanes;
  for (int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x; k < call.rows * each;
       k += int64_t(gridDim.x) * kThreads) {
    const int64_t row = k / each, i = (k - row * each) * V::kLanes;
    V grad, gate, value;
    grad.load(static_cast<const S*>(call.grad) + row * call.n + i);
    gate.load(static_cast<const S*>(call.gate) + row * call.gate_stride + i);
    value.load(static_cast<const S*>(call.value) + row * call.value_stride + i);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) {
      const auto open = formula.forward(gate.lane[l]);
      const auto saved = formula.saves_output() ? open : gate.lane[l];
      gate.lane[l] = formula.backward(grad.lane[l] * value.lane[l], saved);
      grad.lane[l] *= open;
    }
    gate.store(static_cast<S*>(call.grad_gate) + row * call.grad_gate_stride + i);
    grad.store(static_cast<S*>(call.grad_value) + row * call.grad_value_stride + i);
  }
}

template <class F, class S, bool kWide>
struct GatedBackwardPass {
  static constexpr auto* kernel = gated_backward_kernel<F, S, kWide>;
};

bool strides_fit(const GatedForward& call, int lanes) {
  return aligned(static_cast<const char*>(call.gate), static_cast<const char*>(call.value),
                 static_cast<const char*>(call.y)) &&
         (call.n | call.gate_stride | call.value_stride) % lanes == 0;
}
bool strides_fit(const GatedBackward& call, int lanes) {
  return aligned(static_cast<const char*>(call.gate), static_cast<const char*>(call.value),
                 static_cast<const char*>(call.grad), static_cast<const char*>(call.grad_gate),
                 static_cast<const char*>(call.grad_value)) &&
         (call.n | call.gate_stride | call.value_stride | call.grad_gate_stride |
          call.grad_value_stride) %
                 lanes ==
             0;
}

template <template <class, class, bool> class Pass, class Call>
void run_gated(const Call& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const bool wide = strides_fit(call, Vec<S>::kLanes) && sizeof(S) < 8;
    const int64_t vectors = call.rows * (call.n / (wide ? Vec<S>::kLanes : 1));
    const int64_t most = int64_t(multiprocessors()) * kBlocksPerMultiprocessor;
    const int64_t blocks = ceil_div(vectors, kThreads);
    launch(kernel_of<Pass, S>(call.op, wide), blocks < most ? blocks : most, kThreads, stream, 0,
           call, formula_of<S>(call));
  });
}

// --- tensors with channels ---

// How a call is cut into blocks: block b works on part b % parts (samples x channels, or x groups
// of columns), and on group b / parts of what is summed over.
struct Plan {
  bool columns, wide;
  int64_t parts, groups;
  int64_t per_group;  // vectors of a part, or rows
  int64_t shares;     // of a group: samples x channels, or x columns
};

template <class S>
Plan plan_for(const Channels& c, bool aligned) {
  Plan plan;
  constexpr int kLanes = Vec<S>::kLanes;
  const int64_t most = int64_t(multiprocessors()) * kBlocksPerMultiprocessor;
  plan.wide = aligned && c.inner % kLanes == 0 && sizeof(S) < 8;
  plan.columns = c.inner / (plan.wide ? kLanes : 1) < kWarp && c.channels > 1;
  int64_t steps;
  if (plan.columns) {
    plan.wide = aligned && c.channels * c.inner % kLanes == 0 && sizeof(S) < 8;
    plan.parts = c.samples * ceil_div(c.channels * c.inner, kWarp * (plan.wide ? kLanes : 1));
    plan.shares = c.samples * c.channels * c.inner;
    steps = ceil_div(c.rows, kWarps);
  } else {
    plan.parts = plan.shares = c.samples * c.channels;
    steps = ceil_div(c.rows * (c.inner / (plan.wide ? kLanes : 1)), kThreads);
  }
  const int64_t wanted = ceil_div(most, plan.parts);
  plan.groups = wanted < steps ? wanted : steps;
  if (plan.groups < 1) plan.groups = 1;
  const int64_t each = ceil_div(steps, plan.groups);
  plan.groups = ceil_div(steps, each);
  plan.per_group = each * (plan.columns ? kWarps : kThreads);
  return plan;
}

// First walk. Job: what is done with a vector of elements; see below.
template <class Job, bool kWide>
__global__ void __launch_bounds__(kThreads, 2)  // without the number ptxas aims at 80 registers
    planes_kernel(const Job job, const Channels c, int64_t per_group, double* shares) {
  using S = typename Job::S;
  using V = Vec<S, kWide>;
  using T = typename V::T;
  const int64_t parts = c.samples * c.channels;
  const int64_t part = blockIdx.x % parts, group = blockIdx.x / parts;
  const int64_t sample = part / c.channels, channel = part - sample * c.channels;
  const int64_t each = c.inner / V::kLanes;
  int64_t last = (group + 1) * per_group;
  if (last > c.rows * each) last = c.rows * each;

  T coefficient[V::kLanes], sum[V::kLanes];
#pragma unroll
  for (int l = 0; l < V::kLanes; ++l) {
    coefficient[l] = job.coefficient(part);
    sum[l] = T(0);
  }
  for (int64_t k = group * per_group + threadIdx.x; k < last; k += kThreads) {
    const int64_t row = k / each, i = (k - row * each) * V::kLanes;
    job.template run<V>(((sample * c.rows + row) * c.channels + channel) * c.inner + i, coefficient,
                        sum);
  }
  if constexpr (Job::kSums) {
    __shared__ T scratch[kWarps];
    T total = T(0);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) total += sum[l];
    total = block_sum<kWarps>(total, scratch);
    if (threadIdx.x == 0) shares[group * parts + part] = total;
  }
}

// Second walk.
template <class Job, bool kWide>
__global__ void __launch_bounds__(kThreads, 2)
    columns_kernel(const Job job, const Channels c, int64_t per_group, double* shares) {
  using S = typename Job::S;
  using V = Vec<S, kWide>;
  using T = typename V::T;
  const int64_t columns = c.channels * c.inner;
  const int64_t across = (columns + kWarp * V::kLanes - 1) / (kWarp * V::kLanes);
  const int64_t parts = c.samples * across;
  const int64_t part = blockIdx.x % parts, group = blockIdx.x / parts;
  const int64_t sample = part / across;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t column = ((part - sample * across) * kWarp + lane) * V::kLanes;
  const bool exists = column < columns;
  int64_t last = (group + 1) * per_group;
  if (last > c.rows) last = c.rows;

  T coefficient[V::kLanes], sum[V::kLanes];
#pragma unroll
  for (int l = 0; l < V::kLanes; ++l) {
    const int64_t channel = exists ? (column + l) / c.inner : 0;
    coefficient[l] = job.coefficient(sample * c.channels + channel);
    sum[l] = T(0);
  }
  if (exists)
    for (int64_t row = group * per_group + warp; row < last; row += kWarps)
      job.template run<V>((sample * c.rows + row) * columns + column, coefficient, sum);
  if constexpr (Job::kSums) {
    __shared__ T scratch[kWarps][kWarp * V::kLanes];
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) scratch[warp][l * kWarp + lane] = sum[l];
    __syncthreads();
    if (warp == 0 && exists) {
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) {
        T total = T(0);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total += scratch[w][l * kWarp + lane];
        shares[(group * c.samples + sample) * columns + column + l] = total;
      }
    }
  }
}

// A warp a sample and channel: the shares of all groups, and of the channel's columns.
template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const double* shares, T* sums, int64_t count, int64_t groups, int64_t columns) {
  const int lane = threadIdx.x % kWarp;
  const int64_t at = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (at >= count) return;
  double sum = 0;
  for (int64_t i = lane; i < groups * columns; i += kWarp) {
    const int64_t group = i / columns;
    sum += shares[(group * count + at) * columns + (i - group * columns)];
  }
  sum = warp_sum(sum);
  if (lane == 0) sums[at] = T(sum);
}

template <class Job, class... P>
void run_job(const Job& job, const Channels& c, double* shares, void* sums, void* stream,
             const P*... pointers) {
  using S = typename Job::S;
  using T = typename Compute<S>::T;
  const Plan plan = plan_for<S>(c, Job::kWide && aligned(pointers...));
  auto* kernel = plan.columns ? &columns_kernel<Job, false> : &planes_kernel<Job, false>;
  if constexpr (Job::kWide)
    if (plan.wide) kernel = plan.columns ? &columns_kernel<Job, true> : &planes_kernel<Job, true>;
  launch(kernel, plan.parts * plan.groups, kThreads, stream, 0, job, c, plan.per_group, shares);
  if (!Job::kSums) return;
  const int64_t count = c.samples * c.channels;
  launch(&finish_kernel<T>, ceil_div(count, kWarps), kThreads, stream, 0,
         static_cast<const double*>(shares), static_cast<T*>(sums), count, plan.groups,
         plan.shares / count);
}

template <class S_>
struct ScaleForwardJob {
  using S = S_;
  using T = typename Compute<S>::T;
  static constexpr bool kSums = false, kWide = sizeof(S) < 8;
  const S *x, *scale, *residual;
  S* y;
  __device__ __forceinline__ T coefficient(int64_t i) const { return load_one(scale[i]); }
  template <class V>
  __device__ __forceinline__ void run(int64_t at, const T (&c)[V::kLanes], T (&)[V::kLanes]) const {
    V v, r;
    v.load(x + at);
    if (residual != nullptr) r.load(residual + at);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) {
      v.lane[l] *= c[l];
      if (residual != nullptr) v.lane[l] += r.lane[l];
    }
    v.store(y + at);
  }
};

// kSums: x is there. grad_input may be null.
template <class S_, bool kSums_>
struct ScaleBackwardJob {
  using S = S_;
  using T = typename Compute<S>::T;
  static constexpr bool kSums = kSums_, kWide = sizeof(S) < 8;
  const S *grad, *x, *scale;
  S* grad_input;
  __device__ __forceinline__ T coefficient(int64_t i) const { return load_one(scale[i]); }
  template <class V>
  __device__ __forceinline__ void run(int64_t at, const T (&c)[V::kLanes],
                                      T (&sum)[V::kLanes]) const {
    V g;
    g.load(grad + at);
    if constexpr (kSums) {
      V v;
      v.load(x + at);
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) sum[l] += g.lane[l] * v.lane[l];
    }
    if (grad_input == nullptr) return;
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) g.lane[l] *= c[l];
    g.store(grad_input + at);
  }
};

// Which of the elements [at, at + lanes) are kept.
template <int kLanes>
__device__ __forceinline__ void keep(const BiasAct& call, int64_t at, bool (&kept)[kLanes]) {
  const uint64_t key = uint64_t(call.seed[0]), high = uint64_t(call.seed[1]);
  // Vectors of 4 or 8 begin where a block does.
#pragma unroll
  for (int l = 0; l < kLanes; l += 4) {
    const Philox random(key, uint64_t(at + l) / 4, high);
    if constexpr (kLanes == 1) {
      const int which = int(at % 4);
      const uint32_t word = which == 0   ? random.word[0]
                            : which == 1 ? random.word[1]
                            : which == 2 ? random.word[2]
                                         : random.word[3];
      kept[0] = word >= call.threshold;
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) kept[l + w] = random.word[w] >= call.threshold;
    }
  }
}

// Any formula in vectors of eight would spill two registers.
template <class F, class S>
constexpr bool may_be_wide =
    sizeof(S) == 4 || (sizeof(S) == 2 && !std::is_same_v<F, AnyFormula<float>>);

template <class Call, class F, class S_>
struct BiasActJob {
  using S = S_;
  using T = typename Compute<S>::T;
  static constexpr bool kWide = may_be_wide<F, S>;
  Call call;
  Chosen<T> chosen;
  __device__ __forceinline__ T coefficient(int64_t i) const {
    return call.bias == nullptr ? T(0) : load_one(static_cast<const S*>(call.bias)[i]);
  }
};

template <class F, class S, bool kDrops>
struct BiasActForwardJob : BiasActJob<BiasActForward, F, S> {
  using typename BiasActJob<BiasActForward, F, S>::T;
  using BiasActJob<BiasActForward, F, S>::call, BiasActJob<BiasActForward, F, S>::chosen;
  static constexpr bool kSums = false;
  template <class V>
  __device__ __forceinline__ void run(int64_t at, const T (&bias)[V::kLanes],
                                      T (&)[V::kLanes]) const {
    const F formula(chosen);
    const T gain = T(call.gain), bound = T(call.clamp);
    bool kept[V::kLanes];
    if constexpr (kDrops) keep<V::kLanes>(call, at, kept);
    V v;
    v.load(static_cast<const S*>(call.x) + at);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) {
      T y = formula.forward(v.lane[l] + bias[l]) * gain;
      if (bound >= T(0)) y = formulas::math::clamp(y, -bound, bound);
      if constexpr (kDrops) y = kept[l] ? y * T(call.keep) : T(0);
      v.lane[l] = y;
    }
    v.store(static_cast<S*>(call.y) + at);
  }
};

template <class F, class S, bool kDrops>
struct BiasActBackwardJob : BiasActJob<BiasActBackward, F, S> {
  using typename BiasActJob<BiasActBackward, F, S>::T;
  using BiasActJob<BiasActBackward, F, S>::call, BiasActJob<BiasActBackward, F, S>::chosen;
  static constexpr bool kSums = true;
  template <class V>
  __device__ __forceinline__ void run(int64_t at, const T (&bias)[V::kLanes],
                                      T (&sum)[V::kLanes]) const {
    const F formula(chosen);
    const T factor = T(call.gain) * (kDrops ? T(call.keep) : T(1)), undo = T(1) / factor;
    const T bound = T(call.clamp);
    bool kept[V::kLanes];
    if constexpr (kDrops) keep<V::kLanes>(call, at, kept);
    V g, s;
    g.load(static_cast<const S*>(call.grad) + at);
    s.load(static_cast<const S*>(call.saved) + at);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) {
      T gradient = g.lane[l] * factor, z = s.lane[l];
      if constexpr (kDrops) gradient = kept[l] ? gradient : T(0);
      if (formula.saves_output()) {
        if (bound >= T(0) && !(formulas::math::abs(z) < bound * (kDrops ? T(call.keep) : T(1))))
          gradient = T(0);
        z *= undo;
      } else {
        z += bias[l];
        if (bound >= T(0) && !(formulas::math::abs(formula.forward(z) * T(call.gain)) < bound))
          gradient = T(0);
      }
      g.lane[l] = formula.backward(gradient, z);
      sum[l] += g.lane[l];
    }
    g.store(static_cast<S*>(call.grad_input) + at);
  }
};

// Every dtype has the kernels of any formula; the common ones of a bias in training their own.
#define FT_CHAIN_FORMULAS(X)                     \
  X(op_identity, Identity, kInput)               \
  X(op_relu, formulas::Relu, kOutput)            \
  X(op_leaky_relu, formulas::LeakyRelu, kOutput) \
  X(op_silu, formulas::Silu, kInput)             \
  X(op_gelu, formulas::Gelu, kInput)             \
  X(op_gelu_tanh, formulas::GeluTanh, kInput)

template <template <class, class, bool> class Job, class S, class Call>
void run_bias_act(const Call& call, double* shares, void* sums, void* stream) {
  using T = typename Compute<S>::T;
  const Chosen<T> formula = formula_of<S>(call);
  const void *a, *b, *c = nullptr;
  if constexpr (std::is_same_v<Call, BiasActForward>) {
    a = call.x, b = call.y;
  } else {
    a = call.grad, b = call.saved, c = call.grad_input;
  }
  const auto go = [&](auto job) {
    run_job(job, call.shape, shares, sums, stream, static_cast<const char*>(a),
            static_cast<const char*>(b), static_cast<const char*>(c));
  };
  const auto with = [&](auto* f) {
    using F = std::remove_pointer_t<decltype(f)>;
    if (call.seed != nullptr)
      go(Job<F, S, true>{call, formula});
    else
      go(Job<F, S, false>{call, formula});
  };
  if constexpr (sizeof(S) < 8) {
#define FT_WITH(number, Formula, saved)                                                     \
  if (call.op == number) return with(static_cast<OneFormula<Formula, saved, T>*>(nullptr));
    FT_CHAIN_FORMULAS(FT_WITH)
#undef FT_WITH
  }
  with(static_cast<AnyFormula<T>*>(nullptr));
}

}  // namespace

void gated(const GatedForward& call, void* stream) { run_gated<GatedForwardPass>(call, stream); }
void gated(const GatedBackward& call, void* stream) { run_gated<GatedBackwardPass>(call, stream); }

// Enough for either walk of any dtype.
int64_t chain_shares(const Channels& c) {
  int64_t most = 0;
  const auto consider = [&](const Plan& plan) {
    if (plan.groups * plan.shares > most) most = plan.groups * plan.shares;
  };
  for (const bool aligned : {false, true}) {
    consider(plan_for<float>(c, aligned));
    consider(plan_for<double>(c, aligned));
    consider(plan_for<__half>(c, aligned));
  }
  return most;
}

void scale_add(const ScaleForward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const ScaleForwardJob<S> job = {static_cast<const S*>(call.x),
                                    static_cast<const S*>(call.scale),
                                    static_cast<const S*>(call.residual), static_cast<S*>(call.y)};
    run_job(job, call.shape, nullptr, nullptr, stream, job.x, job.residual, job.y);
  });
}

void scale_add(const ScaleBackward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const S *grad = static_cast<const S*>(call.grad), *x = static_cast<const S*>(call.x),
            *scale = static_cast<const S*>(call.scale);
    S* out = static_cast<S*>(call.grad_input);
    if (x != nullptr)
      run_job(ScaleBackwardJob<S, true>{grad, x, scale, out}, call.shape, call.shares,
              call.grad_scale, stream, grad, x, out);
    else
      run_job(ScaleBackwardJob<S, false>{grad, x, scale, out}, call.shape, nullptr, nullptr, stream,
              grad, x, out);
  });
}

void bias_act(const BiasActForward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    run_bias_act<BiasActForwardJob, std::remove_pointer_t<decltype(null)>>(call, nullptr, nullptr,
                                                                           stream);
  });
}

void bias_act(const BiasActBackward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    run_bias_act<BiasActBackwardJob, std::remove_pointer_t<decltype(null)>>(call, call.shares,
                                                                            call.grad_bias, stream);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
