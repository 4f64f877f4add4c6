// The sweep over gradients: non-finite values and sums of squares, by chunk or by unit.
//
// The order of all additions depends on the tensors alone.
#pragma once

#include <float.h>

#include "optimizers.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// Units of fewer elements are a warp's each, others a block's.
constexpr int kLargeUnit = 2048;
constexpr int kSmallUnits = 4 * kSweepWarps;  // of a chunk

// Units that a block takes.
__host__ __device__ __forceinline__ int64_t units_of_chunk(int64_t numel, int64_t units) {
  return numel / units < kLargeUnit ? kSmallUnits : 1;  // equal (<= for <): the speed alone changes
}

struct Measure {
  double squares = 0;
  int bad = 0;

  template <int kCount>
  __device__ __forceinline__ void add(const float (&x)[kCount]) {
    if constexpr (kCount > 1) {
      // Consumer GPUs do 64 float operations in the time of a double one, so a few squares are
      // added in float (to 5e-7) where that loses nothing to the ends of its range. Such a sum has
      // no non-finite part either.
      float sum = 0;
#pragma unroll
      // equal (-= for +=): the speed alone changes
      for (int k = 0; k < kCount; ++k) sum += x[k] * x[k];
      // equal (< for <=): the bound less 1 is rounded to the bound
      // equal (never): the speed alone changes
      if (sum > 1e-30f && sum <= FLT_MAX) {
        squares += double(sum);
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) add(double(x[k]), FLT_MAX);
  }
  __device__ __forceinline__ void add(const double (&x)[1]) { add(x[0], DBL_MAX); }

 private:
  __device__ __forceinline__ void add(double x, double most) {
    bad += !(fabs(x) <= most);
    squares += x * x;
  }
};

// Adds the squares of the first n elements times `factor`, shared by a team of threads.
template <class T, class Source>
__device__ __forceinline__ void measure(const Source& s, int n, bool wide, T factor, int thread,
                                        int team, Measure& sums) {
  int rest = 0;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (wide) {
      // Weights of two buffers are up to six words: four of them spilled 16 and 112 bytes.
      constexpr int kLoads = std::is_same<Source, Weights>::value ? 2 : 4;
      const int step = 4 * team;
      int i = 4 * thread;
      rest = n & ~3;
#pragma unroll 1
      // equal (+ for -): the speed alone changes
      for (; i + (kLoads - 1) * step < rest; i += kLoads * step) {
        Loaded<T, 4> loaded[kLoads];
#pragma unroll
        for (int j = 0; j < kLoads; ++j) loaded[j].load(s, i + j * step);
#pragma unroll
        for (int j = 0; j < kLoads; j += 2) {
          T x[8];
          loaded[j].get(s, x);
          loaded[j + 1].get(s, x + 4);
#pragma unroll
          for (int k = 0; k < 8; ++k) x[k] *= factor;
          sums.add(x);
        }
      }
#pragma unroll 1
      for (; i < rest; i += step) {
        Loaded<T, 4> loaded;
        T x[4];
        loaded.load(s, i);
        loaded.get(s, x);
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] *= factor;
        sums.add(x);
      }
    }
  }
#pragma unroll 1
  for (int i = rest + thread; i < n; i += team) {
    Loaded<T, 1> loaded;
    T x[1];
    loaded.load(s, i);
    loaded.get(s, x);
    x[0] *= factor;
    sums.add(x);
  }
}

// In thread 0 of the block: what its chunk leaves.
__device__ __forceinline__ void leave(double* partials, double (&sums)[kPartials]) {
  __shared__ double scratch[kPartials][kSweepWarps];
#pragma unroll
  for (int k = 0; k < kPartials; ++k) {
    const double sum = block_sum<kSweepWarps>(sums[k], scratch[k]);
    if (threadIdx.x == 0) partials[int64_t(blockIdx.x) * kPartials + k] = sum;
  }
}

template <class T, class Table>
__global__ void __launch_bounds__(kSweepThreads, 4)  // without the number ptxas spilled 8 bytes
    measure_kernel(const Table __grid_constant__ sweep) {
  const Chunk chunk = chunk_of(sweep, blockIdx.x);
  const SweptTensor& t = sweep.tensors[chunk.tensor];
  if (in_double(t) != (sizeof(T) == sizeof(double))) return;
  const int64_t begin = chunk.number * kChunk;
  const int n = chunk_length(t, begin);
  Measure grads, params;
  measure<T>(grad_of(t, begin), n, t.wide, T(unscale(sweep.scale)), threadIdx.x, kSweepThreads,
             grads);
  if (sweep.measures & kMeasureParameters)
    measure<T>(weights_of(t, begin), n, t.wide, T(1), threadIdx.x, kSweepThreads, params);
  double sums[kPartials] = {double(grads.bad), grads.squares, params.squares, grads.squares};
  leave(sweep.partials, sums);
}

// Also finds the factor that clips each unit.
template <class T, class Table>
__global__ void __launch_bounds__(kSweepThreads, 3)
    measure_units_kernel(const Table __grid_constant__ sweep) {
  const Chunk chunk = chunk_of(sweep, blockIdx.x);
  const SweptTensor& t = sweep.tensors[chunk.tensor];
  if (in_double(t) != (sizeof(T) == sizeof(double))) return;
  const int64_t in_chunk = units_of_chunk(t.numel, t.units), first = chunk.number * in_chunk;
  const bool large = in_chunk == 1;
  const int team = large ? kSweepThreads : kWarp, thread = threadIdx.x % team;
  // equal (<= for <): equal sides have equal results
  const int64_t last = first + in_chunk < t.units ? first + in_chunk : t.units;
  const T factor = T(unscale(sweep.scale));
  const bool wide = t.wide && t.inner % 4 == 0;  // equal (never): the speed alone changes
  __shared__ double scratch[kTensorSums][kSweepWarps];

  double total[kPartials] = {};
  for (int64_t unit = first + threadIdx.x / team; unit < last; unit += kSweepThreads / team) {
    Measure grads, params;
    constexpr int64_t kPiece = 1 << 20;  // whose bytes an int can count
    for (int64_t run = unit * t.inner; run < t.numel; run += t.units * t.inner) {
      for (int64_t i = 0; i < t.inner; i += kPiece) {
        const int n = int(t.inner - i < kPiece ? t.inner - i : kPiece);
        measure<T>(grad_of(t, run + i), n, wide, factor, thread, team, grads);
        if (sweep.measures & kMeasureParameters)
          measure<T>(weights_of(t, run + i), n, wide, T(1), thread, team, params);
      }
    }
    double sums[kTensorSums] = {double(grads.bad), grads.squares, params.squares};
#pragma unroll
    for (int k = 0; k < kTensorSums; ++k)
      sums[k] = large ? block_sum<kSweepWarps>(sums[k], scratch[k]) : warp_sum(sums[k]);
    if (thread == 0) {
      const double clip = formulas::adaptive_clip_coefficient(::sqrt(sums[1]), ::sqrt(sums[2]),
                                                              sweep.unit_factor, sweep.unit_eps);
      sweep.factors[t.first_unit + unit] = clip;
#pragma unroll
      for (int k = 0; k < kTensorSums; ++k) total[k] += sums[k];
      total[kTensorSums] += sums[1] * clip * clip;
    }
  }
  leave(sweep.partials, total);
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
