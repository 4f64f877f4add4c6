// The table of channelwise.h.
#include "channelwise.h"

#include "tables.h"

namespace fusedtrain {
namespace cpu {

template <class T>
static constexpr ChannelwiseKernels<T> channelwise_kernels() {
  return {
#define FT_CHANNEL_FORWARD(name, Formula, n) FT_ISA::channelwise_forward<FT_ISA::Formula, n, T>,
#define FT_CHANNEL_BACKWARD(name, Formula, n) FT_ISA::channelwise_backward<FT_ISA::Formula, n, T>,
      {FT_CHANNELWISE(FT_CHANNEL_FORWARD)},
      {FT_CHANNELWISE(FT_CHANNEL_BACKWARD)},
  };
}

constexpr ByNumber<ChannelwiseKernels> tables::FT_ISA::channelwise =
    FT_BY_NUMBER(channelwise_kernels);

}  // namespace cpu
}  // namespace fusedtrain
