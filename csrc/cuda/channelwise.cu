// Formulas with parameters that differ by channel, over a tensor of rows x channels x inner.
//
// Two walks. Where `inner` is long (channels first) a warp takes a segment of one row and channel.
// Where it is short (channels last, or inner small) a thread keeps its columns, each of one
// channel, and walks over the rows with the others of its block that have the same ones. Both sum
// the gradients of the parameters in a block, and blocks leave their shares to be added up by a
// second kernel: the order of the sums is fixed for a device.
#include "../channelwise_formulas.h"
#include "../ops/channelwise.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "shares.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
// Loads that a thread has in flight, for each tensor. 4 of 8 elements each would spill.
template <class S>
constexpr int kVecs = sizeof(S) == 2 ? 2 : 4;
constexpr int kBlocksPerMultiprocessor = 16;

// How a call is cut into blocks. Block b works on part b % parts (channels, or groups of columns)
// and on group b / parts of what is summed over.
struct Plan {
  bool columns;  // the second walk
  bool wide;     // 16 bytes at a time
  int across;    // threads side by side, of the columns
  int64_t parts, groups;
  int64_t per_group;  // segments, or rows
  int64_t shares;     // of a group and parameter: channels, or columns
};

template <class S>
Plan plan_for(int64_t rows, int64_t channels, int64_t inner, bool aligned) {
  Plan plan;
  plan.across = 0;
  const int64_t most = int64_t(multiprocessors()) * kBlocksPerMultiprocessor;
  constexpr int kLanes = Vec<S>::kLanes;
  plan.wide = aligned && inner % kLanes == 0;
  // equal (<= for <, >= for >): the speed alone changes
  plan.columns = inner / (plan.wide ? kLanes : 1) < kWarp && channels > 1;
  int64_t steps;
  if (plan.columns) {
    plan.wide = aligned && channels * inner % kLanes == 0;
    const int64_t vectors = channels * inner / (plan.wide ? kLanes : 1);
    plan.parts = ceil_div(vectors, kWarp);
    plan.across = int(ceil_div(vectors, plan.parts));
    plan.shares = channels * inner;
    steps = ceil_div(rows, kThreads / plan.across * kVecs<S>);
  } else {
    plan.parts = channels;
    plan.shares = channels;
    steps = ceil_div(rows * ceil_div(inner, kWarp * kVecs<S> * (plan.wide ? kLanes : 1)), kWarps);
  }
  const int64_t wanted = ceil_div(most, plan.parts);
  plan.groups = wanted < steps ? wanted : steps;
  const int64_t step = plan.columns ? kThreads / plan.across * kVecs<S> : kWarps;
  plan.per_group = ceil_div(steps, plan.groups) * step;
  plan.groups = ceil_div(steps * step, plan.per_group);
  return plan;
}

template <class S>
struct Tensors {
  const S* grad;  // null in forward
  const S* x;
  S* out;
  const S* a;
  const S* b;
};

// Work of a thread on elements [at, at + lanes) of kVectors places that are `stride` apart, of
// which the first `count` exist. a[k] and b[k] are the parameters of lane k.
template <template <class> class Formula, bool kBackward, int kVectors, class V, class S, class P>
__device__ __forceinline__ void apply(const Tensors<S>& t, int64_t at, int64_t stride, int count,
                                      const P (&a)[V::kLanes], const P (&b)[V::kLanes],
                                      P (&sum_a)[V::kLanes], P (&sum_b)[V::kLanes]) {
  Packed<S, V::kIsWide> packed_g[kVectors], packed_x[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (j >= count) continue;
    packed_x[j].load(t.x + at + j * stride);
    if constexpr (kBackward) packed_g[j].load(t.grad + at + j * stride);
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (j >= count) continue;
    V g, x;
    packed_x[j].get(x.lane);
    if constexpr (kBackward) packed_g[j].get(g.lane);
#pragma unroll
    for (int k = 0; k < V::kLanes; ++k) {
      if constexpr (kBackward) {
        P da = P(0), db = P(0);
        x.lane[k] = Formula<P>::backward(g.lane[k], x.lane[k], a[k], b[k], da, db);
        sum_a[k] += da;
        sum_b[k] += db;
      } else {
        x.lane[k] = Formula<P>::forward(x.lane[k], a[k], b[k]);
      }
    }
    x.store(t.out + at + j * stride);
  }
}

