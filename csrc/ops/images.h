// Images of bytes to normalised numbers.
#pragma once

#include "common.h"

namespace fusedtrain {

// y = x upper + (x lower + shift) of bytes, one value of each a channel: 1 / (255 std) in two parts
// of 16 bits, and -mean / std. Products of such a part and a byte are exact, so the result has the
// same bits where a compiler fuses them with the additions and where it does not. Channels are the
// innermost dimension of x or y (`last`), or each sample has a plane of `pixels` for each of them.
struct NormalizeImages {
  Dtype dtype;  // of y; not kFloat64
  int64_t samples, channels, pixels;
  bool x_last, y_last;
  const uint8_t* x;
  const float* coefficients;  // [3, channels]: upper, lower, shift
  void* y;
};
// Where x_last != y_last.
constexpr int64_t kMostChannelsMoved = 16;

FT_ENTRIES(NormalizeImages)

}  // namespace fusedtrain
