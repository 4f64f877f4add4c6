// Activations whose derivative is kept in few bits: y = f(x) and packed codes of f'(x), and
// grad_input = grad times the levels.
//
// A thread has a column of a block of codes (../bits.h): as many neighbouring elements as 16 bytes
// hold, of each of its 8 steps. So it makes whole bytes of every run, and both data and codes are
// read and written as neighbours (a warp writes 32 bytes of each run together). The last block, and
// buffers that are not aligned, go element by element.
#include "../bits.h"
#include "../few_bit.h"
#include "../ops/few_bit.h"
#include "launch.cuh"
#include "vec.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 32;
// Steps that a thread has on their way: with the one alone that it works on, 10 KB (forward) are in
// flight on a multiprocessor, with four 50 (computed for sm_90, 16 bits).
constexpr int kAhead = 4;
// Blocks of a multiprocessor in forward. Below sm_80, where bfloat16 is converted by instructions
// of integers, GELU spilled two registers with five.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kForwardBlocks = 4;
#else
constexpr int kForwardBlocks = 5;
#endif

// Lanes of a thread's column, threads of a block of codes, and blocks of codes of a thread block.
template <class S>
constexpr int kColumn = 16 / sizeof(S);
template <class S>
constexpr int kColumns = kBitStep / kColumn<S>;
template <class S>
constexpr int kBitBlocks = kThreads / kColumns<S>;

// The codes of a column, of one run: a byte for each lane.
template <class S>
using Bytes = typename BytesOf<kColumn<S>>::Word;

// The first steps of a column.
template <class S>
__device__ __forceinline__ void load_ahead(Packed<S> (&ahead)[kAhead], const S* from) {
#pragma unroll
  for (int step = 0; step < kAhead; ++step) ahead[step].load(from + step * kBitStep);
}
// A step of a column that is not whole.
template <class S>
__device__ __forceinline__ void load_step(const S* from, int64_t first, int64_t n, Vec<S>& to) {
#pragma unroll
  for (int k = 0; k < Vec<S>::kLanes; ++k)
    to.lane[k] = first + k < n ? load_one(from[first + k]) : typename Compute<S>::T(0);
}
template <class S, bool kWhole>
__device__ __forceinline__ void store_step(const Vec<S>& from, S* to, int64_t first, int64_t n) {
  if constexpr (kWhole) {
    from.store(to + first);
  } else {
#pragma unroll
    for (int k = 0; k < Vec<S>::kLanes; ++k)
      if (first + k < n) to[first + k] = store_one<S>(from.lane[k]);
  }
}

// The codes of a column's 8 steps to the words of its runs, and back.
template <int kBits, class Word>
__device__ __forceinline__ void pack(const Word* codes, uint8_t* to) {
  constexpr int kLow = low_bits(kBits);
  constexpr Word kMask = Word(~Word(0)) / 255 * ((1 << kLow) - 1);
#pragma unroll
  for (int run = 0; run < kLow; ++run) {
    Word word = 0;
#pragma unroll
    for (int step = run; step < kBitSteps; step += kLow)
      word |= Word((codes[step] & kMask) << shift_of(step, kBits));
    *reinterpret_cast<Word*>(to + run * kBitStep) = word;
  }
  if constexpr (kBits == 3) {
    Word word = 0;
#pragma unroll
    for (int step = 0; step < kBitSteps; ++step) word |= Word((codes[step] & ~kMask) >> 2 << step);
    *reinterpret_cast<Word*>(to + 2 * kBitStep) = word;
  }
}

// A word of codes. A slice of a buffer of codes may begin at any byte.
template <class Word, bool kWhole>
__device__ __forceinline__ Word load_word(const uint8_t* from) {
  if constexpr (kWhole) return *reinterpret_cast<const Word*>(from);
  Word word = 0;
#pragma unroll
  for (int i = 0; i < int(sizeof(Word)); ++i) word |= Word(Word(from[i]) << 8 * i);
  return word;
}

template <int kBits, bool kWhole, class Word>
__device__ __forceinline__ void unpack(const uint8_t* from, Word* codes) {
  constexpr int kLow = low_bits(kBits);
  constexpr Word kOnes = Word(~Word(0)) / 255, kMask = kOnes * ((1 << kLow) - 1);
#pragma unroll
  for (int run = 0; run < kLow; ++run) {
    const Word word = load_word<Word, kWhole>(from + run * kBitStep);
#pragma unroll
    for (int step = run; step < kBitSteps; step += kLow)
      codes[step] = word >> shift_of(step, kBits) & kMask;
  }
  if constexpr (kBits == 3) {
    const Word word = load_word<Word, kWhole>(from + 2 * kBitStep);
#pragma unroll
    for (int step = 0; step < kBitSteps; ++step) codes[step] |= Word((word >> step & kOnes) << 2);
  }
}

