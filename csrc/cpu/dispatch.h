// Basis of the loops of all families: the kernels of this process, and how a dtype is read.
#pragma once

#include <stdint.h>

#include "isa/kernels.h"

namespace fusedtrain {
namespace cpu {

// The kernels of this process.
const Kernels& kernels();

// The parameters of a pointwise formula as the tensor's dtype holds them, where it asks for that.
void round_parameters(int op, Dtype dtype, const double* in, double* out);

// Whether backward of the formula takes the output. False for -1, which is no formula.
bool takes_output(int op);

// The converters of a 16-bit dtype.
inline const Format& format_of(Dtype dtype) {
  return dtype == Dtype::kFloat16 ? kernels().half : kernels().bfloat16;
}

namespace {

// Elements a thread takes at least; torch's own pointwise kernels use the same number.
constexpr int64_t kGrain = 32768;

// Calls part(first, last) for pieces of [0, n): one on the calling thread where n is at most
// `grain`.
template <class Part>
void in_parts(Parallel parallel, int64_t n, int64_t grain, const Part& part) {
  if (n <= 0) return;
  if (n <= grain) return part(int64_t(0), n);
  parallel.run(n, grain, &part, [](const void* state, int64_t first, int64_t last) {
    (*static_cast<const Part*>(state))(first, last);
  });
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
T* at(void* p, int64_t i) {
  return static_cast<T*>(p) + i;
}
template <class T>
const T* at(const void* p, int64_t i) {
  return static_cast<const T*>(p) + i;
}

// The table of numbers of a type.
template <template <class> class Table>
const Table<float>& table_of(const ByNumber<Table>& tables, float) {
  return tables.f32;
}
template <template <class> class Table>
const Table<double>& table_of(const ByNumber<Table>& tables, double) {
  return tables.f64;
}
template <template <class, class> class Table>
const Table<float, float>& table_of(const ByDtype<Table>& tables, float) {
  return tables.f32;
}
template <template <class, class> class Table>
const Table<double, double>& table_of(const ByDtype<Table>& tables, double) {
  return tables.f64;
}

// Calls f with the table of the dtype.
template <template <class, class> class Table, class F>
void by_dtype(Dtype dtype, const ByDtype<Table>& tables, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(tables.f32);
    case Dtype::kFloat64:
      return f(tables.f64);
    case Dtype::kFloat16:
      return f(tables.f16);
    case Dtype::kBFloat16:
      return f(tables.bf16);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace fusedtrain
