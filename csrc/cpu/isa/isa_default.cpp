// No flags: the baseline of the platform.
#define FT_ISA baseline
#include "isa.inl.h"

const fusedtrain::cpu::Kernels& fusedtrain::cpu::kernels_default() {
  static constexpr Kernels kernels = make_kernels("default");
  return kernels;
}
