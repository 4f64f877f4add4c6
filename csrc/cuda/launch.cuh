// The one way to start a kernel, and what the launchers need to know of the device.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace fusedtrain {
namespace cuda {

// Kernels started so far, of all devices. The tests read the number: a test of the kernels that
// starts none has tested something else.
inline std::atomic<int64_t> launches{0};

namespace {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the error is told here, not at the next call
  std::string message = std::string("fusedtrain: ") + what + ": " + cudaGetErrorString(error);
  if (error == cudaErrorInsufficientDriver || error == cudaErrorNoKernelImageForDevice)
    message += " (FUSEDTRAIN_BACKEND=triton or reference runs without the compiled kernels)";
  throw std::runtime_error(message);
}

// The most that a launch's arguments may take (on sm_70 and newer, where the toolkit knows of it),
// in whole pointers. A launch copies all bytes of its kernel's arguments, used or not, so kernels
// that take tables have an instance with a smaller one, too; of 4 KB, which every toolkit allows,
// where that is enough.
#if CUDART_VERSION >= 12010
constexpr int kArgumentBytes = 32760;
#else
constexpr int kArgumentBytes = 4096;
#endif
constexpr int kSmallArgumentBytes = 4096;

// Dynamic shared memory of a kernel, 16-byte aligned (tests/cuda_emulator has a definition of its
// own).
#ifndef FT_DYNAMIC_SHARED
#define FT_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

template <class... P, class... A>
void launch(void (*kernel)(P...), int64_t blocks, int threads, void* stream, size_t shared_bytes,
            const A&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, static_cast<const std::decay_t<P>&>(arguments)...),
        "kernel launch");
  launches.fetch_add(1, std::memory_order_relaxed);
}

// An attribute of the current device. Asked once a device: the query takes 1 us.
template <cudaDeviceAttr kAttribute>
int device_attribute() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  // equal (<= for <): a machine would need 65 GPUs
  if (device < kDevices) count = known[device].load(std::memory_order_relaxed);
  if (count == 0) {
    check(cudaDeviceGetAttribute(&count, kAttribute, device), "cudaDeviceGetAttribute");
    if (device < kDevices) known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}
inline int multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
