// Flags: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c.
#define FT_ISA avx512
#include "isa.inl.h"

const fusedtrain::cpu::Kernels& fusedtrain::cpu::kernels_avx512() {
  static constexpr Kernels kernels = make_kernels("avx512");
  return kernels;
}
