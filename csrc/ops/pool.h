// Max pooling, with the places of the maxima.
#pragma once

#include "common.h"

namespace fusedtrain {

// The maximum of every window. In memory order a tensor is planes x height x width x channels: one
// channel where it is contiguous, the samples as planes where it is channels_last. Windows are so
// placed that each has an element of the input. The code of an output is the place of its maximum
// in the window, row by row, with so many `bits` of 1, 2, 4 or 8 (csrc/bits.h).
struct MaxPool {
  Dtype dtype;
  int64_t planes, channels, height, width, out_height, out_width;
  int64_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
  int bits;
  int64_t inputs() const { return planes * channels * height * width; }
  int64_t outputs() const { return planes * channels * out_height * out_width; }
};
struct MaxPoolForward : MaxPool {
  const void* x;
  void* y;
  uint8_t* codes;  // null and 0 bits: nobody asks for them
};
// An input of several windows gets its sum in the order of the outputs, in the type computed in.
struct MaxPoolBackward : MaxPool {
  const void* grad;
  const uint8_t* codes;
  void* grad_input;
};

FT_ENTRIES(MaxPoolForward)
FT_ENTRIES(MaxPoolBackward)

}  // namespace fusedtrain
