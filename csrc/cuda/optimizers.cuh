// Common types of the optimizer step's kernels: the tensors of a launch as a kernel argument, and
// four neighbouring elements of any dtype.
#pragma once

#include "../optimizer_step.h"
#include "../split_weights.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {

// Elements of a tensor that a block takes; it does one chunk. With 4096, ResNet-50 makes 6300
// blocks of the update, 16 for each of the 396 that an H100 holds at a time, and MobileNet's 3.5
// million parameters still fill all of them. What a block does besides (it searches its tensor, up
// to nine dependent reads of constant memory, and reads coefficients) takes some 1500 cycles, while
// the 114 KB of a chunk (float32, Adam) take 23,000 at a block's share of the bandwidth. Blocks
// that stay and take several chunks would save a part of these 7 percent, and end less evenly.
constexpr int kChunk = 4096;
constexpr int kSweepWarps = 8;
constexpr int kSweepThreads = kSweepWarps * 32;

// A tensor in the argument of a sweep.
struct SweptTensor {
  void* param;
  void* grad;
  void* state[kMaxStates];
  void* master;
  void* average;
  int64_t numel, inner;
  uint32_t units, first_unit;  // first_unit: where their factors begin
  uint32_t first_chunk;        // of this launch
  uint16_t dtypes;             // two bits each, in the order of Buffer; then bytes of a correction,
                               // or kFollows
  bool wide;                   // four elements of each buffer can be accessed at once
  uint8_t squares;             // a bit for each state whose codes are SquareCodes
};
static_assert(sizeof(SweptTensor) == 88, "");
// In the updates of calls that have states in codes. The sweep over gradients needs no states.
struct CodedTensor : SweptTensor {
  float* scales[kMaxStates];  // null where a state is of floats
};
static_assert(sizeof(CodedTensor) == 112, "");
enum Buffer { kParam, kGrad, kState, kAverage = kState + kMaxStates, kCorrection };
constexpr int kFollows = 3;  // a float32 master that follows its parameter

// Decisions about the step, made on the device. All of the workspace is doubles.
struct Verdict {
  double skip, bad, norm, clip;
  double applied;  // steps before this one
};

struct Sweep {
  const Verdict* verdict;
  const Coefficients* coefficients;  // of the launch's first tensor
  double* partials;                  // of its first chunk
  double* factors;                   // of units, or null
  const float* scale;
  double unit_factor, unit_eps, average_weight;
  int64_t seed;
  int count, rule, measures, write_back;
  bool stochastic;
};
// 16 KB hold the tensors of many a network (ResNet-50 has 161, ViT-B 152), 4 KB those of toys: 44.
template <class OfTensor, int kBytes>
struct SweepTable : Sweep {
  using Tensor = OfTensor;
  static constexpr int kTensors = (kBytes - sizeof(Sweep)) / sizeof(Tensor);
  Tensor tensors[kTensors];
};
constexpr int kFewBytes = kArgumentBytes < 16384 ? kArgumentBytes : 16384;
using FewSwept = SweepTable<SweptTensor, kFewBytes>;        // 185 tensors
using ManySwept = SweepTable<SweptTensor, kArgumentBytes>;  // 371
// One size is enough: twice as many launches carry as many bytes.
using CodedSwept = SweepTable<CodedTensor, kFewBytes>;  // 145
static_assert(sizeof(FewSwept) <= 16384 && sizeof(ManySwept) <= kArgumentBytes, "");
static_assert(sizeof(CodedSwept) <= kFewBytes, "");

// Sums that a chunk leaves: those of kTensorSums, and of squares of clipped gradients; or those of
// kTrialSums.
constexpr int kPartials = 4;

// Launches for the tensors that are computed in double, or for the others. Table: FewSwept or
// ManySwept.
template <class Table>
void launch_update(const Table& sweep, int states, bool in_double, int64_t blocks, void* stream);
template <class Table>
void launch_trial(const Table& sweep, int states, bool in_double, int64_t blocks, void* stream);
// Launches for float32 and 16-bit tensors, where a state of the call is in codes.
void launch_coded_update(const CodedSwept& sweep, int states, int64_t blocks, void* stream);
void launch_coded_trial(const CodedSwept& sweep, int states, int64_t blocks, void* stream);

