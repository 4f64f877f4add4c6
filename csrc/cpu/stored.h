// Numbers of all dtypes, one at a time.
#pragma once

#include "../ops/common.h"
#include "isa/convert.h"

namespace fusedtrain {
namespace cpu {
namespace {

struct Float16 {
  uint16_t bits;
};
struct Brain16 {
  uint16_t bits;
};

inline float load(float x) { return x; }
inline double load(double x) { return x; }
inline float load(Float16 x) { return FT_ISA::half_to_float(x.bits); }
inline float load(Brain16 x) { return FT_ISA::bfloat16_to_float(x.bits); }
inline void store(float* p, float x) { *p = x; }
inline void store(double* p, double x) { *p = x; }
inline void store(Float16* p, float x) { p->bits = FT_ISA::float_to_half(x); }
inline void store(Brain16* p, float x) { p->bits = FT_ISA::float_to_bfloat16(x); }

// Calls f with a number of the dtype as it is stored.
template <class F>
void by_stored(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(float());
    case Dtype::kFloat64:
      return f(double());
    case Dtype::kFloat16:
      return f(Float16());
    case Dtype::kBFloat16:
      return f(Brain16());
  }
}

}  // namespace
}  // namespace cpu
}  // namespace fusedtrain
