// The table of pool.h.
#include "pool.h"

#include "tables.h"

namespace fusedtrain {
namespace cpu {

template <class Format>
static constexpr TableOf<MaxPoolKernels, Format> max_pool_kernels() {
  return {FT_ISA::MaxPooling<Format>::forward, FT_ISA::MaxPooling<Format>::backward};
}

constexpr ByDtype<MaxPoolKernels> tables::FT_ISA::max_pool = FT_BY_DTYPE(max_pool_kernels);

}  // namespace cpu
}  // namespace fusedtrain