namespace {

__host__ __device__ __forceinline__ Dtype dtype_of(const SweptTensor& t, int buffer) {
  return static_cast<Dtype>(t.dtypes >> (2 * buffer) & 3);
}
__host__ __device__ __forceinline__ bool in_double(const SweptTensor& t) {
  return dtype_of(t, kParam) == Dtype::kFloat64;
}
__host__ __device__ __forceinline__ int bytes_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : (dtype == Dtype::kFloat32 ? 4 : 2);
}

// A buffer from the place on where a block works.
struct Stream {
  char* data;
  Dtype dtype;
};
__device__ __forceinline__ Stream stream_of(void* data, Dtype dtype, int64_t begin) {
  return {static_cast<char*>(data) + begin * bytes_of(dtype), dtype};
}
// A weight of two buffers (split_weights.h): a parameter with its correction, or with its master.
struct Weights : Stream {
  char* correction;
  int bytes;  // of a correction; 4: of a master; 0: the stream is all
};
__device__ __forceinline__ Stream grad_of(const SweptTensor& t, int64_t begin) {
  return stream_of(t.grad, dtype_of(t, kGrad), begin);
}
// The weights that rules compute with.
__device__ __forceinline__ Weights weights_of(const SweptTensor& t, int64_t begin) {
  const int code = t.dtypes >> (2 * kCorrection) & 3, bytes = code == kFollows ? 4 : code;
  char* const correction = static_cast<char*>(t.master) + begin * bytes;
  return {t.master != nullptr && bytes == 0 ? stream_of(t.master, Dtype::kFloat32, begin)
                                            : stream_of(t.param, dtype_of(t, kParam), begin),
          correction, bytes};
}

// The tensor that a block works on, and the number of the block's chunk in it.
struct Chunk {
  int tensor;
  int64_t number;
};
template <class Table>
__device__ __forceinline__ Chunk chunk_of(const Table& sweep, uint32_t block) {
  int low = 0, high = sweep.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (sweep.tensors[middle].first_chunk <= block)
      low = middle;
    else
      high = middle;
  }
  return {low, int64_t(block - sweep.tensors[low].first_chunk)};
}
// Elements of the chunk that begins there.
__device__ __forceinline__ int chunk_length(const SweptTensor& t, int64_t begin) {
  // equal (<= for <): equal sides have equal results
  return t.numel - begin < kChunk ? int(t.numel - begin) : kChunk;
}

template <class To, class From>
__device__ __forceinline__ To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// Calls f with the data as a pointer of their type.
template <class F>
__device__ __forceinline__ void with_type(const Stream& s, F f) {
  switch (s.dtype) {
    case Dtype::kFloat32:
      return f(reinterpret_cast<float*>(s.data));
    case Dtype::kFloat64:
      return f(reinterpret_cast<double*>(s.data));
    case Dtype::kFloat16:
      return f(reinterpret_cast<__half*>(s.data));
    case Dtype::kBFloat16:
      return f(reinterpret_cast<__nv_bfloat16*>(s.data));
  }
}

__device__ __forceinline__ float follow(Dtype dtype, float master, uint16_t param) {
  if (dtype == Dtype::kBFloat16) return formulas::follow_bfloat16(master, param);
  const bool rounds = same_bits<uint16_t>(store_one<__half>(master)) == param;
  return rounds ? master : load_one(same_bits<__half>(param));
}
__device__ __forceinline__ float join(Dtype dtype, int bytes, uint16_t param, int correction) {
  if (dtype == Dtype::kBFloat16)
    return bytes == 2 ? formulas::join_bfloat16<16>(param, correction)
                      : formulas::join_bfloat16<8>(param, correction);
  const float value = load_one(same_bits<__half>(param));
  return bytes == 2 ? formulas::join_half<16>(value, correction)
                    : formulas::join_half<8>(value, correction);
}
__device__ __forceinline__ formulas::SplitWeight split(Dtype dtype, int bytes, float weight,
                                                       uint32_t added) {
  if (dtype == Dtype::kBFloat16)
    return bytes == 2 ? formulas::split_bfloat16<16>(weight, added)
                      : formulas::split_bfloat16<8>(weight, added);
  const __half half = store_one<__half>(weight);
  const float value = load_one(half);
  return {same_bits<uint16_t>(half), bytes == 2 ? formulas::half_correction<16>(weight, value)
                                                : formulas::half_correction<8>(weight, value)};
}

