// The tables of bias_act.h.
#include "bias_act.h"
#include "gated.h"
#include "tables.h"

namespace fusedtrain {
namespace cpu {

template <class T>
static constexpr ChainKernels<T> chain_kernels() {
  return {FT_ISA::multiply_into<T>, FT_ISA::bias_add<T>, FT_ISA::bias_sum<T>,
          FT_ISA::finish_forward<T, ChainFinish<T>>, FT_ISA::finish_backward<T, ChainFinish<T>>};
}

constexpr ByNumber<ChainKernels> tables::FT_ISA::chain = FT_BY_NUMBER(chain_kernels);
constexpr PhiloxNumbers tables::FT_ISA::philox_numbers = FT_LOOPS::philox_numbers;

}  // namespace cpu
}  // namespace fusedtrain
