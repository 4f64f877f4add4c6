// The tables of optimizers.h.
#include "optimizers.h"

#include "tables.h"

namespace fusedtrain {
namespace cpu {

template <class Format>
static constexpr TableOf<OptimizerKernels, Format> optimizer_kernels() {
  if constexpr (sizeof(typename Format::Stored) == sizeof(typename Format::Number)) {
    using T = typename Format::Number;
    return {
#define FT_UPDATE(name, Rule, least, most)                    \
  {FT_ISA::update_kernel<FT_ISA::Rule, 0, least, most, T>(),  \
   FT_ISA::update_kernel<FT_ISA::Rule, 1, least, most, T>(),  \
   FT_ISA::update_kernel<FT_ISA::Rule, 2, least, most, T>(),  \
   FT_ISA::update_kernel<FT_ISA::Rule, 3, least, most, T>()},
#define FT_TRIAL(name, Rule, least, most)                    \
  {FT_ISA::trial_kernel<FT_ISA::Rule, 0, least, most, T>(),  \
   FT_ISA::trial_kernel<FT_ISA::Rule, 1, least, most, T>(),  \
   FT_ISA::trial_kernel<FT_ISA::Rule, 2, least, most, T>(),  \
   FT_ISA::trial_kernel<FT_ISA::Rule, 3, least, most, T>()},
        {FT_RULES(FT_UPDATE)}, {FT_RULES(FT_TRIAL)}, FT_ISA::measure<T>,
        FT_ISA::multiply<T>,   FT_ISA::average<T>,
    };
  } else {
    return {
#define FT_UPDATE_16(name, Rule, least, most)                            \
  {FT_ISA::update_kernel_16bit<FT_ISA::Rule, 0, least, most, Format>(),  \
   FT_ISA::update_kernel_16bit<FT_ISA::Rule, 1, least, most, Format>(),  \
   FT_ISA::update_kernel_16bit<FT_ISA::Rule, 2, least, most, Format>(),  \
   FT_ISA::update_kernel_16bit<FT_ISA::Rule, 3, least, most, Format>()},
        {FT_RULES(FT_UPDATE_16)},
        {FT_ISA::SplitLoops<Format, int8_t>::join, FT_ISA::SplitLoops<Format, int16_t>::join},
        {FT_ISA::SplitLoops<Format, int8_t>::split, FT_ISA::SplitLoops<Format, int16_t>::split},
        FT_ISA::follow<Format>,
    };
  }
}

constexpr ByDtype<OptimizerKernels> tables::FT_ISA::optimizer = FT_BY_DTYPE(optimizer_kernels);
constexpr RoundStochastically tables::FT_ISA::to_bfloat16_stochastic =
    FT_LOOPS::to_bfloat16_stochastic;

}  // namespace cpu
}  // namespace fusedtrain
