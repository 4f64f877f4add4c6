// Flags: -mavx2 -mfma -mf16c.
#define FT_ISA avx2
#include "isa.inl.h"

const fusedtrain::cpu::Kernels& fusedtrain::cpu::kernels_avx2() {
  static constexpr Kernels kernels = make_kernels("avx2");
  return kernels;
}
