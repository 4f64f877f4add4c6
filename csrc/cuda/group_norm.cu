// Vectors of group norm: a warp a group of a sample, and a thread a channel for the gradients.
#include "../formulas.h"
#include "../ops/group_norm.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kGroupThreads = 128;

template <class S>
struct Numbers {
  using T = typename Compute<S>::T;

  static __device__ __forceinline__ T affine(const GroupNorm& call, const void* p, int64_t i,
                                             T otherwise) {
    if (p == nullptr) return otherwise;
    return call.wide_affine ? static_cast<const T*>(p)[i] : load_one(static_cast<const S*>(p)[i]);
  }
  static __device__ __forceinline__ T modulation(const void* p, int64_t i) {
    return p == nullptr ? T(0) : load_one(static_cast<const S*>(p)[i]);
  }
  static __device__ __forceinline__ void put(void* p, int64_t i, double value) {
    if (p != nullptr) static_cast<S*>(p)[i] = store_one<S>(T(value));
  }
};

// The channels of a warp's group.
struct Group {
  int64_t size, place;  // the first channel among those of all samples
  int channel;          // among those of its sample
  __device__ __forceinline__ explicit Group(const GroupNorm& call)
      : size(call.channels / call.groups) {
    const int64_t i = (int64_t(blockIdx.x) * kGroupThreads + threadIdx.x) / kWarp;
    place = i * size;
    channel = int(i % call.groups * size);
  }
  __device__ __forceinline__ bool exists(const GroupNorm& call) const {
    return place < call.samples * call.channels;
  }
  // Calls f(i) for the lane's channels of the group.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    // equal (the next thread): lanes change places
    for (int64_t i = threadIdx.x % kWarp; i < size; i += kWarp) f(i);
  }
};

// In all lanes, as which the others are called.
__device__ __forceinline__ double all_sum(double value) {
  return __shfl_sync(0xffffffffu, warp_sum(value), 0);
}

template <class S>
__global__ void __launch_bounds__(kGroupThreads) vectors_kernel(const GroupNormVectors call) {
  using N = Numbers<S>;
  using T = typename N::T;
  const Group g(call);
  if (!g.exists(call)) return;
  const double *average = call.average + g.place, *variance = call.variance + g.place;
  double sum = 0, within = 0, between = 0;
  g.each([&](int64_t i) {
    sum += average[i];
    within += variance[i];
  });
  const double mean = all_sum(sum) / double(g.size);
  // equal (+ for -): the same sum
  g.each([&](int64_t i) { between += (average[i] - mean) * (average[i] - mean); });
  const double total = all_sum(within) + all_sum(between);
  const double invstd = 1.0 / formulas::math::sqrt(total / double(g.size) + call.eps);
  g.each([&](int64_t i) {
    const int64_t at = g.place + i, channel = g.channel + i;
    const T scale = T(1) + N::modulation(call.scale, at);
    static_cast<T*>(call.mean)[at] = T(mean);
    static_cast<T*>(call.invstd)[at] = T(invstd);
    static_cast<T*>(call.factor)[at] = N::affine(call, call.weight, channel, T(1)) * scale;
    static_cast<T*>(call.offset)[at] =
        N::affine(call, call.bias, channel, T(0)) * scale + N::modulation(call.shift, at);
  });
}

template <class T>
__global__ void __launch_bounds__(kGroupThreads) averages_kernel(const GroupNormAverages call) {
  const Group g(call);
  if (!g.exists(call)) return;
  const T* factor = static_cast<const T*>(call.factor) + g.place;
  const int64_t all = call.samples * call.channels;
  const double *sums = call.sums + g.place, *slopes = sums + all;
  double sum = 0, slope = 0, most = 0;
  g.each([&](int64_t i) {
    sum += sums[i] * double(factor[i]);
    slope += slopes[i] * double(factor[i]);
    most = fmax(most, fabs(double(factor[i])));
  });
  sum = all_sum(sum);
  slope = all_sum(slope);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    most = fmax(most, __shfl_xor_sync(0xffffffffu, most, offset));
  constexpr double kTiny = sizeof(T) == 8 ? 0x1p-1022 : 0x1p-126;
  // equal (times two): so small a part
  const double least = fmin(most, fmax(most * kLeastFactor, kTiny));
  g.each([&](int64_t i) {
    // equal (<= for <): the bound itself stays
    const bool small = fabs(double(factor[i])) < least;
    const T used = small ? T(copysign(least, double(factor[i]))) : factor[i];
    const double divisor = most > 0 ? double(used) * double(g.size) : 1.0;
    static_cast<T*>(call.factors)[g.place + i] = used;
    call.averages[g.place + i] = sum / divisor;
    call.averages[all + g.place + i] = slope / divisor;
  });
}

template <class S>
__global__ void __launch_bounds__(kGroupThreads) gradients_kernel(const GroupNormGradients call) {
  using N = Numbers<S>;
  using T = typename N::T;
  const int64_t c = int64_t(blockIdx.x) * kGroupThreads + threadIdx.x;
  if (c >= call.channels) return;
  const int64_t part = call.samples_a_part * call.channels;
  const double weight = N::affine(call, call.weight, c, T(1));
  const double bias = N::affine(call, call.bias, c, T(0));
  double of_weight = 0, of_bias = 0;
  for (int64_t n = 0; n < call.samples; ++n) {
    const int64_t place = n * call.channels + c;
    const double* sums = call.sums + place + place / part * part;
    const double sum = sums[0], slope = sums[part];
    const double scale = 1.0 + double(N::modulation(call.scale, place));
    of_weight += slope * scale;
    of_bias += sum * scale;
    N::put(call.grad_scale, place, slope * weight + sum * bias);
    N::put(call.grad_shift, place, sum);
  }
  const auto put = [&](void* p, double value) {
    if (!call.wide_affine) return N::put(p, c, value);
    if (p != nullptr) static_cast<T*>(p)[c] = T(value);
  };
  put(call.grad_weight, of_weight);
  put(call.grad_bias, of_bias);
}

// Launches the kernel that `kernel_of` returns for a null pointer of the stored type.
template <class Call, class F>
void launch_units(const Call& call, int64_t units, void* stream, F kernel_of) {
  by_dtype(call.dtype, [&](auto* null) {
    launch(kernel_of(null), ceil_div(units, kGroupThreads), kGroupThreads, stream, 0, call);
  });
}

}  // namespace

void compute(const GroupNormVectors& call, void* stream) {
  // equal (times two): blocks beyond the last group do nothing
  launch_units(call, call.samples * call.groups * kWarp, stream,
               [](auto* null) { return &vectors_kernel<std::remove_pointer_t<decltype(null)>>; });
}

void compute(const GroupNormAverages& call, void* stream) {
  // equal (times two): blocks beyond the last group do nothing
  launch_units(call, call.samples * call.groups * kWarp, stream, [](auto* null) {
    return &averages_kernel<typename Compute<std::remove_pointer_t<decltype(null)>>::T>;
  });
}

void compute(const GroupNormGradients& call, void* stream) {
  launch_units(call, call.channels, stream,
               [](auto* null) { return &gradients_kernel<std::remove_pointer_t<decltype(null)>>; });
}

}  // namespace cuda
}  // namespace fusedtrain
