// The kernels that update all parameters, and of the trial that some steps begin with, for tables
// of tensors with states in floats (optimizer_update.cu) or in codes (optimizer_update_codes.cu).
#pragma once

#include "optimizer_codes.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// A rule that is known when the kernel is compiled.
template <template <class> class Rule>
struct OneRule : formulas::Stepper<Rule, float> {
  using T = float;
  __device__ __forceinline__ OneRule(const Coefficients& k, int)
      : formulas::Stepper<Rule, float>(k) {}
};

// Where an element lies: the unit of its tensor, and the elements that its run has from there on,
// as far as a thread needs to know.
struct Position {
  uint32_t unit;
  int rest;
};
__device__ __forceinline__ int at_most_four(int64_t n) { return n < 4 ? int(n) : 4; }
__device__ __forceinline__ Position position_of(const SweptTensor& t, int64_t i) {
  const int64_t run = i / t.inner;
  return {static_cast<uint32_t>(run % t.units), at_most_four((run + 1) * t.inner - i)};
}

// Gradients of neighbouring elements, the first one there, become clipped ones.
template <class T, int kLanes>
__device__ __forceinline__ void clip_units(const double* factors, const SweptTensor& t, Position at,
                                           T (&g)[kLanes]) {
#pragma unroll
  for (int k = 0; k < kLanes; ++k) {
    g[k] *= T(factors[t.first_unit + at.unit]);
    if (--at.rest != 0) continue;
    at.rest = at_most_four(t.inner);
    if (++at.unit == t.units) at.unit = 0;
  }
}

