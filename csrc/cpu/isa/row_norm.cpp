// The table of row_norm.h.
#include "row_norm.h"

#include "tables.h"

namespace fusedtrain {
namespace cpu {

template <class Format>
static constexpr TableOf<RowNormKernels, Format> row_norm_kernels() {
  using T = typename Format::Number;
  return {FT_ISA::norm_forward_blocks<Format, T>, FT_ISA::norm_backward_blocks<Format, T>,
          FT_ISA::norm_forward_tile<Format, T>, FT_ISA::norm_backward_tile<Format, T>};
}

constexpr ByDtype<RowNormKernels> tables::FT_ISA::row_norm = FT_BY_DTYPE(row_norm_kernels);

}  // namespace cpu
}  // namespace fusedtrain