// Values of a step in place of the numbers, and its codes, a byte for each lane.
template <bool kByOutput, class S, class Formula, class T>
__device__ __forceinline__ Bytes<S> forward_step(const Formula& formula, const Slopes<T>& slopes,
                                                 const uint8_t* code_of_units, Vec<S>& v) {
  using Word = Bytes<S>;
  Word word = 0;
#pragma unroll
  for (int k = 0; k < kColumn<S>; ++k) {
    const T in = v.lane[k];
    T slope;
    formulas::value_and_slope<kByOutput>(formula, in, v.lane[k], slope);
    const Word code = code_of_units[int(formulas::units_of(slope, slopes))];
    word |= Word(code << 8 * k);
  }
  return word;
}

// The loop over steps is not unrolled as a whole: kernels of 200 KB did not fit into the cache of
// instructions, and took 91 s to compile for three architectures.
template <bool kWhole, bool kByOutput, class S, class Formula, class T>
__device__ __forceinline__ void forward_column(const Formula& formula, const Slopes<T>& slopes,
                                               const uint8_t* code_of_units, int bits, const S* x,
                                               S* y, uint8_t* codes, int64_t first, int64_t n) {
  using Word = Bytes<S>;
  constexpr int kTurn = kWhole ? kAhead : 1;
  Word step_codes[kBitSteps] = {};
  Packed<S> ahead[kAhead];
  if constexpr (kWhole) load_ahead(ahead, x + first);
#pragma unroll 1
  for (int step = 0; step < kBitSteps; step += kTurn) {
    // Arrays are shifted, since none in registers can be indexed by a variable.
#pragma unroll
    for (int k = 0; k + kTurn < kBitSteps; ++k) step_codes[k] = step_codes[k + kTurn];
#pragma unroll
    for (int j = 0; j < kTurn; ++j) {
      const int64_t at = first + (step + j) * kBitStep;
      Vec<S> v;
      if constexpr (kWhole) {
        ahead[j].get(v.lane);
        if (step + kAhead < kBitSteps) ahead[j].load(x + at + kAhead * kBitStep);
      } else {
        load_step(x, at, n, v);
      }
      Word word = forward_step<kByOutput>(formula, slopes, code_of_units, v);
      if constexpr (!kWhole) {
        // Codes past the end are 0.
        const int64_t left = n - at;
        if (left < kColumn<S>) word &= left > 0 ? (Word(1) << 8 * left) - 1 : Word(0);
      }
      step_codes[kBitSteps - kTurn + j] = word;
      store_step<S, kWhole>(v, y, at, n);
    }
  }
  if (bits == 1) pack<1>(step_codes, codes);
  if (bits == 2) pack<2>(step_codes, codes);
  if (bits == 3) pack<3>(step_codes, codes);
  if (bits == 4) pack<4>(step_codes, codes);
  if (bits == 8) pack<8>(step_codes, codes);
}

// Blocks of codes are walked by thread blocks, columns by threads.
template <class S, class F>
__device__ __forceinline__ void each_column(int64_t n, int bits, const F& f) {
  const int64_t blocks = bit_blocks(n), stride = int64_t(gridDim.x) * kBitBlocks<S>;
  // equal (the next thread): lanes, or blocks, only change places
  const int column = threadIdx.x % kColumns<S> * kColumn<S>;
  for (int64_t block = int64_t(blockIdx.x) * kBitBlocks<S> + threadIdx.x / kColumns<S>;
       block < blocks; block += stride)
    f(block * kBitBlock + column, block * kBitStep * bits + column);
}

// Tables are read from shared memory: arguments that are indexed by variables are copied to local
// memory.
template <class S, bool kByOutput, class Formula>
__global__ void __launch_bounds__(kThreads, kForwardBlocks)
    forward_kernel(Formula formula, Slopes<typename Compute<S>::T> slopes, int bits, const S* x,
                   S* y, uint8_t* codes, int64_t n, bool wide) {
  // A comparison with each threshold would be half of an element's instructions.
  __shared__ uint8_t code_of_units[256];
  // equal (<= for <): an overrun that AddressSanitizer sees
  for (int units = threadIdx.x; units < 256; units += kThreads) {
    int code = bits == 8 ? units : 0;
    if (bits < 8) {
#pragma unroll
      // equal (- for +): an overrun that AddressSanitizer sees
      for (int k = 0; k + 1 < kMostLevels; ++k)
        code += k + 1 < 1 << bits && units >= slopes.threshold[k];
    }
    code_of_units[units] = uint8_t(code);
  }
  __syncthreads();
  each_column<S>(n, bits, [&](int64_t first, int64_t at) {
    if (wide && n - first > kBitBlock - kBitStep + kColumn<S> - 1)
      forward_column<true, kByOutput>(formula, slopes, code_of_units, bits, x, y, codes + at, first,
                                      n);
    else
      forward_column<false, kByOutput>(formula, slopes, code_of_units, bits, x, y, codes + at,
                                       first, n);
  });
}

