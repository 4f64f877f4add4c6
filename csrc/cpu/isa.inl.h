// The body of an instruction-set unit: compiled three times with different flags.
#include "channelwise.h"
#include "convert.h"
#include "kernels.h"
#include "pointwise.h"

namespace fusedtrain {
namespace cpu {

template <class T>
static constexpr KernelsOf<T> kernels_of() {
  return KernelsOf<T>{
#define FT_FORWARD(name, Formula, ...) FT_ISA::pointwise_forward<FT_ISA::Formula, T>,
#define FT_BACKWARD(name, Formula, ...) FT_ISA::pointwise_backward<FT_ISA::Formula, T>,
#define FT_CHANNEL_FORWARD(name, Formula, n) FT_ISA::channelwise_forward<FT_ISA::Formula, n, T>,
#define FT_CHANNEL_BACKWARD(name, Formula, n) FT_ISA::channelwise_backward<FT_ISA::Formula, n, T>,
      {FT_POINTWISE(FT_FORWARD)},
      {FT_POINTWISE(FT_BACKWARD)},
      {FT_CHANNELWISE(FT_CHANNEL_FORWARD)},
      {FT_CHANNELWISE(FT_CHANNEL_BACKWARD)},
  };
}

static constexpr Kernels make_kernels(const char* name) {
  return Kernels{name,
                 kernels_of<float>(),
                 kernels_of<double>(),
                 FT_ISA::from_half,
                 FT_ISA::to_half,
                 FT_ISA::from_bfloat16,
                 FT_ISA::to_bfloat16};
}

}  // namespace cpu
}  // namespace fusedtrain
