// The table of gated.h.
#include "gated.h"

#include "tables.h"

namespace fusedtrain {
namespace cpu {

template <template <class> class Formula, class Format>
struct WithGate {
  using S = typename Format::Stored;
  static constexpr auto forward() -> void (*)(const S*, const S*, S*, int64_t) {
    if constexpr (FT_ISA::kWithGate<Formula>)
      return FT_ISA::gated_forward<Formula, Format, S>;
    else
      return nullptr;
  }
  static constexpr auto backward() -> void (*)(const S*, const S*, const S*, S*, S*, int64_t) {
    if constexpr (FT_ISA::kWithGate<Formula>)
      return FT_ISA::gated_backward<Formula, Format, S>;
    else
      return nullptr;
  }
};

template <class Format>
static constexpr TableOf<GatedKernels, Format> gated_kernels() {
  return {
#define FT_GATED_FORWARD(name, Formula, ...) WithGate<FT_ISA::Formula, Format>::forward(),
#define FT_GATED_BACKWARD(name, Formula, ...) WithGate<FT_ISA::Formula, Format>::backward(),
      {FT_POINTWISE(FT_GATED_FORWARD)},
      {FT_POINTWISE(FT_GATED_BACKWARD)},
  };
}

constexpr ByDtype<GatedKernels> tables::FT_ISA::gated = FT_BY_DTYPE(gated_kernels);

}  // namespace cpu
}  // namespace fusedtrain
