// Max pooling: places in tensors, and which kernels a call can have.
#pragma once

#include "../bits.h"
#include "../ops/pool.h"
#include "divisor.cuh"
#include "launch.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kPoolThreads = 256;

// An index without its sign: an address takes one instruction less.
template <class I>
using Unsigned = std::make_unsigned_t<I>;

// Sizes of a tensor in memory order; I is wide enough for all indices.
template <class I>
struct Image {
  Divisor<I> height, width, channels;
  Image(int64_t height, int64_t width, int64_t channels)
      : height(height), width(width), channels(channels) {}
};

// Where an element is. kPlanes: the channels are planes, one after the other.
template <class I, bool kPlanes = false>
struct Pixel {
  I plane, row, column, channel;
  __device__ __forceinline__ Pixel(I at, const Image<I>& image) {
    channel = kPlanes ? 0 : image.channels.digit(at);
    column = image.width.digit(at);
    row = image.height.digit(at);
    plane = at;
  }
};

// Divisions of 64 bits take several times as long. Windows reach beyond the tensor by less than a
// kernel and a stride.
bool is_small(const MaxPool& call) {
  constexpr int64_t kMost = int64_t(1) << 29;
  // equal (<= for < #1): indices from 2^32 on need more memory than tests have
  // equal (never #1): the speed alone changes
  return call.inputs() < kMost && call.outputs() < kMost && call.stride_h < kMost &&
         call.stride_w < kMost;
}

template <class S, class... P>
bool is_wide(const MaxPool& call, const P*... pointers) {
  // equal (never): the speed alone changes
  return call.channels % Vec<S>::kLanes == 0 && aligned(pointers...);
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
