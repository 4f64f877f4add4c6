// The table of pointwise.h.
#include "pointwise.h"

#include "tables.h"

namespace fusedtrain {
namespace cpu {

template <class Format>
static constexpr TableOf<PointwiseKernels, Format> pointwise_kernels() {
  if constexpr (sizeof(typename Format::Stored) == sizeof(typename Format::Number)) {
    return {
#define FT_FORWARD(name, Formula, ...)                                 \
  FT_ISA::pointwise_forward<FT_ISA::Formula, typename Format::Number>,
#define FT_BACKWARD(name, Formula, ...)                                 \
  FT_ISA::pointwise_backward<FT_ISA::Formula, typename Format::Number>,
        {FT_POINTWISE(FT_FORWARD)},
        {FT_POINTWISE(FT_BACKWARD)},
    };
  } else {
    return {
#define FT_FORWARD_16(name, Formula, ...) FT_ISA::pointwise_forward_16bit<FT_ISA::Formula, Format>,
#define FT_BACKWARD_16(name, Formula, ...)                   \
  FT_ISA::pointwise_backward_16bit<FT_ISA::Formula, Format>,
        {FT_POINTWISE(FT_FORWARD_16)},
        {FT_POINTWISE(FT_BACKWARD_16)},
    };
  }
}

constexpr ByDtype<PointwiseKernels> tables::FT_ISA::pointwise = FT_BY_DTYPE(pointwise_kernels);

}  // namespace cpu
}  // namespace fusedtrain