// Adds 16 random bits below the last that bfloat16 keeps, and cuts. Infinities and NaN stay.
__device__ __forceinline__ float round_stochastically(float x, uint32_t index, uint32_t key) {
  const uint32_t bits = same_bits<uint32_t>(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;
  return same_bits<float>((bits + (formulas::random_bits(index, key) >> 16)) & 0xffff0000u);
}

// Work of a block on the elements of its chunk.
template <class Stepper, int kStates, class Tensor>
struct Work {
  using T = typename Stepper::T;
  static constexpr bool kCoded = std::is_same<Tensor, CodedTensor>::value;
  template <int kLanes>
  using LoadedState = std::conditional_t<kCoded, LoadedCodes<kLanes>, Loaded<T, kLanes>>;
  const Sweep& sweep;
  const Tensor& t;
  const int64_t begin;
  const Coefficients& coefficients;
  const Stepper stepper;
  const Stream grad;

  __device__ __forceinline__ Work(const Sweep& sweep, const Tensor& t,
                                  const Coefficients& coefficients, int64_t begin)
      : sweep(sweep),
        t(t),
        begin(begin),
        coefficients(coefficients),
        stepper(coefficients, sweep.rule),
        grad(grad_of(t, begin)) {}

  __device__ __forceinline__ auto state(int s) const { return state_of(t, s, begin); }

  __device__ __forceinline__ static int whole_groups(int n) {
    return kCoded ? (n + formulas::kGroup - 1) & -formulas::kGroup : n;
  }

  // Calls f<lanes>(i) for elements [i, i + lanes) of the chunk, until all are done; of codes the
  // lanes of a warp come together. last: where single elements end.
  template <class F>
  __device__ __forceinline__ void for_each(int end, int last, F f) const {
    int rest = 0;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (t.wide) {
        rest = end & (kCoded ? -4 * kWarp : ~3);
#pragma unroll 1
        for (int i = 4 * threadIdx.x; i < rest; i += 4 * kSweepThreads)
          f(i, std::integral_constant<int, 4>());
      }
    }
#pragma unroll 1
    for (int i = rest + threadIdx.x; i < last; i += kSweepThreads)
      f(i, std::integral_constant<int, 1>());
  }

  // Weights, clipped gradients and states. One that a tensor does not have reads as 0.
  template <int kLanes>
  __device__ __forceinline__ void read(int i, T (&p)[kLanes], T (&g)[kLanes],
                                       T (&v)[kMaxStates][kLanes]) const {
    // Two divisions of 64 bits: behind the loads their calls spilled what was loaded.
    Position position = {};
    if (sweep.factors != nullptr) position = position_of(t, begin + i);
    Loaded<T, kLanes> loaded, loaded_grad;
    LoadedState<kLanes> loaded_state[kMaxStates];
    const Weights weights = weights_of(t, begin);
    loaded.load(weights, i);
    loaded_grad.load(grad, i);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if (t.state[s] != nullptr)
        loaded_state[s].load(state(s), i);
      else
        loaded_state[s].clear();
    }
    loaded.get(weights, p);
    loaded_grad.get(grad, g);
#pragma unroll
    for (int s = 0; s < kStates; ++s) loaded_state[s].get(state(s), v[s]);
    if (sweep.factors != nullptr) clip_units(sweep.factors, t, position, g);
  }

  template <int kLanes>
  __device__ __forceinline__ void step(T (&p)[kLanes], const T (&g)[kLanes],
                                       T (&v)[kMaxStates][kLanes]) const {
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      T states[kMaxStates] = {v[0][k], v[1][k], v[2][k]};
      p[k] = stepper.step(p[k], g[k], states);
#pragma unroll
      for (int s = 0; s < kStates; ++s) v[s][k] = states[s];
    }
  }

  // The states of element i, or of i to i + 3. key: of the random bits that round codes.
  template <int kLanes>
  __device__ __forceinline__ void store_states(int i, int end, const T (&v)[kMaxStates][kLanes],
                                               const uint32_t& key) const {
    if constexpr (kCoded) {
      const uint32_t group =
          uint32_t(begin / formulas::kGroup) + static_cast<uint32_t>(i) / formulas::kGroup;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        if (t.state[s] == nullptr) continue;
        if (t.scales[s] != nullptr)
          store_codes(state(s), i, end, v[s],
                      formulas::random_bits(formulas::random_index(group, s), key));
        else if (i < end)
          store(state(s), i, v[s]);
      }
    } else {
#pragma unroll
      for (int s = 0; s < kStates; ++s)
        if (t.state[s] != nullptr) store(state(s), i, v[s]);
    }
  }

  template <int kLanes>
  __device__ __forceinline__ void update(int i, int end, const uint32_t& state_key) const {
    // Threads past the end have a part in the codes of a group of single elements.
    const bool inside = !kCoded || kLanes > 1 || i < end;
    const bool averages = inside && t.average != nullptr && sweep.average_weight != 0;
    const Stream average = stream_of(t.average, dtype_of(t, kAverage), begin);
    Loaded<T, kLanes> loaded_average;
    if (averages) loaded_average.load(average, i);
    T p[kLanes], g[kLanes], v[kMaxStates][kLanes] = {};
    if (inside) {
      read(i, p, g, v);
      step(p, g, v);
    }
    store_states(i, end, v, state_key);
    if (!inside) return;
    if (averages) {
      T a[kLanes];
      loaded_average.get(average, a);
#pragma unroll
      for (int k = 0; k < kLanes; ++k) a[k] += T(sweep.average_weight) * (p[k] - a[k]);
      store(average, i, a);
    }
    const bool stochastic = sweep.stochastic && coefficients.key >= 0;
    uint32_t key = 0;
    if (stochastic)
      key = formulas::random_key(sweep.seed, int64_t(coefficients.key),
                                 int64_t(sweep.verdict->applied));
    // Not a member: kept from the loads to here, a correction's place and size spilled.
    const Weights weights = weights_of(t, begin);
    if (weights.bytes == 1 || weights.bytes == 2) {
      uint32_t added[kLanes];
#pragma unroll
      for (int k = 0; k < kLanes; ++k)
        added[k] = stochastic ? formulas::random_bits(uint32_t(begin + i + k), key) >> 24
                              : formulas::kNearest24;
      store_split(weights, i, p, added);
    } else {
      if (stochastic) {
#pragma unroll
        for (int k = 0; k < kLanes; ++k)
          p[k] = T(round_stochastically(float(p[k]), uint32_t(begin + i + k), key));
      }
      store(weights, i, p);
      if (weights.bytes != 0)
        store(Stream{weights.correction, Dtype::kFloat32}, i, p);
      else if (t.master != nullptr)
        store(stream_of(t.param, dtype_of(t, kParam), begin), i, p);
    }
    if (sweep.write_back != 0) {
      const T factor = T(fabs(coefficients.gradient));
#pragma unroll
      for (int k = 0; k < kLanes; ++k) g[k] = sweep.write_back == 1 ? g[k] * factor : T(0);
      store(grad, i, g);
    }
  }
};

// Blocks that a multiprocessor must hold: three of 80 registers. With the 16 bytes that a thread
// reads of each buffer they have 36 KB (SGD) to 48 KB (Adam) on their way; an H100 needs 20 and a
// B200 43 to keep its memory busy (0.8 us of bandwidth). Codes are a quarter of these bytes. Three
// states need more than 80 registers (in floats since masters follow their parameters: 12 bytes
// spilled), on sm_120 one or two in codes as well, and its memory keeps busy with 20 KB.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kManyCoded = 1;
template <class Stepper>  // 12 bytes spilled with one state or two
constexpr bool kManyNumbers = std::is_same<Stepper, OneRule<formulas::RMSprop>>::value ||
                              std::is_same<Stepper, OneRule<formulas::RMSpropTF>>::value;