// Elements of a stream to compute with: four of 32 or 16 bits, aligned together, or one of any
// type. load() of four only starts the load, so that several are under way; get() converts.
template <class T, int kLanes>
struct Loaded;

template <>
struct Loaded<float, 4> {
  uint32_t bits[6];  // of 16-bit elements two in each of the first two

  __device__ __forceinline__ void load(const Stream& s, int i) {
    if (bytes_of(s.dtype) == 2) {
      const uint2 pairs = *reinterpret_cast<const uint2*>(s.data + 2 * i);
      bits[0] = pairs.x;
      bits[1] = pairs.y;
    } else {
      const uint4 four = *reinterpret_cast<const uint4*>(s.data + 4 * i);
      bits[0] = four.x;
      bits[1] = four.y;
      bits[2] = four.z;
      bits[3] = four.w;
    }
  }
  // Corrections and masters go behind the two words of their parameters.
  __device__ __forceinline__ void load(const Weights& w, int i) {
    load(static_cast<const Stream&>(w), i);
    if (w.bytes == 2) {
      const uint2 pairs = *reinterpret_cast<const uint2*>(w.correction + 2 * i);
      bits[2] = pairs.x;
      bits[3] = pairs.y;
    } else if (w.bytes == 1) {
      bits[2] = *reinterpret_cast<const uint32_t*>(w.correction + i);
    } else if (w.bytes == 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(w.correction + 4 * i);
      bits[2] = four.x;
      bits[3] = four.y;
      bits[4] = four.z;
      bits[5] = four.w;
    }
  }
  __device__ __forceinline__ void clear() { bits[0] = bits[1] = bits[2] = bits[3] = 0; }
  __device__ __forceinline__ void get(const Stream& s, float* v) const {
    if (s.dtype == Dtype::kFloat16) return unpack<__half>(v);
    if (s.dtype == Dtype::kBFloat16) return unpack<__nv_bfloat16>(v);
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = same_bits<float>(bits[k]);
  }
  __device__ __forceinline__ void get(const Weights& w, float* v) const {
    if (w.bytes == 0) return get(static_cast<const Stream&>(w), v);
    if (w.bytes == 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        v[k] = follow(w.dtype, same_bits<float>(bits[2 + k]),
                      static_cast<uint16_t>(bits[k / 2] >> (16 * (k % 2))));
      return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint16_t param = static_cast<uint16_t>(bits[k / 2] >> (16 * (k % 2)));
      const uint32_t word =
          w.bytes == 2 ? bits[2 + k / 2] >> (16 * (k % 2)) << 16 : bits[2] >> (8 * k) << 24;
      v[k] = join(w.dtype, w.bytes, param, static_cast<int32_t>(word) >> (w.bytes == 2 ? 16 : 24));
    }
  }

 private:
  template <class H>
  __device__ __forceinline__ void unpack(float* v) const {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      v[k] = load_one(same_bits<H>(static_cast<uint16_t>(bits[k / 2] >> (16 * (k % 2)))));
  }
};

template <class T>
struct Loaded<T, 1> {
  T value;