template <int kVectors>
__device__ __forceinline__ int at_most(int64_t left) {
  return left < kVectors ? int(left) : kVectors;
}

// First walk: all of a block has one channel, a warp one segment of kVecs vectors a lane.
template <template <class> class Formula, bool kBackward, bool kWide, class S>
__global__ void __launch_bounds__(kThreads, 2)
    segments_kernel(Tensors<S> t, int64_t rows, int64_t channels, int64_t inner, int64_t per_group,
                    int, typename Compute<S>::T* shares, int64_t shares_of_parameter,
                    int parameter_count) {
  using V = Vec<S, kWide>;
  using P = typename Compute<S>::T;
  constexpr int kSegment = kWarp * kVecs<S> * V::kLanes;
  // equal (the next block #1): lanes, or blocks, only change places
  const int64_t channel = blockIdx.x % channels, group = blockIdx.x / channels;
  // equal (the next thread #1): lanes, or blocks, only change places
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t pieces = (inner + kSegment - 1) / kSegment;
  int64_t last = (group + 1) * per_group;
  if (last > rows * pieces) last = rows * pieces;

  P a[V::kLanes], b[V::kLanes], sum_a[V::kLanes], sum_b[V::kLanes];
#pragma unroll
  for (int k = 0; k < V::kLanes; ++k) {
    a[k] = load_one(t.a[channel]);
    b[k] = load_one(t.b[channel]);
    sum_a[k] = sum_b[k] = P(0);
  }
  for (int64_t segment = group * per_group + warp; segment < last; segment += kWarps) {
    const int64_t row = segment / pieces;
    const int64_t i = (segment - row * pieces) * kSegment + lane * V::kLanes;
    const int64_t left = i < inner ? (inner - i + kWarp * V::kLanes - 1) / (kWarp * V::kLanes) : 0;
    apply<Formula, kBackward, kVecs<S>, V>(t, (row * channels + channel) * inner + i,
                                           kWarp * V::kLanes, at_most<kVecs<S>>(left), a, b, sum_a,
                                           sum_b);
  }
  if constexpr (kBackward) {
    __shared__ P scratch[2][kWarps];
    P total_a = P(0), total_b = P(0);
#pragma unroll
    for (int k = 0; k < V::kLanes; ++k) {
      total_a += sum_a[k];
      total_b += sum_b[k];
    }
    total_a = block_sum<kWarps>(total_a, scratch[0]);
    total_b = block_sum<kWarps>(total_b, scratch[1]);
    if (threadIdx.x == 0) {
      shares[group * channels + channel] = total_a;
      if (parameter_count > 1) shares[shares_of_parameter + group * channels + channel] = total_b;
    }
  }
}

