// Bias + activation + dropout.
#include "../ops/bias_act.h"
#include "../philox.h"
#include "channels.cuh"
#include "formula.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

using formulas::Philox;

// Marks the elements of [at, at + lanes) that are kept.
template <int kLanes>
__device__ __forceinline__ void keep(const BiasAct& call, int64_t at, bool (&kept)[kLanes]) {
  const uint64_t key = uint64_t(call.seed[0]), high = uint64_t(call.seed[1]);
  // Vectors of 8 are a block, those of 4 a half of one: its words, or these with exchanged halves.
  // Two of these draw the block twice: 120 instructions for 32 bytes, of which the memory takes
  // twice as long (computed for sm_90).
  const Philox random(key, uint64_t(at) / 8, high);
  const uint32_t turn = at & 4 ? 16 : 0;
  if constexpr (kLanes == 1) {
    const int which = int(at % 4);
    const uint32_t word = which == 0   ? random.word[0]
                          : which == 1 ? random.word[1]
                          : which == 2 ? random.word[2]
                                       : random.word[3];
    kept[0] = Philox::rotated(word, turn) >= call.threshold;
  } else {
#pragma unroll
    for (int l = 0; l < kLanes; ++l)
      kept[l] =
          Philox::rotated(random.word[l % 4], kLanes == 4 ? turn : l / 4 * 16) >= call.threshold;
  }
}

template <class F>
constexpr bool kIsAny = std::is_same_v<F, AnyFormula<typename F::T>>;

// kDrops: elements are dropped. A kernel of any formula asks the call.
template <class Call, class F, class S_, bool kDrops>
struct BiasActJob {
  using S = S_;
  using T = typename Compute<S>::T;
  Call call;
  Chosen<T> chosen;
  __device__ __forceinline__ T coefficient(int64_t i) const {
    return call.bias == nullptr ? T(0) : load_one(static_cast<const S*>(call.bias)[i]);
  }
  __device__ __forceinline__ bool drops() const {
    return kIsAny<F> ? call.seed != nullptr : kDrops;
  }
};

template <class F, class S, bool kDrops>
struct BiasActForwardJob : BiasActJob<BiasActForward, F, S, kDrops> {
  using Base = BiasActJob<BiasActForward, F, S, kDrops>;
  using Base::call, Base::chosen;
  using typename Base::T;
  static constexpr bool kSums = false;
  static constexpr int kInputs = 1;
  template <class V>
  __device__ __forceinline__ void fetch(int64_t at, Packed<S, V::kIsWide> (&in)[kInputs]) const {
    in[0].load(static_cast<const S*>(call.x) + at);
  }
  template <class V>
  __device__ __forceinline__ V finished(int64_t at, V v, const T (&bias)[V::kLanes]) const {
    const F formula(chosen);
    const T gain = T(call.gain), bound = T(call.clamp);
    const bool drops = Base::drops();
    bool kept[V::kLanes] = {};
    if (drops) keep<V::kLanes>(call, at, kept);
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) v.lane[l] = formula.forward(v.lane[l] + bias[l]) * gain;
    // A loop of its own, which calls without a clamp pass over: 4 instructions an element.
    if (bound >= T(0)) {
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l)
        v.lane[l] = formulas::math::clamp(v.lane[l], -bound, bound);
    }
    if (drops) {
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) v.lane[l] = kept[l] ? v.lane[l] * T(call.keep) : T(0);
    }
    return v;
  }
  template <class V>
  __device__ __forceinline__ void run(int64_t at, const Packed<S, V::kIsWide> (&in)[kInputs],
                                      const T (&bias)[V::kLanes], T (&)[V::kLanes]) const {
    V v = finished(at, V(in[0].get()), bias);
    if (kIsAny<F> && call.residual != nullptr) {
      V residual;
      residual.load(static_cast<const S*>(call.residual) + at);
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l) v.lane[l] += residual.lane[l];
    }
    v.store(static_cast<S*>(call.y) + at);
  }
};

// Dropout + residual, whose vectors are fetched together; after other formulas kernels of any
// formula add the residual.
template <class S>
struct DropoutAddForwardJob
    : BiasActForwardJob<OneFormula<Identity, kInput, typename Compute<S>::T>, S, true> {
  using Base = BiasActForwardJob<OneFormula<Identity, kInput, typename Compute<S>::T>, S, true>;
  using Base::call;
  using typename Base::T;
  static constexpr int kInputs = 2;
  template <class V>
  __device__ __forceinline__ void fetch(int64_t at, Packed<S, V::kIsWide> (&in)[kInputs]) const {
    in[0].load(static_cast<const S*>(call.x) + at);
    in[1].load(static_cast<const S*>(call.residual) + at);
  }
  template <class V>
  __device__ __forceinline__ void run(int64_t at, const Packed<S, V::kIsWide> (&in)[kInputs],
                                      const T (&bias)[V::kLanes], T (&)[V::kLanes]) const {
    V v = this->finished(at, V(in[0].get()), bias);
    const V residual = in[1].get();
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) v.lane[l] += residual.lane[l];
    v.store(static_cast<S*>(call.y) + at);
  }
};