  __device__ __forceinline__ void load(const Stream& s, int i) {
    with_type(s, [&](auto* data) { value = static_cast<T>(load_one(data[i])); });
  }
  __device__ __forceinline__ void load(const Weights& w, int i) {
    if (w.bytes == 0) return load(static_cast<const Stream&>(w), i);
    const uint16_t param = reinterpret_cast<const uint16_t*>(w.data)[i];
    if (w.bytes == 4) {
      value = follow(w.dtype, reinterpret_cast<const float*>(w.correction)[i], param);
      return;
    }
    const int correction = w.bytes == 2 ? reinterpret_cast<const int16_t*>(w.correction)[i]
                                        : reinterpret_cast<const int8_t*>(w.correction)[i];
    value = join(w.dtype, w.bytes, param, correction);
  }
  __device__ __forceinline__ void clear() { value = T(0); }
  __device__ __forceinline__ void get(const Stream&, T* v) const { v[0] = value; }
};

// Two 16-bit numbers, the first one below.
template <class H>
__device__ __forceinline__ uint32_t pair(float a, float b) {
  return same_bits<uint16_t>(store_one<H>(a)) |
         static_cast<uint32_t>(same_bits<uint16_t>(store_one<H>(b))) << 16;
}

__device__ __forceinline__ void store(const Stream& s, int i, const float (&v)[4]) {
  if (s.dtype == Dtype::kFloat32) {
    __stwb(reinterpret_cast<uint4*>(s.data + 4 * i),
           make_uint4(same_bits<uint32_t>(v[0]), same_bits<uint32_t>(v[1]),
                      same_bits<uint32_t>(v[2]), same_bits<uint32_t>(v[3])));
    return;
  }
  uint2 pairs;
  if (s.dtype == Dtype::kFloat16)
    pairs = make_uint2(pair<__half>(v[0], v[1]), pair<__half>(v[2], v[3]));
  else
    pairs = make_uint2(pair<__nv_bfloat16>(v[0], v[1]), pair<__nv_bfloat16>(v[2], v[3]));
  __stwb(reinterpret_cast<uint2*>(s.data + 2 * i), pairs);
}
template <class T>
__device__ __forceinline__ void store(const Stream& s, int i, const T (&v)[1]) {
  with_type(s, [&](auto* data) {
    using S = std::remove_pointer_t<decltype(data)>;
    data[i] = store_one<S>(static_cast<typename Compute<S>::T>(v[0]));
  });
}

// Split weights; added[k]: what rounds them (split_weights.h).
__device__ __forceinline__ void store_split(const Weights& w, int i, const float (&v)[4],
                                            const uint32_t (&added)[4]) {
  uint32_t params[2] = {}, corrections[2] = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const formulas::SplitWeight parts = split(w.dtype, w.bytes, v[k], added[k]);
    params[k / 2] |= parts.param << (16 * (k % 2));
    if (w.bytes == 2)
      corrections[k / 2] |= (static_cast<uint32_t>(parts.correction) & 0xffffu) << (16 * (k % 2));
    else
      corrections[0] |= (static_cast<uint32_t>(parts.correction) & 0xffu) << (8 * k);
  }
  __stwb(reinterpret_cast<uint2*>(w.data + 2 * i), make_uint2(params[0], params[1]));
  if (w.bytes == 2)
    __stwb(reinterpret_cast<uint2*>(w.correction + 2 * i),
           make_uint2(corrections[0], corrections[1]));
  else
    *reinterpret_cast<uint32_t*>(w.correction + i) = corrections[0];
}
template <class T>
__device__ __forceinline__ void store_split(const Weights& w, int i, const T (&v)[1],
                                            const uint32_t (&added)[1]) {
  const formulas::SplitWeight parts = split(w.dtype, w.bytes, static_cast<float>(v[0]), added[0]);
  reinterpret_cast<uint16_t*>(w.data)[i] = static_cast<uint16_t>(parts.param);
  if (w.bytes == 2)
    reinterpret_cast<int16_t*>(w.correction)[i] = static_cast<int16_t>(parts.correction);
  else
    reinterpret_cast<int8_t*>(w.correction)[i] = static_cast<int8_t>(parts.correction);
}

// 1 / scale, rounded to float as torch's GradScaler has it.
__device__ __forceinline__ float unscale(const float* scale) {
  return scale == nullptr ? 1.0f : __frcp_rn(*scale);
}

}  // namespace
}  // namespace cuda
}  // namespace fusedtrain
