// A batch norm folded into the weight before it.
#pragma once

#include "common.h"

namespace fusedtrain {

// The weight of a convolution with that of the batch norm after it (fusedtrain/reference/fold.py).
// A weight is rows x channels x inner in memory order; channel c of row r makes output channel r /
// rows_per_group * channels + c. Vectors have one value an output channel, and are float, or double
// where the weight is.
struct FoldWeight {
  Dtype dtype;  // of weights
  int64_t rows, channels, inner, rows_per_group;
  const void* weight;
  const void* bias;   // or null: 0
  const void* gamma;  // or null: 1
  const void* mean;
  const void* var;
  double eps;

  int64_t outputs() const { return rows / rows_per_group * channels; }
};
struct FoldForward : FoldWeight {
  const void* beta;  // or null: 0
  void* folded;
  void* folded_bias;
};
struct FoldBackward : FoldWeight {
  const void* grad_folded;
  const void* grad_folded_bias;
  void* grad_weight;
  void* grad_bias;
  void* grad_gamma;
};

FT_ENTRIES(FoldForward)
FT_ENTRIES(FoldBackward)

}  // namespace fusedtrain
