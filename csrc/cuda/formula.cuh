// The formula in a kernel of several ops: known when the kernel is compiled, or when it is
// launched.
#pragma once

#include <string.h>

#include <type_traits>

#include "../formulas.h"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// No activation.
template <class T>
struct Identity {
  FT_METHOD explicit Identity(const double*) {}
  FT_METHOD T forward(T x) const { return x; }
  FT_METHOD T backward(T g, T) const { return g; }
};

// A formula as kernels are given it: so all of a dtype have one type, and one launch.
template <class T>
struct Chosen {
  int op;
  T state[3];  // what the struct of the formula is made of
};

enum Op : int {
  op_identity = -1,
#define FT_ENUM(name, ...) op_##name,
  FT_POINTWISE(FT_ENUM)
#undef FT_ENUM
};

template <template <class> class Formula, class T>
void keep(const Formula<T>& formula, Chosen<T>& chosen) {
  static_assert(sizeof formula <= sizeof chosen.state);
  if (!std::is_empty_v<Formula<T>>) memcpy(chosen.state, &formula, sizeof formula);
}

template <class S, class T = typename Compute<S>::T>
Chosen<T> chosen(int op, const double* parameters) {
  Chosen<T> result = {op, {}};
#define FT_KEEP(name, Formula, count, rounds, saved)                             \
  case op_##name:                                                                \
    keep(formulas::Formula<T>(Parameters<S>(parameters, rounds).value), result); \
    break;
  switch (op) { FT_POINTWISE(FT_KEEP) }
#undef FT_KEEP
  return result;
}

// The formula that keep() has stored.
template <class F, class T>
__device__ __forceinline__ F restored(const Chosen<T>& chosen) {
  const double nothing[kMaxParameters] = {1, 1};
  F formula(nothing);
  if constexpr (!std::is_empty_v<F>) __builtin_memcpy(&formula, chosen.state, sizeof formula);
  return formula;
}

template <template <class> class Formula, Saved kSaved, class T_>
struct OneFormula {
  using T = T_;
  Formula<T> formula;
  __device__ __forceinline__ explicit OneFormula(const Chosen<T>& chosen)
      : formula(restored<Formula<T>>(chosen)) {}
  static constexpr __device__ bool saves_output() { return kSaved == kOutput; }
  __device__ __forceinline__ T forward(T x) const { return formula.forward(x); }
  __device__ __forceinline__ T backward(T g, T saved) const { return formula.backward(g, saved); }
};

// Any formula: one kernel is enough where vectors are of one element, and for float64, which few
// train in.
template <class T_>
struct AnyFormula {
  using T = T_;
  Chosen<T> chosen;
  __device__ __forceinline__ explicit AnyFormula(const Chosen<T>& chosen) : chosen(chosen) {}

#define FT_CASE(name, Formula, count, rounds, saved) \
  case op_##name:                                    \
    return FT_RESULT(formulas::Formula<T>, saved);
  __device__ __forceinline__ bool saves_output() const {
#define FT_RESULT(F, saved) saved == kOutput
    switch (chosen.op) { FT_POINTWISE(FT_CASE) }
#undef FT_RESULT
    return false;
  }
  __device__ __forceinline__ T forward(T x) const {
#define FT_RESULT(F, saved) restored<F>(chosen).forward(x)
    switch (chosen.op) { FT_POINTWISE(FT_CASE) }
#undef FT_RESULT
    return x;
  }
  __device__ __forceinline__ T backward(T g, T s) const {
#define FT_RESULT(F, saved) restored<F>(chosen).backward(g, s)
    switch (chosen.op) { FT_POINTWISE(FT_CASE) }
#undef FT_RESULT
    return g;
  }
#undef FT_CASE
};

// Calls f with the formula: a switch before a loop, in one kernel.
template <class T, class F>
__device__ __forceinline__ void with_formula(const Chosen<T>& chosen, F f) {
#define FT_CASE(name, Formula, count, rounds, saved)           \
  case op_##name:                                              \
    return f(OneFormula<formulas::Formula, saved, T>(chosen));
  switch (chosen.op) { FT_POINTWISE(FT_CASE) }
#undef FT_CASE
  f(OneFormula<Identity, kInput, T>(chosen));
}

// Kernel of a pass for a call: Pass<Formula, S, kWide>::kernel.
template <template <class, class, bool> class Pass, class S>
auto kernel_of(int op, bool wide) {
  using T = typename Compute<S>::T;
  auto* kernel = Pass<AnyFormula<T>, S, false>::kernel;
  if constexpr (sizeof(S) < 8) {
#define FT_KERNEL(name, Formula, count, rounds, saved)             \
  , Pass<OneFormula<formulas::Formula, saved, T>, S, true>::kernel
    static constexpr decltype(kernel) kKernels[] = {
        Pass<OneFormula<Identity, kInput, T>, S, true>::kernel FT_POINTWISE(FT_KERNEL)};
#undef FT_KERNEL
    if (wide) kernel = kKernels[op + 1];
  }
  return kernel;
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