#else
constexpr int kManyCoded = 3;
template <class Stepper>
constexpr bool kManyNumbers = false;
#endif
template <class Stepper, int kStates, class Table>
constexpr int kResident =
    sizeof(typename Stepper::T) == sizeof(double) || kStates == kMaxStates ||
            kManyNumbers<Stepper> ||
            (std::is_same<typename Table::Tensor, CodedTensor>::value && kStates >= kManyCoded)
        ? 2
        : 3;

template <class Stepper, int kStates, class Table>
__global__ void __launch_bounds__(kSweepThreads, kResident<Stepper, kStates, Table>)
    update_kernel(const Table __grid_constant__ sweep) {
  using T = typename Stepper::T;
  // Backwards: what the sweep over gradients read last is still in the second-level cache.
  const Chunk chunk = chunk_of(sweep, gridDim.x - 1 - blockIdx.x);
  const typename Table::Tensor& t = sweep.tensors[chunk.tensor];
  if (in_double(t) != (sizeof(T) == sizeof(double))) return;
  const int64_t begin = chunk.number * kChunk;
  const int end = chunk_length(t, begin);
  if (sweep.verdict->skip != 0) {
    const bool unscales = sweep.write_back == 1 && sweep.scale != nullptr;
    if (!unscales && sweep.write_back != 2) return;
    const Stream grad = grad_of(t, begin);
    const T factor = T(unscale(sweep.scale));
    for (int i = threadIdx.x; i < end; i += kSweepThreads) {
      Loaded<T, 1> loaded;
      T g[1] = {};
      if (unscales) {
        loaded.load(grad, i);
        loaded.get(grad, g);
        g[0] *= factor;
      }
      store(grad, i, g);
    }
    return;
  }
  const Work<Stepper, kStates, typename Table::Tensor> work(
      sweep, t, sweep.coefficients[chunk.tensor], begin);
  // In shared memory: made anew in each turn it takes 16 instructions and two loads, and in a
  // register it spilled others.
  __shared__ uint32_t state_key;
  if constexpr (work.kCoded) {
    if (threadIdx.x == 0)
      state_key =
          formulas::random_key(sweep.seed, int64_t(sweep.coefficients[chunk.tensor].state_key),
                               int64_t(sweep.verdict->applied));
    __syncthreads();
  }
  work.for_each(end, work.whole_groups(end), [&](int i, auto lanes) {
    work.template update<decltype(lanes)::value>(i, end, state_key);
  });
}

template <class Stepper, int kStates, class Table>
__global__ void __launch_bounds__(kSweepThreads, kResident<Stepper, kStates, Table>)
    trial_kernel(const Table __grid_constant__ sweep) {
  using T = typename Stepper::T;
  const Chunk chunk = chunk_of(sweep, blockIdx.x);
  const typename Table::Tensor& t = sweep.tensors[chunk.tensor];
  if (in_double(t) != (sizeof(T) == sizeof(double)) || sweep.verdict->skip != 0) return;
  const int64_t begin = chunk.number * kChunk;
  const int end = chunk_length(t, begin);
  const Work<Stepper, kStates, typename Table::Tensor> work(
      sweep, t, sweep.coefficients[chunk.tensor], begin);
  int agreeing = 0;
  double squares = 0, products = 0;
  work.for_each(end, end, [&](int i, auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    T p[kLanes], g[kLanes], v[kMaxStates][kLanes] = {};
    work.read(i, p, g, v);
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      T states[kMaxStates] = {v[0][k], v[1][k], v[2][k]};
      bool agrees;
      const T u = work.stepper.direction(p[k], g[k], states, agrees);
      agreeing += agrees;
      squares += double(u) * double(u);
      products += double(u) * double(p[k]);
    }
  });
  __shared__ double scratch[kTrialSums][kSweepWarps];
  const double sums[kTrialSums] = {double(agreeing), squares, products};
#pragma unroll
  for (int i = 0; i < kTrialSums; ++i) {
    const double sum = block_sum<kSweepWarps>(sums[i], scratch[i]);
    if (threadIdx.x == 0) sweep.partials[int64_t(blockIdx.x) * kPartials + i] = sum;
  }
}

template <class Table>
struct Kernels {
  void (*update)(const Table __grid_constant__);
  void (*trial)(const Table __grid_constant__);
};

// Null where a rule has no such number of states.
template <class Table, template <class> class Rule, int kStates, int kLeast, int kMost>
constexpr Kernels<Table> instance() {
  if constexpr (kStates >= kLeast && kStates <= kMost)
    return {&update_kernel<OneRule<Rule>, kStates, Table>,
            &trial_kernel<OneRule<Rule>, kStates, Table>};
  else
    return {nullptr, nullptr};
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
