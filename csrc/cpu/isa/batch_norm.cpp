// The table of batch_norm.h.
#include "batch_norm.h"

#include "batch_norm_channels.h"
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

// Members of one type are set by name: in a list of values two could change places unnoticed.
template <class By, class Format>
static constexpr auto batch_norm_kernels() {
  using T = typename Format::Number;
  using Tile = NormTile<typename Format::Stored, T>;
  TableOf<BatchNormKernels, Format> kernels = {};
  kernels.collect = FT_ISA::norm_collect<By, Format, Tile>;
  kernels.normalise = FT_ISA::norm_forward<By, Format, FT_ISA::Identity, Tile>;
  kernels.restore = FT_ISA::norm_restore<By, Format, Tile>;
  kernels.reduce = FT_ISA::norm_reduce<By, Format, Tile>;
  kernels.grad_input = FT_ISA::norm_grad_input<By, Format, Tile, T>;
  kernels.move_sums = FT_ISA::move_sums<T>;
  int op = 0;
#define FT_NORM_FORMULA(name, Formula, n, rounds, saved)                     \
  {                                                                          \
    using Kernels = WithNorm<By, Format, FT_ISA::Formula, saved == kOutput>; \
    kernels.forward[op] = Kernels::forward();                                \
    kernels.backward[op++] = Kernels::backward();                            \
  }
  FT_POINTWISE(FT_NORM_FORMULA)
  return kernels;
}
template <class Format>
static constexpr auto batch_norm_layouts() {
  TableOf<BatchNormLayouts, Format> layouts = {};
  layouts.by_column = batch_norm_kernels<FT_ISA::Column, Format>();
  layouts.by_row = batch_norm_kernels<FT_ISA::Row, Format>();
  layouts.channels.guess = FT_ISA::norm_guess<Format>;
  layouts.channels.moments = FT_ISA::norm_moments;
  layouts.channels.center = FT_ISA::norm_center;
  layouts.channels.settle = FT_ISA::norm_settle<typename Format::Number>;
  layouts.channels.track = FT_ISA::norm_track<typename Format::Number>;
  return layouts;
}

constexpr ByDtype<BatchNormLayouts> tables::FT_ISA::norm = FT_BY_DTYPE(batch_norm_layouts);

}  // namespace cpu
}  // namespace fusedtrain
