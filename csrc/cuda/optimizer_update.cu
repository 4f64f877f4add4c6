// The sweep that updates all parameters, and the trial of it that some steps begin with, where all
// states are of floats.
#include "optimizer_update.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// Any rule: one kernel is enough for float64 parameters, which few train.
struct AnyRule {
  using T = double;
  Coefficients k;
  int rule;
  __device__ __forceinline__ AnyRule(const Coefficients& k, int rule) : k(k), rule(rule) {}

#define FT_STEP(name, Rule, least, most)                          \
  case rule_##name:                                               \
    return formulas::Stepper<formulas::Rule, T>(k).step(p, g, s);
  __device__ __forceinline__ T step(T p, T g, T* s) const {
    switch (rule) { FT_RULES(FT_STEP) }
    return p;
  }
#undef FT_STEP
#define FT_DIRECTION(name, Rule, least, most)                                  \
  case rule_##name:                                                            \
    return formulas::Stepper<formulas::Rule, T>(k).direction(p, g, s, agrees);
  __device__ __forceinline__ T direction(T p, T g, T* s, bool& agrees) const {
    switch (rule) { FT_RULES(FT_DIRECTION) }
    return T(0);
  }
#undef FT_DIRECTION
};

template <class Table>
Kernels<Table> kernels_of(int rule, int states, bool in_double) {
#define FT_KERNELS(name, Rule, least, most)            \
  {instance<Table, formulas::Rule, 0, least, most>(),  \
   instance<Table, formulas::Rule, 1, least, most>(),  \
   instance<Table, formulas::Rule, 2, least, most>(),  \
   instance<Table, formulas::Rule, 3, least, most>()},
  static constexpr Kernels<Table> kKernels[][kMaxStates + 1] = {FT_RULES(FT_KERNELS)};
#undef FT_KERNELS
  if (in_double)
    return {&update_kernel<AnyRule, kMaxStates, Table>, &trial_kernel<AnyRule, kMaxStates, Table>};
  return kKernels[rule][states];
}

}  // namespace

template <class Table>
void launch_update(const Table& sweep, int states, bool in_double, int64_t blocks, void* stream) {
  launch(kernels_of<Table>(sweep.rule, states, in_double).update, blocks, kSweepThreads, stream, 0,
         sweep);
}
template <class Table>
void launch_trial(const Table& sweep, int states, bool in_double, int64_t blocks, void* stream) {
  launch(kernels_of<Table>(sweep.rule, states, in_double).trial, blocks, kSweepThreads, stream, 0,
         sweep);
}
template void launch_update(const FewSwept&, int, bool, int64_t, void*);
template void launch_trial(const FewSwept&, int, bool, int64_t, void*);
#if CUDART_VERSION >= 12010
template void launch_update(const ManySwept&, int, bool, int64_t, void*);
template void launch_trial(const ManySwept&, int, bool, int64_t, void*);
#endif

}  // namespace cuda
}  // namespace fusedtrain
