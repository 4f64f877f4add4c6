// Blocks that have all elements of their channels, in shared memory: each tensor is read once, all
// that a block reads is on its way at the same time, and one launch does.
//
// A block's lines end where a channel ends: 49 vectors of 16 bytes are eight planes of 7x7 in 16
// bits, or two of 14x14. In channels_last a block has 32 bytes of each row.
#pragma once

#include <cuda_pipeline.h>

#include <numeric>

#include "batch_norm_sums.cuh"
#include "formula.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// The vectors of tensors that a thread keeps in shared memory, `pitch` apart.
template <class S>
struct Kept {
  const Walk& w;
  const Position<Vec<S>::kLanes>& p;
  int pitch;
  Packed<S>* free;

  __device__ __forceinline__ Kept(const Walk& w, const Position<Vec<S>::kLanes>& p)
      : w(w), p(p), pitch(kThreads / w.across * w.across) {
    FT_DYNAMIC_SHARED(memory);
    free = reinterpret_cast<Packed<S>*>(memory) + threadIdx.x;
  }
  // Where a tensor's will be after __pipeline_wait_prior(0); null where there is no tensor.
  __device__ __forceinline__ const Packed<S>* begin(const S* tensor) {
    if (tensor == nullptr) return nullptr;
    Packed<S>* kept = free;
    free += w.vectors * w.across;
    Position<Vec<S>::kLanes> next = p;
#pragma unroll 4
    for (int j = 0; j < p.left; ++j)
      __pipeline_memcpy_async(kept + j * pitch, tensor + next.next(w), sizeof *kept);
    return kept;
  }
  __device__ __forceinline__ Packed<S> get(const Packed<S>* kept, int j) const {
    return kept == nullptr ? Packed<S>{} : kept[j * pitch];
  }
};

// Launches a pass where all of a block's channels fit its shared memory; returns whether they do.
template <class Kernel, class S, class... A>
bool launch_whole(Kernel* kernel, const BatchNorm& n, const Tensors<S>& t, void* stream,
                  const A&... arguments) {
  constexpr int kLanes = Vec<S>::kLanes, kBesides = 20 << 10;  // at most, beside what is kept
  const Walk part = t.walk(n);
  // Lines of a block: one that is a channel, or two at least, of whole channels.
  int64_t lines = n.inner / std::gcd(n.inner, int64_t(kLanes));
  lines = part.run.value > 1 ? 1 : lines < 2 ? 2 : lines;  // equal (<= for <): 2 stays 2
  if (!part.wide || lines > kThreads) return false;        // equal (>= for >): it is never 256
  Walk w = walk_for(n, kLanes, true, int(lines));
  w.adjacent = part.adjacent;
  const int64_t bytes =
      w.vectors * lines * sizeof(Packed<S>) * (1 + (t.other != nullptr) + (t.grad != nullptr));
  const int most = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - kBesides;
  if (bytes > most) return false;
  // A few large blocks would leave much of the device idle.
  // equal (>= for >, <= for <, never): the speed alone changes
  if (bytes > 128 << 10 && 4 * w.parts.value < 3 * multiprocessors()) return false;
  // The same number each time: another thread may launch the kernel, too.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
        "cudaFuncSetAttribute");
  launch(kernel, w.parts.value, kThreads, stream, size_t(bytes), chosen<S>(n.op, n.parameters), w,
         t, arguments...);
  return true;
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
