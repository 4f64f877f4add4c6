// The table of scale_add.h.
#include "scale_add.h"

#include "tables.h"

namespace fusedtrain {
namespace cpu {

template <class Format>
static constexpr TableOf<ScaleKernels, Format> scale_kernels() {
  return {FT_ISA::scale_forward<Format, typename Format::Stored, typename Format::Number>,
          FT_ISA::scale_backward<Format, typename Format::Stored, typename Format::Number>};
}

constexpr ByDtype<ScaleKernels> tables::FT_ISA::scale = FT_BY_DTYPE(scale_kernels);

}  // namespace cpu
}  // namespace fusedtrain