// Second walk: a thread keeps V::kLanes columns, and shares the rows with others.
template <template <class> class Formula, bool kBackward, bool kWide, class S>
__global__ void __launch_bounds__(kThreads, 2)
    columns_kernel(Tensors<S> t, int64_t rows, int64_t channels, int64_t inner, int64_t per_group,
                   int across, typename Compute<S>::T* shares, int64_t shares_of_parameter,
                   int parameter_count) {
  using V = Vec<S, kWide>;
  using P = typename Compute<S>::T;
  const int64_t columns = channels * inner;
  const uint32_t parts = uint32_t((columns / V::kLanes + across - 1) / across);
  const int64_t group = blockIdx.x / parts;
  const int down = kThreads / across, row_of_block = threadIdx.x / across;
  const int lane = threadIdx.x - row_of_block * across;
  const int64_t first_column = int64_t(blockIdx.x % parts) * across * V::kLanes;
  const int64_t column = first_column + lane * V::kLanes;
  const bool exists = column < columns && row_of_block < down;
  int64_t last = (group + 1) * per_group;
  if (last > rows) last = rows;

  P a[V::kLanes], b[V::kLanes], sum_a[V::kLanes], sum_b[V::kLanes];
#pragma unroll
  for (int k = 0; k < V::kLanes; ++k) {
    const int64_t at = exists ? column + k : 0, channel = inner == 1 ? at : at / inner;
    a[k] = load_one(t.a[channel]);
    b[k] = load_one(t.b[channel]);
    sum_a[k] = sum_b[k] = P(0);
  }
  if (exists) {
    for (int64_t row = group * per_group + row_of_block; row < last; row += down * kVecs<S>) {
      int count = 0;
#pragma unroll
      for (int j = 0; j < kVecs<S>; ++j) count += row + j * down < last;
      apply<Formula, kBackward, kVecs<S>, V>(t, row * columns + column, down * columns, count, a, b,
                                             sum_a, sum_b);
    }
  }
  if constexpr (kBackward) {
    __shared__ P scratch[2][V::kLanes][kThreads];
#pragma unroll
    for (int k = 0; k < V::kLanes; ++k) {
      scratch[0][k][threadIdx.x] = sum_a[k];
      scratch[1][k][threadIdx.x] = sum_b[k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < parameter_count * across * V::kLanes; i += kThreads) {
      const int line = i / across, of = i - line * across;
      const int parameter = line / V::kLanes, k = line - parameter * V::kLanes;
      const int64_t to = first_column + of * V::kLanes + k;
      P sum = P(0);
#pragma unroll 8
      for (int r = 0; r < down; ++r) sum += scratch[parameter][k][r * across + of];
      if (to < columns) shares[parameter * shares_of_parameter + group * columns + to] = sum;
    }
  }
}

template <class S>
Tensors<S> tensors_of(const ChannelwiseForward& call) {
  return {nullptr, static_cast<const S*>(call.x), static_cast<S*>(call.y),
          static_cast<const S*>(call.parameters[0]), static_cast<const S*>(call.parameters[1])};
}
template <class S>
Tensors<S> tensors_of(const ChannelwiseBackward& call) {
  return {static_cast<const S*>(call.grad), static_cast<const S*>(call.x),
          static_cast<S*>(call.grad_input), static_cast<const S*>(call.parameters[0]),
          static_cast<const S*>(call.parameters[1])};
}
int parameters_of(const ChannelwiseForward&) { return 0; }
int parameters_of(const ChannelwiseBackward& call) { return call.parameter_count; }
double* shares_of(const ChannelwiseForward&) { return nullptr; }
double* shares_of(const ChannelwiseBackward& call) { return call.shares; }

template <class S, class Call>
Plan plan_of(const Call& call) {
  const Tensors<S> t = tensors_of<S>(call);
  return plan_for<S>(call.rows, call.channels, call.inner, aligned(t.grad, t.x, t.out));
}

template <template <class> class Formula, class Call>
void run(const Call& call, void* stream) {
  constexpr bool kBackward = std::is_same_v<Call, ChannelwiseBackward>;
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const Plan plan = plan_of<S>(call);
    auto* kernel = plan.columns ? (plan.wide ? &columns_kernel<Formula, kBackward, true, S>
                                             : &columns_kernel<Formula, kBackward, false, S>)
                                : (plan.wide ? &segments_kernel<Formula, kBackward, true, S>
                                             : &segments_kernel<Formula, kBackward, false, S>);
    launch(kernel, plan.parts * plan.groups, kThreads, stream, 0, tensors_of<S>(call), call.rows,
           call.channels, call.inner, plan.per_group, plan.across, shares_in<S>(shares_of(call)),
           plan.groups * plan.shares, parameters_of(call));
  });
}

template <class Call>
void run_op(const Call& call, void* stream) {
  using Run = void (*)(const Call&, void*);
#define FT_RUN(name, Formula, parameters) &run<formulas::Formula, Call>,
  static constexpr Run kRuns[] = {FT_CHANNELWISE(FT_RUN)};
#undef FT_RUN
  if (call.rows * call.channels * call.inner > 0) kRuns[call.op](call, stream);
}

}  // namespace

void compute(const ChannelwiseForward& call, void* stream) { run_op(call, stream); }
void compute(const ChannelwiseBackward& call, void* stream) {
  run_op(call, stream);
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const Plan plan = plan_of<S>(call);
    for (int k = 0; k < call.parameter_count; ++k)
      add_shares(shares_in<S>(call.shares) + k * plan.groups * plan.shares,
                 static_cast<S*>(call.grad_parameters[k]), call.channels, plan.groups,
                 plan.shares / call.channels, plan.shares, stream);
  });
}

int64_t channelwise_shares(const ChannelwiseBackward& call) {
  int64_t count = 0;
  by_dtype(call.dtype, [&](auto* null) {
    const Plan plan = plan_of<std::remove_pointer_t<decltype(null)>>(call);
    count = call.parameter_count * plan.groups * plan.shares;
  });
  return count;
}

}  // namespace cuda
}  // namespace fusedtrain