template <class F, class S, bool kDrops>
struct BiasActBackwardJob : BiasActJob<BiasActBackward, F, S, kDrops> {
  using Base = BiasActJob<BiasActBackward, F, S, kDrops>;
  using Base::call, Base::chosen;
  using typename Base::T;
  static constexpr bool kSums = true;
  static constexpr int kInputs = 2;
  template <class V>
  __device__ __forceinline__ void fetch(int64_t at, Packed<S, V::kIsWide> (&in)[kInputs]) const {
    in[0].load(static_cast<const S*>(call.grad) + at);
    in[1].load(static_cast<const S*>(call.saved) + at);
  }
  template <class V>
  __device__ __forceinline__ void run(int64_t at, const Packed<S, V::kIsWide> (&in)[kInputs],
                                      const T (&bias)[V::kLanes], T (&sum)[V::kLanes]) const {
    const F formula(chosen);
    const bool drops = Base::drops();
    const T kept_by = drops ? T(call.keep) : T(1);
    const T factor = T(call.gain) * kept_by, undo = T(1) / factor;
    const T bound = T(call.clamp);
    bool kept[V::kLanes] = {};
    if (drops) keep<V::kLanes>(call, at, kept);
    V g = in[0].get();
    const V s = in[1].get();
#pragma unroll
    for (int l = 0; l < V::kLanes; ++l) {
      T gradient = g.lane[l] * factor, z = s.lane[l];
      if (drops) gradient = kept[l] ? gradient : T(0);
      if (formula.saves_output()) {
        if (bound >= T(0) && !(formulas::math::abs(z) < bound * kept_by)) gradient = T(0);
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

// The common formulas of a bias in training have kernels of wide vectors. All others share those of
// any formula, as do vectors of one element.
#define FT_BIAS_ACT_FORMULAS(X)                  \
  X(op_identity, Identity, kInput)               \
  X(op_relu, formulas::Relu, kOutput)            \
  X(op_leaky_relu, formulas::LeakyRelu, kOutput) \
  X(op_silu, formulas::Silu, kInput)             \
  X(op_gelu, formulas::Gelu, kInput)             \
  X(op_gelu_tanh, formulas::GeluTanh, kInput)

bool is_common(int op) {
#define FT_IS(number, Formula, saved) || op == number
  return false FT_BIAS_ACT_FORMULAS(FT_IS);
#undef FT_IS
}

template <template <class, class, bool> class Job, class S, class Call>
void run_bias_act(const Call& call, double* shares, void* sums, void* stream) {
  using T = typename Compute<S>::T;
  using Any = Job<AnyFormula<T>, S, true>;
  const Chosen<T> formula = chosen<S>(call.op, call.parameters);
  const void *a, *b, *c = nullptr;
  bool adds = false, drops_and_adds = false;
  if constexpr (std::is_same_v<Call, BiasActForward>) {
    a = call.x, b = call.y, c = call.residual;
    adds = c != nullptr;
    // equal (never): kernels of any formula add it, too, and slower
    drops_and_adds = adds && call.op == op_identity && call.seed != nullptr;
  } else {
    a = call.grad, b = call.saved, c = call.grad_input;
  }
  // Any formula in vectors of eight would spill two registers.
  // equal (one more): the speed alone changes
  const bool may_be_wide = (sizeof(S) == 4 || drops_and_adds || (is_common(call.op) && !adds)) &&
                           aligned(static_cast<const char*>(a), static_cast<const char*>(b),
                                   static_cast<const char*>(c));
  const Plan plan = plan_for<S>(call.shape, may_be_wide, kTogether<Any>);
  const auto go = [&](auto job, auto wide) {
    run_walk<decltype(job), wide.value>(job, plan, call.shape, shares, sums, stream);
  };
  if constexpr (sizeof(S) < 8) {
    if (plan.wide) {
      if constexpr (std::is_same_v<Call, BiasActForward>) {
        if (drops_and_adds) return go(DropoutAddForwardJob<S>{call, formula}, std::true_type());
      }
#define FT_WITH(number, Formula, saved)                                                  \
  if (call.op == number && !adds) {                                                      \
    using F = OneFormula<Formula, saved, T>;                                             \
    return call.seed != nullptr ? go(Job<F, S, true>{call, formula}, std::true_type())   \
                                : go(Job<F, S, false>{call, formula}, std::true_type()); \
  }
      FT_BIAS_ACT_FORMULAS(FT_WITH)
#undef FT_WITH
      if constexpr (sizeof(S) == 4) return go(Any{call, formula}, std::true_type());
    }
  }
  go(Any{call, formula}, std::false_type());
}

}  // namespace

void compute(const BiasActForward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    run_bias_act<BiasActForwardJob, std::remove_pointer_t<decltype(null)>>(call, nullptr, nullptr,
                                                                           stream);
  });
}

void compute(const BiasActBackward& call, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    run_bias_act<BiasActBackwardJob, std::remove_pointer_t<decltype(null)>>(call, call.shares,
                                                                            call.grad_bias, stream);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
