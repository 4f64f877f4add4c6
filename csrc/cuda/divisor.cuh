// Division by a number that is known before the launch.
#pragma once

#include <stdint.h>

namespace fusedtrain {
namespace cuda {
namespace {

// Divides numbers below 2^31 by a multiplication; those of 64 bits as they are.
template <class I>
struct Divisor {
  I by = 1;
  uint32_t factor = 0;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(int64_t number) : by(I(number)) {
    int bits = 0;
    while ((int64_t(1) << bits) < number) ++bits;
    shift = 31 + bits;
    // equal (<= for <): numbers above 2^31 are divided without the factor
    // equal (+ for -): the quotient is exact below 2^30; is_small() bounds it
    if (bits < 32) factor = uint32_t(((uint64_t(1) << shift) + number - 1) / number);
  }
  __device__ __forceinline__ I quotient(I n) const {
    if constexpr (sizeof(I) == 4)
      return I((uint64_t(uint32_t(n)) * factor) >> shift);
    else
      return n / by;
  }
  // Takes the last digit off `n`.
  __device__ __forceinline__ I digit(I& n) const {
    const I rest = quotient(n), last = n - rest * by;
    n = rest;
    return last;
  }
};

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
