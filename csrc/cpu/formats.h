// The data of a tile as numbers, for steps that take turns on it.
#pragma once

#include "dispatch.h"

namespace fusedtrain {
namespace cpu {
namespace {

constexpr int64_t kTile = 1024;  // elements, which stay in the first-level cache

// How a dtype is read and written: in place, or by way of a buffer of floats.
template <class T_>
struct Wide {
  using T = T_;
  explicit Wide(Dtype) {}
  const T* read(const void* p, int64_t i, int64_t, T*) const {
    return static_cast<const T*>(p) + i;
  }
  T* room(void* p, int64_t i, T*) const { return static_cast<T*>(p) + i; }
  void write(const T*, void*, int64_t, int64_t) const {}
};
struct Narrow {
  using T = float;
  const Format& format;
  explicit Narrow(Dtype dtype) : format(format_of(dtype)) {}
  const T* read(const void* p, int64_t i, int64_t n, T* buffer) const {
    format.load(static_cast<const uint16_t*>(p) + i, buffer, n);
    return buffer;
  }
  T* room(void*, int64_t, T* buffer) const { return buffer; }
  void write(const T* from, void* p, int64_t i, int64_t n) const {
    format.store(from, static_cast<uint16_t*>(p) + i, n);
  }
};

// Calls run with how a dtype is read.
template <class Run>
void with_numbers(Dtype dtype, const Run& run) {
  if (dtype == Dtype::kFloat32) return run(Wide<float>(dtype));
  if (dtype == Dtype::kFloat64) return run(Wide<double>(dtype));
  run(Narrow(dtype));
}

}  // namespace
}  // namespace cpu
}  // namespace fusedtrain
