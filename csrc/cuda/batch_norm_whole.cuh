// Batch norm in one launch, where all elements of a block's channels fit its shared memory: each
// tensor is read once, and all that a block reads is on its way at the same time.
//
// The lines of a block end where a channel ends: 49 vectors of 16 bytes are eight planes of 7x7 in
// 16 bits, or two of 14x14. In channels_last a block has 32 bytes of each row, or more.
#pragma once

#include <cuda_pipeline.h>

#include <numeric>

#include "batch_norm_sums.cuh"
#include "formula.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// Shared memory of the kernels beside what they keep, at most.
constexpr int kBesides = 12 << 10;

// The vectors of a tensor that a thread keeps in shared memory.
template <class S>
struct Kept {
  Packed<S>* mine;  // null: there is no tensor
  int pitch;

  // On their way until settled(). `free` moves on.
  __device__ __forceinline__ Kept(const Walk& w, Position<Vec<S>::kLanes> p, const S* tensor,
                                  unsigned char*& free)
      : mine(nullptr), pitch(kThreads / w.across * w.across) {
    if (tensor == nullptr) return;
    mine = reinterpret_cast<Packed<S>*>(free) + threadIdx.x;
    free += w.vectors * w.across * sizeof(Packed<S>);
#pragma unroll 4
    for (int j = 0; j < p.left; ++j)
      __pipeline_memcpy_async(mine + j * pitch, tensor + p.next(w), sizeof(Packed<S>));
  }

  __device__ __forceinline__ Packed<S> operator[](int j) const {
    return mine == nullptr ? Packed<S>{} : mine[j * pitch];
  }
  __device__ __forceinline__ void put(int j, const Vec<S>& v) const {
    typename Vec<S>::Stored stored;
    Packed<S> packed;
#pragma unroll
    for (int k = 0; k < Vec<S>::kLanes; ++k) stored.lane[k] = store_one<S>(v.lane[k]);
    __builtin_memcpy(&packed.bits, &stored, sizeof stored);
    mine[j * pitch] = packed;
  }
};

__device__ __forceinline__ void settled() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

// Channels of a block. A team of threads adds up the columns of each: its first one leads.
struct Team {
  int of_channel, channels;
  int segment, member;  // the team's channel, within the block
  int64_t first;        // channel of the block

  __device__ __forceinline__ explicit Team(const Walk& w) {
    const Block block(w);
    of_channel = int(w.of_channel.value);
    channels = block.columns / of_channel;
    segment = threadIdx.x / w.team;
    member = threadIdx.x % w.team;
    first = block.first_column / w.of_channel;
  }
  __device__ __forceinline__ bool leads() const { return member == 0 && segment < channels; }
  __device__ __forceinline__ int64_t channel() const { return first + segment; }

  // In the leading threads: the sum over a channel of all lanes. All threads must call it.
  template <int kLanes, class T>
  __device__ __forceinline__ T sum(const Walk& w, T (&lane)[kLanes], T* columns) const {
    const int width = w.across * kLanes, line = threadIdx.x % w.across;
    int rows = kThreads / w.across, row = threadIdx.x / w.across;
    bool writes = row < rows;
    if ((w.across & (w.across - 1)) == 0) {  // the lines of a warp's threads repeat
      for (int offset = kWarp / 2; offset >= w.across; offset /= 2) {
#pragma unroll
        for (int k = 0; k < kLanes; ++k) lane[k] += __shfl_down_sync(0xffffffffu, lane[k], offset);
      }
      rows = kWarps;
      row = threadIdx.x / kWarp;
      writes = threadIdx.x % kWarp < w.across;
    }
    __syncthreads();  // the sums before have been read
    if (writes) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) columns[row * width + line * kLanes + k] = lane[k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += kThreads) {
      T sum = columns[i];
      for (int at = i + width; at < rows * width; at += width) sum += columns[at];
      columns[i] = sum;
    }
    __syncthreads();
    T sum = T(0);
    for (int i = member; i < of_channel && segment < channels; i += w.team)
      sum += columns[segment * of_channel + i];
    for (int offset = w.team / 2; offset > 0; offset /= 2)
      sum += __shfl_down_sync(0xffffffffu, sum, offset);
    return sum;
  }
};

// Lines of a block, which hold whole channels; 0: a line is a channel.
inline int64_t whole_lines(const BatchNorm& n, const Walk& w, int lanes) {
  if (w.run.value > 1) return 0;
  int64_t across = n.inner / std::gcd(n.inner, int64_t(lanes));
  const auto doubles = [&] {
    if (across < 2) return true;
    const int64_t blocks = w.width / lanes / (2 * across);
    return across * w.vectors < kThreads * kFewestVectors && blocks >= multiprocessors();
  };
  // equal (<= for <, < for <=): the speed alone changes
  while (2 * across <= kWarp && doubles()) across *= 2;
  return across;
}

// Whether it has launched the kernel.
template <template <class, class, bool> class Pass, class S, class... A>
bool launch_whole(const BatchNorm& n, const Tensors<S>& t, void* stream, const A&... arguments) {
  constexpr int kLanes = Vec<S>::kLanes;
  const Walk part = t.walk(n);
  if (!part.wide) return false;
  const int64_t lines = whole_lines(n, part, kLanes), across = lines > 0 ? lines : 1;
  const int64_t bytes =
      part.vectors * across * sizeof(Packed<S>) * (1 + (t.other != nullptr) + (t.grad != nullptr));
  const int most = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - kBesides;
  if (across > kThreads || bytes > most) return false;
  Walk w = walk_for(n, kLanes, true, int(across));
  // A few large blocks would leave most of the device idle.
  // equal (< for <=, >= for >): the speed alone changes
  if (bytes > 64 << 10 && w.parts.value * 3 < multiprocessors()) return false;
  w.adjacent = part.adjacent;
  launch(kernel_of<Pass, S>(n.op, true), w.parts.value, kThreads, stream, size_t(bytes),
         chosen<S>(n.op, n.parameters), w, t, arguments...);
  return true;
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