template <bool kWhole, class S, class T>
__device__ __forceinline__ void backward_column(const T* levels, const Slopes<T>& slopes, int bits,
                                                const S* grad, const uint8_t* codes, S* grad_input,
                                                int64_t first, int64_t n) {
  using Word = Bytes<S>;
  Word step_codes[kBitSteps];
  Packed<S> ahead[kAhead];
  if constexpr (kWhole) load_ahead(ahead, grad + first);
  if (bits == 1) unpack<1, kWhole>(codes, step_codes);
  if (bits == 2) unpack<2, kWhole>(codes, step_codes);
  if (bits == 3) unpack<3, kWhole>(codes, step_codes);
  if (bits == 4) unpack<4, kWhole>(codes, step_codes);
  if (bits == 8) unpack<8, kWhole>(codes, step_codes);
#pragma unroll
  for (int step = 0; step < kBitSteps; ++step) {
    const int64_t at = first + step * kBitStep;
    Vec<S> g;
    if constexpr (kWhole) {
      ahead[step % kAhead].get(g.lane);
      if (step + kAhead < kBitSteps) ahead[step % kAhead].load(grad + at + kAhead * kBitStep);
    } else {
      load_step(grad, at, n, g);
    }
#pragma unroll
    for (int k = 0; k < kColumn<S>; ++k) {
      const int code = int(step_codes[step] >> 8 * k) & 255;
      g.lane[k] *= bits == 8 ? formulas::level_of<8>(code, slopes) : levels[code & 15];
    }
    store_step<S, kWhole>(g, grad_input, at, n);
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 4)
    backward_kernel(Slopes<typename Compute<S>::T> slopes, int bits, const S* grad,
                    const uint8_t* codes, S* grad_input, int64_t n, bool wide) {
  __shared__ typename Compute<S>::T levels[kMostLevels];
  if (threadIdx.x == 0) {  // equal (one more): any one thread, or warp, will do
#pragma unroll
    for (int k = 0; k < kMostLevels; ++k) levels[k] = slopes.level[k];
  }
  __syncthreads();
  each_column<S>(n, bits, [&](int64_t first, int64_t at) {
    if (wide && n - first > kBitBlock - kBitStep + kColumn<S> - 1)
      backward_column<true>(levels, slopes, bits, grad, codes + at, grad_input, first, n);
    else
      backward_column<false>(levels, slopes, bits, grad, codes + at, grad_input, first, n);
  });
}

template <class S>
int64_t blocks_for(int64_t n) {
  const int64_t blocks = ceil_div(bit_blocks(n), kBitBlocks<S>);
  const int64_t most = int64_t(multiprocessors()) * kBlocksPerMultiprocessor;
  return blocks < most ? blocks : most;
}

template <template <class> class Formula, bool kByOutput>
void run(const FewBitForward& call, int64_t n, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    using T = typename Compute<S>::T;
    const S* x = static_cast<const S*>(call.x);
    S* y = static_cast<S*>(call.y);
    const double none[kMaxParameters] = {};
    launch(forward_kernel<S, kByOutput, Formula<T>>, blocks_for<S>(n), kThreads, stream, 0,
           Formula<T>(none), Slopes<T>(*slope_table(call.op), call.bits), call.bits, x, y,
           call.codes, n, aligned(x, y, call.codes));
  });
}

constexpr bool kTakesOutput[] = {
#define FT_TAKES_OUTPUT(name, Formula, n, rounds, saved) saved == kOutput,
    FT_POINTWISE(FT_TAKES_OUTPUT)
#undef FT_TAKES_OUTPUT
};

}  // namespace

void compute(const FewBitForward& call, int64_t n, void* stream) {
#define FT_INDEX(name, ...) index_##name,
  enum Index { FT_POINTWISE(FT_INDEX) };
#undef FT_INDEX
  switch (call.op) {
#define FT_CASE(name, Formula, table)                                           \
  case index_##name:                                                            \
    return run<formulas::Formula, kTakesOutput[index_##name]>(call, n, stream);
    FT_FEW_BIT(FT_CASE)
#undef FT_CASE
  }
}

void compute(const FewBitBackward& call, int64_t n, void* stream) {
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const S* grad = static_cast<const S*>(call.grad);
    S* grad_input = static_cast<S*>(call.grad_input);
    launch(backward_kernel<S>, blocks_for<S>(n), kThreads, stream, 0,
           Slopes<typename Compute<S>::T>(*slope_table(call.op), call.bits), call.bits, grad,
           call.codes, grad_input, n, aligned(grad, grad_input, call.codes));
  });
}

}  // namespace cuda
}  // namespace fusedtrain
