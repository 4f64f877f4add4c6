// Activations whose derivative is kept in few bits.
#pragma once

#include "common.h"

namespace fusedtrain {

// y[i] = f(x[i]), and the nearest level to f'(x[i]) as a code of so many bits, packed as bits.h
// says. op is one of FT_FEW_BIT, and has codes of that size.
struct FewBitForward {
  int op, bits;
  Dtype dtype;
  const void* x;
  void* y;
  uint8_t* codes;
};
// grad_input[i] = grad[i] times the level of code i.
struct FewBitBackward {
  int op, bits;
  Dtype dtype;
  const void* grad;
  const uint8_t* codes;
  void* grad_input;
};

namespace cpu {
void compute(const FewBitForward& call, int64_t n, Parallel parallel);
void compute(const FewBitBackward& call, int64_t n, Parallel parallel);
}  // namespace cpu

namespace cuda {
void compute(const FewBitForward& call, int64_t n, void* stream);
void compute(const FewBitBackward& call, int64_t n, void* stream);
}  // namespace cuda
using cpu::compute;
using cuda::compute;

}  // namespace fusedtrain
