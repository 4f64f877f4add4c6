// The table of batch_norm.h.
#include "batch_norm.h"

#include "tables.h"

namespace fusedtrain {
namespace cpu {

template <class By, class Format, template <class> class Formula, bool kByOutput>
struct WithNorm {
  using S = typename Format::Stored;
  using T = typename Format::Number;
  using Kernel = typename BatchNormKernels<S, T>::Kernel;
  static constexpr bool kThere = FT_ISA::kWithNorm<Formula> && sizeof(T) == sizeof(float);

  static constexpr Kernel forward() {
    if constexpr (kThere)
      return FT_ISA::norm_forward<By, Format, Formula, NormTile<S, T>>;
    else
      return nullptr;
  }
  static constexpr Kernel backward() {
    if constexpr (kThere)
      return FT_ISA::norm_backward<By, Format, Formula, kByOutput, NormTile<S, T>>;
    else
      return nullptr;
  }
};

template <class By, class Format>
static constexpr auto batch_norm_kernels() {
  using S = typename Format::Stored;
  using T = typename Format::Number;
  using Tile = NormTile<S, T>;
  return BatchNormKernels<S, T>{
      FT_ISA::norm_collect<By, Format, Tile>,
      FT_ISA::norm_forward<By, Format, FT_ISA::Identity, Tile>,
#define FT_NORM_FORWARD(name, Formula, n, rounds, saved)              \
  WithNorm<By, Format, FT_ISA::Formula, saved == kOutput>::forward(),
#define FT_NORM_BACKWARD(name, Formula, n, rounds, saved)              \
  WithNorm<By, Format, FT_ISA::Formula, saved == kOutput>::backward(),
      {FT_POINTWISE(FT_NORM_FORWARD)},
      FT_ISA::norm_restore<By, Format, Tile>,
      FT_ISA::norm_reduce<By, Format, Tile>,
      {FT_POINTWISE(FT_NORM_BACKWARD)},
      FT_ISA::norm_grad_input<By, Format, Tile, T>,
      FT_ISA::move_sums<T>,
  };
}
template <class Format>
static constexpr TableOf<BatchNormLayouts, Format> batch_norm_layouts() {
  return {batch_norm_kernels<FT_ISA::Column, Format>(), batch_norm_kernels<FT_ISA::Row, Format>()};
}

constexpr ByDtype<BatchNormLayouts> tables::FT_ISA::norm = FT_BY_DTYPE(batch_norm_layouts);

}  // namespace cpu
}  // namespace fusedtrain
