// The table of few_bit.h.
#include "few_bit.h"

#include "tables.h"

namespace fusedtrain {
namespace cpu {

// Only formulas with levels have kernels.
template <template <class> class Formula>
constexpr bool kHasSlopes = false;
#define FT_HAS_SLOPES(name, Formula, table)          \
  template <>                                        \
  constexpr bool kHasSlopes<FT_ISA::Formula> = true;
FT_FEW_BIT(FT_HAS_SLOPES)

template <class Format, template <class> class Formula, bool kByOutput>
static constexpr auto few_bit_forward() ->
    typename FewBitKernels<typename Format::Stored, typename Format::Number>::Forward {
  if constexpr (kHasSlopes<Formula>)
    return FT_ISA::few_bit_forward<Formula, kByOutput, Format>;
  else
    return nullptr;
}

template <class Format>
static constexpr TableOf<FewBitKernels, Format> few_bit_kernels() {
  return {
#define FT_FEW_BIT_FORWARD(name, Formula, n, rounds, saved)     \
  few_bit_forward<Format, FT_ISA::Formula, saved == kOutput>(),
      {FT_POINTWISE(FT_FEW_BIT_FORWARD)},
      FT_ISA::few_bit_backward<Format>,
  };
}

constexpr ByDtype<FewBitKernels> tables::FT_ISA::few_bit = FT_BY_DTYPE(few_bit_kernels);

}  // namespace cpu
}  // namespace fusedtrain
