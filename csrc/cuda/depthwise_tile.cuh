// A tile of an image in channels_last in shared memory: positions of 128 bytes of channels.
#pragma once

#include "depthwise.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kQuad = 4, kPositionBytes = 128, kPositionVectors = kPositionBytes / 16;
template <class S>
constexpr int kPositionChannels = kPositionBytes / int(sizeof(S));
template <class S>
constexpr int kQuads = kPositionChannels<S> / kQuad;

template <class T>
struct alignas(kQuad * sizeof(T)) Quad {
  T lane[kQuad];

  // One access: a struct is stored in parts.
  __device__ __forceinline__ void store(T* to) const {
    using Bits = std::conditional_t<sizeof(T) == 2, uint2, uint4>;
    Bits bits;
    __builtin_memcpy(&bits, lane, sizeof bits);
    *reinterpret_cast<Bits*>(to) = bits;
  }
};

// Loads a tile whose first position is (row, column) of an image; zeros outside, and beyond
// `exist` channels. `image` is at the first one of these. All threads of the block must call it.
template <int kRows, int kColumns, int kThreads, class S>
__device__ __forceinline__ void load_tile(uint4* tile, const S* image, int32_t first_row,
                                          int32_t first_column, const int32_t (&size)[2],
                                          int32_t channels, int32_t exist) {
  // Threads go down the columns, a vector of channels each; if they are many, every kDown-th row.
  constexpr int kSlots = kThreads / kPositionVectors;
  constexpr int kAcross = kSlots < kColumns ? kSlots : kColumns, kDown = kSlots / kAcross;
  constexpr int kLanes = 16 / int(sizeof(S)), kTurns = (kRows + kDown - 1) / kDown;
  const int vector = threadIdx.x % kPositionVectors, slot = threadIdx.x / kPositionVectors;
  const int begin = slot / kAcross;
  if (begin >= kDown) return;
  const int32_t pitch = size[1] * channels;
  for (int c = slot % kAcross; c < kColumns; c += kAcross) {
    const bool exists = vector * kLanes < exist && within(first_column + c, size[1]);
    const S* from =
        image + (first_row + begin) * pitch + (first_column + c) * channels + vector * kLanes;
    uint4 bits[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn, from += kDown * pitch) {
      bits[turn] = {};
      if (exists && within(first_row + begin + turn * kDown, size[0]))
        bits[turn] = *reinterpret_cast<const uint4*>(from);
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = begin + turn * kDown;
      if (kRows % kDown == 0 || row < kRows)
        tile[(row * kColumns + c) * kPositionVectors + vector] = bits[turn];
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
