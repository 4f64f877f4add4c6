// The part of CUDA that the kernels use, for the host's compiler: see ../README.md.
//
// Included before everything else (-include), as nvcc does with its own. Functions that kernels
// call are declared here and defined in emulator.cpp, which is not instrumented: their own memory
// accesses are not the kernel's.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <tuple>
#include <type_traits>
#include <utility>

#define __CUDACC__ 1
#define __CUDA_ARCH__ 900
#define __host__
#define __device__
#define __global__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// A large argument stays where it is: `const T __grid_constant__ x` (in this order) is a reference.
#define __grid_constant__ &
#define CUDART_VERSION 13000
// One block runs at a time, so its shared memory can be static.
#define __shared__ static

struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

__forceinline__ uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
__forceinline__ uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
__forceinline__ void __stwb(uint2* p, uint2 value) { *p = value; }
__forceinline__ void __stwb(uint4* p, uint4 value) { *p = value; }

// ../arithmetic.cpp
float emulated_expf(float x);
float emulated_exp2f(float x);
float emulated_reciprocal(float x);
float emulated_quotient(float a, float b);
float emulated_root(float x);
#define expf emulated_expf
#define exp2f emulated_exp2f
__forceinline__ float __frcp_rn(float x) { return emulated_quotient(1.0f, x); }
__forceinline__ uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return uint64_t((unsigned __int128)(a)*b >> 64);
}

namespace emulator {

uint3 thread_index();
uint3 block_index();
dim3 block_dim();
dim3 grid_dim();
void* dynamic_shared();

void barrier(const char* file, int line);
// Hands `value` to the lanes of `mask`, takes that of lane `source`; all lanes of the mask meet
// here.
uint64_t exchange(unsigned mask, uint64_t value, int source, const char* name);
unsigned ballot(unsigned mask, bool predicate, const char* name);
int lane();
enum class Atomic { kAdd, kMax, kExchange };
float atomic(float* p, float value, Atomic what);
double atomic(double* p, double value, Atomic what);
int atomic(int* p, int value, Atomic what);
unsigned atomic(unsigned* p, unsigned value, Atomic what);

}  // namespace emulator

// threadIdx.x and its kin: members that ask the emulator when they are used as numbers.
namespace emulator {
#define FT_INDEX(Name, function)                                   \
  struct Name {                                                    \
    struct X {                                                     \
      operator unsigned() const { return emulator::function().x; } \
    } x;                                                           \
    struct Y {                                                     \
      operator unsigned() const { return emulator::function().y; } \
    } y;                                                           \
    struct Z {                                                     \
      operator unsigned() const { return emulator::function().z; } \
    } z;                                                           \
  };
FT_INDEX(ThreadIndex, thread_index)
FT_INDEX(BlockIndex, block_index)
FT_INDEX(BlockDim, block_dim)
FT_INDEX(GridDim, grid_dim)
#undef FT_INDEX
}  // namespace emulator
constexpr emulator::ThreadIndex threadIdx{};
constexpr emulator::BlockIndex blockIdx{};
constexpr emulator::BlockDim blockDim{};
constexpr emulator::GridDim gridDim{};

#define __syncthreads() emulator::barrier(__FILE__, __LINE__)
// How launch.cuh names dynamic shared memory.
#define FT_DYNAMIC_SHARED(name)                                                       \
  unsigned char* const name = static_cast<unsigned char*>(emulator::dynamic_shared())

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulator::exchange(mask, 0, emulator::lane(), "__syncwarp");
}

namespace emulator {
template <class T>
__forceinline__ T shuffle(unsigned mask, T value, int source, const char* name) {
  static_assert(sizeof(T) <= 8, "a shuffle takes at most 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = exchange(mask, bits, source, name);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace emulator

template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = emulator::lane(), first = lane / width * width;
  return emulator::shuffle(mask, value, first + source % width, "__shfl_sync");
}
template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emulator::lane(), end = lane / width * width + width;
  const int source = lane + int(delta) < end ? lane + int(delta) : lane;
  return emulator::shuffle(mask, value, source, "__shfl_down_sync");
}
template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emulator::lane(), first = lane / width * width;
  const int source = lane - int(delta) >= first ? lane - int(delta) : lane;
  return emulator::shuffle(mask, value, source, "__shfl_up_sync");
}
template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
  const int lane = emulator::lane(), end = lane / width * width + width;
  const int source = (lane ^ flip) < end ? lane ^ flip : lane;
  return emulator::shuffle(mask, value, source, "__shfl_xor_sync");
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return emulator::ballot(mask, predicate != 0, "__ballot_sync");
}
inline int __any_sync(unsigned mask, int predicate) {
  return emulator::ballot(mask, predicate != 0, "__any_sync") != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return emulator::ballot(mask, predicate != 0, "__all_sync") == mask;
}

namespace emulator {
// AddressSanitizer checks what is compiled with it, and atomic() is not.
template <class T>
__forceinline__ void touch(T* p) {
#ifdef __SANITIZE_ADDRESS__
  static_cast<void>(*const_cast<volatile T*>(p));
#else
  (void)p;
#endif
}
}  // namespace emulator

template <class T>
__forceinline__ T atomicAdd(T* p, T value) {
  emulator::touch(p);
  return emulator::atomic(p, value, emulator::Atomic::kAdd);
}
template <class T>
__forceinline__ T atomicMax(T* p, T value) {
  emulator::touch(p);
  return emulator::atomic(p, value, emulator::Atomic::kMax);
}
template <class T>
__forceinline__ T atomicExch(T* p, T value) {
  emulator::touch(p);
  return emulator::atomic(p, value, emulator::Atomic::kExchange);
}

// The runtime.

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorLaunchFailure = 719,
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
using cudaStream_t = struct CUstream_st*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream);

namespace emulator {

// Runs `call(context)` once for every thread. Kernels may read the `bytes` of the context, in which
// their arguments are.
cudaError_t run(const cudaLaunchConfig_t& config, const void* kernel, void (*call)(void*),
                void* context, size_t bytes);
// Dynamic bytes that a kernel's launches may ask for.
size_t& shared_of(const void* kernel);

// Not instrumented: it reads the arguments from the host's stack, as the hardware does from its
// own.
template <class... P, size_t... I>
__attribute__((no_sanitize("thread"))) void invoke(void (*kernel)(P...),
                                                   std::tuple<std::decay_t<P>...>& arguments,
                                                   std::index_sequence<I...>) {
  kernel(std::get<I>(arguments)...);
}

template <class... P>
struct Launch {
  void (*kernel)(P...);
  std::tuple<std::decay_t<P>...> arguments;
  __attribute__((no_sanitize("thread"))) static void call(void* self) {
    Launch* launch = static_cast<Launch*>(self);
    invoke(launch->kernel, launch->arguments, std::index_sequence_for<P...>());
  }
};

}  // namespace emulator

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...),
                               A&&... arguments) {
  emulator::Launch<P...> launch{kernel, {std::forward<A>(arguments)...}};
  return emulator::run(*config, reinterpret_cast<const void*>(kernel),
                       &emulator::Launch<P...>::call, &launch, sizeof launch);
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  if (bytes > 99 << 10) return cudaErrorInvalidValue;
  emulator::shared_of(reinterpret_cast<const void*>(kernel)) = size_t(bytes);
  return cudaSuccess;
}
