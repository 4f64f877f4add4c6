// Where the formulas live: on the device under nvcc, else in a namespace of the instruction set.
//
// FT_ISA is set by the unit that includes the formulas (by the build, for cpu/isa/), so that no
// function compiled with AVX-512 can be the copy that another unit links to.
#pragma once

#ifdef __CUDACC__
#define FT_INLINE static __host__ __device__ __forceinline__
#define FT_METHOD __host__ __device__ __forceinline__
#else
#define FT_INLINE static inline __attribute__((always_inline))
#define FT_METHOD inline __attribute__((always_inline))
#endif

#ifndef FT_ISA
#define FT_ISA formulas
#endif

#define FT_BEGIN_NAMESPACE \
  namespace fusedtrain {   \
  namespace FT_ISA {       \
  namespace {
#define FT_END_NAMESPACE \
  }                      \
  }                      \
  }
