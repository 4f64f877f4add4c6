// Sums over a warp and over a block, always in the same order.
#pragma once

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kWarp = 32;

// In lane 0: the sum over the warp. All 32 lanes must call it.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value += __shfl_down_sync(0xffffffffu, value, offset);
  return value;
}

// In thread 0: the sum over a block of kWarps warps. All threads must call it; `scratch` is shared
// memory for kWarps values, which may be used again after the next __syncthreads().
template <int kWarps, class T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  value = warp_sum(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  if (warp == 0) value = warp_sum(lane < kWarps ? scratch[lane] : T(0));
  return value;
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
