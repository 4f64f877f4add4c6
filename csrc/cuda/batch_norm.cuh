// Inputs of the kernels of batch norm: values of channels, pointers of a call.
#pragma once

#include "batch_norm_walk.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// Channels of a vector's lanes; get() reads their values from an array with one value a channel.
template <int kLanes>
struct Channels {
  int64_t first;
  int after[kLanes];  // channel of a lane - first
  bool adjacent;

  __device__ __forceinline__ Channels(const Walk& w, int64_t column) {
    first = column / w.of_channel;
    int64_t in_channel = column - first * w.of_channel.value;
    int channel = 0;
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      after[k] = channel;
      if (++in_channel == w.of_channel.value) {
        in_channel = 0;
        ++channel;
      }
    }
    adjacent = w.adjacent;
  }

  template <class T>
  __device__ __forceinline__ void get(const T* values, T (&lane)[kLanes]) const {
    constexpr int kPiece = Vec<T>::kLanes;
    // Planes: one load for all lanes.
    if (after[kLanes - 1] == 0) {
      const T value = values[first];
#pragma unroll
      for (int k = 0; k < kLanes; ++k) lane[k] = value;
      return;
    }
    if constexpr (kLanes % kPiece == 0) {
      if (adjacent) {
#pragma unroll
        for (int k = 0; k < kLanes; k += kPiece) {
          Vec<T> piece;
          piece.load(values + first + k);
#pragma unroll
          for (int i = 0; i < kPiece; ++i) lane[k + i] = piece.lane[i];
        }
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < kLanes; ++k) lane[k] = values[first + after[k]];
  }
};

// The pointers to elements of a call, and to vectors of what is computed in.
template <class S>
struct Tensors {
  using T = typename Compute<S>::T;
  const S* x;
  const S* other;  // the residual, or what was saved in its place
  const S* grad;
  S* out;
  S* grad_residual;
  const T *branch_scale, *weight, *bias, *mean, *invstd;

  explicit Tensors(const BatchNorm& n)
      : x(static_cast<const S*>(n.x)),
        other(nullptr),
        grad(nullptr),
        out(nullptr),
        grad_residual(nullptr),
        branch_scale(static_cast<const T*>(n.branch_scale)),
        weight(static_cast<const T*>(n.weight)),
        bias(static_cast<const T*>(n.bias)),
        mean(static_cast<const T*>(n.mean)),
        invstd(static_cast<const T*>(n.invstd)) {}

  Walk walk(const BatchNorm& n) const {
    // No vectors of doubles: fewer kernels to compile, for a type that nobody trains in.
    const bool wide = sizeof(S) < 8 && aligned(x, other, grad, out, grad_residual);
    Walk w = walk_for(n, 16 / sizeof(S), wide);
    w.adjacent = w.wide && w.of_channel.value == 1 && aligned(weight, bias, mean, invstd);
    return w;
  }

  // branch_scale of the sample that an element is of.
  __device__ __forceinline__ T scale_of(const Walk& w, int64_t at) const {
    return branch_scale == nullptr ? T(1) : branch_scale[at / w.of_sample];
  }
};

// z = (x - mean) scale + bias, for the lanes of a vector.
template <class T, int kLanes>
struct Affine {
  T mean[kLanes], scale[kLanes], bias[kLanes];

  template <class S>
  __device__ __forceinline__ Affine(const Tensors<S>& t, const Channels<kLanes>& channels)
      : Affine(t, channels, [](T (&)[kLanes], T (&)[kLanes]) {}) {}

  // `settle` makes mean and invstd of what lies in their places.
  template <class S, class F>
  __device__ __forceinline__ Affine(const Tensors<S>& t, const Channels<kLanes>& channels,
                                    F settle) {
    channels.get(t.mean, mean);
    channels.get(t.invstd, scale);
    settle(mean, scale);
    T weight[kLanes];
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      weight[k] = T(1);
      bias[k] = T(0);
    }
    if (t.weight != nullptr) channels.get(t.weight, weight);
    if (t.bias != nullptr) channels.get(t.bias, bias);
#pragma unroll
    for (int k = 0; k < kLanes; ++k) scale[k] *= weight[k];
  }

  __device__ __forceinline__ T operator()(T x, int k) const {
    return (x - mean[k]) * scale[k] + bias[k];
  }
};

// Calls f with each vector of a thread. kBatch of them are on their way together: one in advance
// would not be, since nvcc converts a vector to floats before it loads into the registers that this
// frees. One copy of what f does.
template <int kBatch, class Loaded, class S, int kLanes, class F>
__device__ __forceinline__ void for_vectors(const Walk& w, const Tensors<S>& t, Position<kLanes>& p,
                                            F f) {
#pragma unroll 1
  for (; p.left > 0; p.left -= kBatch) {  // equal (>= for >): nothing lies beyond the last element
    Loaded loaded[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (j < p.left) loaded[j].load(w, t, p.next(w));
    const int count = p.left < kBatch ? p.left : kBatch;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      f(loaded[0]);
#pragma unroll
      for (int i = 1; i < kBatch; ++i) loaded[i - 1] = loaded[i];
    }
  }
}

// Calls f with a null pointer of the stored type and whether vectors are wide.
template <class F>
void by_kind(Dtype dtype, F f) {
  by_dtype(dtype, [&](auto* null) {
    f(null, std::false_type());
    if constexpr (sizeof *null < 8) f(null, std::true_type());
  });
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
