// Gated products.
#pragma once

#include "common.h"

namespace fusedtrain {

// Gated products: y = f(gate) value. Every tensor is `rows` runs of n elements, each run
// `*_stride` elements after the one before; y and grad are dense. op as in BatchNorm.
struct Gated {
  int op;
  Dtype dtype;
  int64_t rows, n;
  double parameters[kMaxParameters];
  const void* gate;
  const void* value;
  int64_t gate_stride, value_stride;
};
struct GatedForward : Gated {
  void* y;
};
struct GatedBackward : Gated {
  const void* grad;
  void* grad_gate;
  void* grad_value;
  int64_t grad_gate_stride, grad_value_stride;
};

FT_ENTRIES(GatedForward)
FT_ENTRIES(GatedBackward)

}  // namespace fusedtrain
