// Global memory in pieces of 16 bytes, and the conversion to the type that formulas compute in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "../ops/common.h"

namespace fusedtrain {
namespace cuda {
namespace {

// Compute type of a stored type.
template <class S>
struct Compute {
  using T = float;
};
template <>
struct Compute<double> {
  using T = double;
};

template <class S>
__host__ __device__ __forceinline__ typename Compute<S>::T load_one(S x) {
  return x;
}
template <>
__host__ __device__ __forceinline__ float load_one(__half x) {
  return __half2float(x);
}
template <>
__host__ __device__ __forceinline__ float load_one(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <class S>
__host__ __device__ __forceinline__ S store_one(typename Compute<S>::T x) {
  return x;
}
template <>
__host__ __device__ __forceinline__ __half store_one<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__host__ __device__ __forceinline__ __nv_bfloat16 store_one<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Neighbouring elements as floats; bfloat16 in pairs, an instruction each (by themselves: 1.5).
template <class S, int kCount>
__device__ __forceinline__ void unpack(const S (&stored)[kCount],
                                       typename Compute<S>::T (&lane)[kCount]) {
  if constexpr (std::is_same_v<S, __nv_bfloat16> && kCount % 2 == 0) {
    uint32_t bits[kCount];  // of floats; the second half is not used
    __builtin_memcpy(bits, stored, sizeof stored);
#pragma unroll
    for (int k = kCount - 1; k >= 0; --k)
      bits[k] = k % 2 ? bits[k / 2] & 0xffff0000u : bits[k / 2] << 16;
    __builtin_memcpy(lane, bits, sizeof bits);
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) lane[k] = load_one(stored[k]);
  }
}

// Neighbouring elements: kLanes of 16 bytes together, or one (kWide = false) of any alignment.
template <class S, bool kWide = true>
struct Vec {
  static constexpr bool kIsWide = kWide;
  static constexpr int kLanes = kWide ? 16 / sizeof(S) : 1;
  using T = typename Compute<S>::T;

  struct alignas(kLanes * sizeof(S)) Stored {
    S lane[kLanes];
  };

  T lane[kLanes];

  __device__ __forceinline__ void load(const S* p) {
    const Stored stored = *reinterpret_cast<const Stored*>(p);
#pragma unroll
    for (int k = 0; k < kLanes; ++k) lane[k] = load_one(stored.lane[k]);
  }

  __device__ __forceinline__ void store(S* p) const {
    Stored stored;
#pragma unroll
    for (int k = 0; k < kLanes; ++k) stored.lane[k] = store_one<S>(lane[k]);
    if constexpr (kWide) {
      // An ordinary store, spelt out: nvcc takes one of a struct apart, and puts the parts together
      // again only at times (not in channelwise.cu).
      uint4 bits;
      __builtin_memcpy(&bits, &stored, sizeof bits);
      __stwb(reinterpret_cast<uint4*>(p), bits);
    } else {
      *p = stored.lane[0];
    }
  }
};

// A vector on its way, as it is stored. Half the registers of floats, for the 16-bit types, and
// nothing that a branch between two loads could make the first one wait for.
template <class S, bool kWide = true>
struct Packed {
  using V = Vec<S, kWide>;
  using Bits = std::conditional_t<kWide, uint4, S>;
  Bits bits;

  __device__ __forceinline__ void load(const S* p) { bits = *reinterpret_cast<const Bits*>(p); }
  // Zeros where there is no tensor.
  __device__ __forceinline__ void load_if(const S* p, int64_t at) {
    if (p != nullptr)
      load(p + at);
    else
      bits = Bits{};
  }
  __device__ __forceinline__ void get(typename V::T (&lane)[V::kLanes]) const {
    typename V::Stored stored;
    __builtin_memcpy(&stored, &bits, sizeof bits);
#pragma unroll
    for (int k = 0; k < V::kLanes; ++k) lane[k] = load_one(stored.lane[k]);
  }
  __device__ __forceinline__ V get() const {
    V v;
    get(v.lane);
    return v;
  }
};

// The codes of neighbouring elements, a byte each.
template <int kBytes>
struct BytesOf {
  using Word = uint64_t;
};
template <>
struct BytesOf<4> {
  using Word = uint32_t;
};
template <>
struct BytesOf<2> {
  using Word = uint16_t;
};
template <>
struct BytesOf<1> {
  using Word = uint8_t;
};

// The parameters as the formula is to see them.
template <class S>
struct Parameters {
  double value[kMaxParameters];
  Parameters(const double* given, bool rounds) {
    // equal (<= for <): an overrun that AddressSanitizer sees
    for (int k = 0; k < kMaxParameters; ++k)
      value[k] =
          rounds ? double(load_one(store_one<S>(typename Compute<S>::T(given[k])))) : given[k];
  }
};

// Calls f with a null pointer of the stored type.
template <class F>
void by_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(static_cast<float*>(nullptr));
    case Dtype::kFloat64:
      return f(static_cast<double*>(nullptr));
    case Dtype::kFloat16:
      return f(static_cast<__half*>(nullptr));
    case Dtype::kBFloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
  }
}

// Whether Vec<S> can be used on all of these.
template <class... P>
inline bool aligned(const P*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) | ...) % 16) == 0;
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
