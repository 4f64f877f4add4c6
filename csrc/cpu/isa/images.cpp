// The tables of images.h.
#include "images.h"

#include "tables.h"

namespace fusedtrain {
namespace cpu {

template <class Format>
static constexpr TableOf<ImageKernels, Format> image_kernels() {
  if constexpr (sizeof(typename Format::Number) == sizeof(double))
    return {nullptr};
  else
    return {FT_ISA::normalize_run<Format, typename Format::Stored>};
}

constexpr ByDtype<ImageKernels> tables::FT_ISA::image = FT_BY_DTYPE(image_kernels);
constexpr JoinChannels tables::FT_ISA::join_channels = FT_LOOPS::join_channels;
constexpr SplitChannels tables::FT_ISA::split_channels = FT_LOOPS::split_channels;

}  // namespace cpu
}  // namespace fusedtrain
