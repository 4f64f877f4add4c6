// A batch norm folded into the weight before it, and the gradients of both. Weights are small
// beside activations: the loops are plain.
#include "../ops/fold.h"
#include "dispatch.h"
#include "stored.h"

namespace fusedtrain {
namespace cpu {
namespace {

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

template <class T>
T value_or(const void* values, int64_t i, T otherwise) {
  return values == nullptr ? otherwise : static_cast<const T*>(values)[i];
}

// Factor of one output channel, and the values that make it up.
template <class T>
struct Channel {
  T invstd, scale, centre;
  Channel(const FoldWeight& call, int64_t i)
      : invstd(T(1) / root(static_cast<const T*>(call.var)[i] + T(call.eps))),
        scale(value_or<T>(call.gamma, i, T(1)) * invstd),
        centre(value_or<T>(call.bias, i, T(0)) - static_cast<const T*>(call.mean)[i]) {}
};

// Calls f with the first element of every run of `inner` elements of output channel i.
template <class F>
void each_run(const FoldWeight& call, int64_t i, F f) {
  const int64_t group = i / call.channels, channel = i % call.channels;
  for (int64_t r = 0; r < call.rows_per_group; ++r)
    f(((group * call.rows_per_group + r) * call.channels + channel) * call.inner);
}

template <class S, class T = decltype(load(S()))>
void forward(const FoldForward& call, int64_t first, int64_t last) {
  const S* weight = static_cast<const S*>(call.weight);
  S* folded = static_cast<S*>(call.folded);
  for (int64_t i = first; i < last; ++i) {
    const Channel<T> c(call, i);
    each_run(call, i, [&](int64_t start) {
#pragma GCC ivdep
      for (int64_t k = start; k < start + call.inner; ++k)
        store(folded + k, c.scale * load(weight[k]));
    });
    static_cast<T*>(call.folded_bias)[i] = value_or<T>(call.beta, i, T(0)) + c.scale * c.centre;
  }
}

// In lanes, so that the compiler may use vectors; always in the same order.
constexpr int kLanesOfSum = 16;

template <class S, class T = decltype(load(S()))>
void backward(const FoldBackward& call, int64_t first, int64_t last) {
  const S* weight = static_cast<const S*>(call.weight);
  const S* grad = static_cast<const S*>(call.grad_folded);
  S* grad_weight = static_cast<S*>(call.grad_weight);
  for (int64_t i = first; i < last; ++i) {
    const Channel<T> c(call, i);
    double total = 0;
    each_run(call, i, [&](int64_t start) {
      T lanes[kLanesOfSum] = {};
      const int64_t end = start + call.inner;
      int64_t k = start;
      for (; k + kLanesOfSum <= end; k += kLanesOfSum) {
#pragma GCC ivdep
        for (int lane = 0; lane < kLanesOfSum; ++lane) {
          const T g = load(grad[k + lane]);
          lanes[lane] += g * load(weight[k + lane]);
          store(grad_weight + k + lane, c.scale * g);
        }
      }
      for (; k < end; ++k) {
        const T g = load(grad[k]);
        lanes[k % kLanesOfSum] += g * load(weight[k]);
        store(grad_weight + k, c.scale * g);
      }
      for (int lane = 0; lane < kLanesOfSum; ++lane) total += lanes[lane];
    });
    const T g = static_cast<const T*>(call.grad_folded_bias)[i];
    static_cast<T*>(call.grad_bias)[i] = c.scale * g;
    static_cast<T*>(call.grad_gamma)[i] = c.invstd * (T(total) + c.centre * g);
  }
}

// Output channels do not depend on one another.
template <class Call, class Run>
void each_output(const Call& call, Parallel parallel, const Run& run) {
  const int64_t each = call.rows_per_group * call.inner + 1;
  in_parts(parallel, call.outputs(), (kGrain + each - 1) / each, run);
}

}  // namespace

void compute(const FoldForward& call, Parallel parallel) {
  by_stored(call.dtype, [&](auto stored) {
    each_output(call, parallel,
                [&](int64_t first, int64_t last) { forward<decltype(stored)>(call, first, last); });
  });
}

void compute(const FoldBackward& call, Parallel parallel) {
  by_stored(call.dtype, [&](auto stored) {
    each_output(call, parallel, [&](int64_t first, int64_t last) {
      backward<decltype(stored)>(call, first, last);
    });
  });
}

}  // namespace cpu
}  // namespace fusedtrain
