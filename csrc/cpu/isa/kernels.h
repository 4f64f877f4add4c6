// The tables of functions that the units of this folder fill and dispatch.cpp chooses from.
//
// Where there is no kernel of 16-bit data, these are converted block by block, in buffers that stay
// in the first-level cache.
#pragma once

#include <stdint.h>

#include "../../channelwise_formulas.h"
#include "../../few_bit.h"
#include "../../formulas.h"
#include "../../ops/depthwise.h"
#include "../../ops/pool.h"
#include "../../ops/row_norm.h"
#include "../../optimizer_rules.h"

namespace fusedtrain {
namespace cpu {

#define FT_COUNT(...) +1
constexpr int kPointwiseOps = 0 FT_POINTWISE(FT_COUNT);
constexpr int kChannelwiseOps = 0 FT_CHANNELWISE(FT_COUNT);
#undef FT_COUNT

// A table for each dtype: numbers T are stored as S.
template <template <class S, class T> class Table>
struct ByDtype {
  Table<float, float> f32;
  Table<double, double> f64;
  Table<uint16_t, float> f16, bf16;
};
// A table for each type of numbers; loops of 16-bit data convert these to floats first.
template <template <class T> class Table>
struct ByNumber {
  Table<float> f32;
  Table<double> f64;
};

// A 16-bit format as a pair of converters.
struct Format {
  void (*load)(const uint16_t* in, float* out, int64_t n);
  void (*store)(const float* in, uint16_t* out, int64_t n);
};

template <class S, class T>
struct PointwiseKernels {
  void (*forward[kPointwiseOps])(const S* x, S* y, int64_t n, const double* parameters);
  void (*backward[kPointwiseOps])(const S* g, const S* saved, S* gx, int64_t n,
                                  const double* parameters);
};

template <class T>
struct ChannelwiseKernels {
  // parameter_step 0: one channel; 1: element i is of channel i.
  using ChannelForward = void (*)(const T* x, T* y, int64_t n, const T* a, const T* b,
                                  int64_t parameter_step);
  // sums[k * sums_stride + channel] += gradients of parameter k.
  using ChannelBackward = void (*)(const T* g, const T* x, T* gx, int64_t n, const T* a, const T* b,
                                   int64_t parameter_step, double* sums, int64_t sums_stride);

  ChannelForward forward[kChannelwiseOps];
  ChannelBackward backward[kChannelwiseOps];
};

template <class S, class T>
struct OptimizerKernels {
  // Elements of one tensor; s[k] for the states that the instance has.
  using Update = void (*)(const Coefficients& k, T* p, const T* g, T* const* s, int64_t n);
  // sums[] += those of kTrialSums; nothing is written.
  using Trial = void (*)(const Coefficients& k, const T* p, const T* g, const T* const* s,
                         int64_t n, double* sums);

  Update update[kRules][kMaxStates + 1];  // by the number of states; null where there is no such
  Trial trial[kRules][kMaxStates + 1];
  // Measures x times factor: sums[0] += number of non-finite values, sums[1] += sum of squares.
  void (*measure)(const T* x, T factor, int64_t n, double* sums);
  void (*multiply)(T* x, T factor, int64_t n);
  void (*average)(T* a, const T* x, T weight, int64_t n);  // a += weight (x - a)
};

// Parameters, gradients and states of one 16-bit format.
template <>
struct OptimizerKernels<uint16_t, float> {
  using Update = void (*)(const Coefficients& k, uint16_t* p, const uint16_t* g, uint16_t* const* s,
                          int64_t n);
  // Float32 weights of parameters and their corrections (split_weights.h), and back. `first` is the
  // index of the first element in its tensor; key: of stochastic rounding, or -1.
  using Join = void (*)(const uint16_t* p, const void* correction, float* weights, int64_t n);
  using Split = void (*)(const float* weights, uint16_t* p, void* correction, int64_t n,
                         int64_t first, int64_t key);
  // The masters of n parameters (split_weights.h). False, and nothing written: as they are.
  using Follow = bool (*)(const uint16_t* p, const float* masters, float* weights, int64_t n);
  Update update[kRules][kMaxStates + 1];
  Join join[2];  // by the bytes of a correction less 1
  Split split[2];
  Follow follow;
};

// Runs of a tile (batch_norm.h): numbers T, stored as S.
template <class S>
struct Run {
  S* data;
  int64_t stride;
};

// Elements of a run that a loop takes at once. It reads and adds to whole steps of the columns,
// also where a run ends within one: their arrays have room for a step more.
constexpr int kNormStep = 32;

template <class S, class T>
struct NormTile {
  int64_t rows, n;
  Run<const S> x, grad;
  Run<const S> saved;  // the residual; in backward, the output where the formula takes it
  Run<S> out;
  const T *mean, *scale, *bias;
  T factor;
  const T* out_scale;  // backward: what grad f'(s) is multiplied by where it is stored
  const double* parameters;
  T *sums, *slopes;
};

template <class S, class T>
struct BatchNormKernels {
  using Kernel = void (*)(const NormTile<S, T>& tile);

  Kernel collect, normalise;
  Kernel forward[kPointwiseOps];  // null where norm and formula take turns
  Kernel restore;
  Kernel reduce;
  Kernel backward[kPointwiseOps];
  void (*grad_input)(const NormTile<S, T>& tile, const T* average, const T* slope);
  void (*move_sums)(T* from, double* to, int64_t n);
};

// A guess of a mean is far where the square of its distance is more than so many variances.
constexpr double kFarVariances = 64;

// Once a channel: see batch_norm_channels.h.
template <class S, class T>
struct BatchNormChannels {
  void (*guess)(const S* x, const int64_t* index, int64_t inner, double* means, int64_t n);
  bool (*moments)(double* sums, const double* squares, double count, double* variance, int64_t n);
  void (*center)(const double* distance, double* average, double* variance, int64_t n);
  void (*settle)(const double* average, const double* variance, double eps, T* mean, T* invstd,
                 int64_t n);
  void (*track)(T* running, const double* value, double scale, double momentum, int64_t n);
};

template <class S, class T>
struct BatchNormLayouts {
  BatchNormKernels<S, T> by_column, by_row;
  BatchNormChannels<S, T> channels;
};

// Steps of bias_act after the formula.
template <class T>
struct ChainFinish {
  T gain, clamp, keep;  // a negative clamp is none
  uint32_t threshold;
};

template <class T>
struct ChainKernels {
  void (*multiply)(const T* a, const T* b, T* out, int64_t n);
  // step 0: one bias; 1: one for each element.
  void (*bias_add)(const T* x, const T* bias, int64_t step, T* z, int64_t n);
  void (*bias_sum)(const T* gx, int64_t step, T* sums, int64_t n);
  void (*finish)(const T* x, T* y, int64_t n, const ChainFinish<T>& f, const uint32_t* numbers);
  void (*finish_backward)(const T* g, const T* edge, T limit, T* out, int64_t n,
                          const ChainFinish<T>& f, const uint32_t* numbers);
};

// Null where the formula and the product take turns.
template <class S, class T>
struct GatedKernels {
  void (*forward[kPointwiseOps])(const S* gate, const S* value, S* y, int64_t n);
  void (*backward[kPointwiseOps])(const S* grad, const S* gate, const S* value, S* grad_gate,
                                  S* grad_value, int64_t n);
};

// x scale + residual, of numbers T stored as S; see scale_add.h.
template <class S, class T>
struct ScaleKernels {
  void (*forward)(const S* x, const T* scale, int64_t step, const S* residual, S* y, int64_t n);
  void (*backward)(const S* g, const S* x, const T* scale, int64_t step, S* gx, T* sums, int64_t n);
};

// Norms of rows (row_norm.h): blocks [first, last) of neighbouring elements, or a tile of `width`
// neighbouring blocks of a row. What is summed in the type computed in is moved to doubles after so
// many elements.
constexpr int64_t kNormChunk = 4096, kNormWidth = 256;
template <class S, class T>
struct RowNormKernels {
  using Stored = S;
  using Number = T;
  void (*forward)(const RowNormForward& call, const T* weight, const T* bias, int64_t first,
                  int64_t last);
  void (*backward)(const RowNormBackward& call, const T* weight, T* weight_sums, T* bias_sums,
                   int64_t first, int64_t last);
  void (*forward_tile)(const RowNormForward& call, const T* weight, const T* bias, int64_t row,
                       int64_t place, int64_t width);
  void (*backward_tile)(const RowNormBackward& call, const T* weight, double* sums, int64_t row,
                        int64_t place, int64_t width);
};

// n elements from the first of a block of codes on. Null where there are no levels.
template <class S, class T>
struct FewBitKernels {
  using Forward = void (*)(const S* x, S* y, uint8_t* codes, int64_t n, int bits,
                           const Slopes<T>& slopes);
  Forward forward[kPointwiseOps];
  void (*backward)(const S* g, const uint8_t* codes, S* gx, int64_t n, int bits,
                   const Slopes<T>& slopes);
};

template <class S, class T>
struct ImageKernels {
  // Bytes x upper + (x lower + shift). step 0: one channel; 1: one value for each element, and room
  // for a step more. Null for float64.
  using Run = void (*)(const uint8_t* x, S* y, int64_t n, const float* upper, const float* lower,
                       const float* shift, int64_t step);
  Run run;
};

// How the backward of max pooling works through a row of inputs (pool.h).
struct MaxPoolRows {
  int64_t stride, steps, sums;  // sums[stride][steps] of a contiguous row
  int64_t kept;                 // rows of outputs whose windows reach a row of inputs
  int64_t scratch;              // numbers in all
};
template <class S, class T>
struct MaxPoolKernels {
  void (*forward)(const MaxPoolForward& call, int64_t first_block, int64_t last_block);
  void (*backward)(const MaxPoolBackward& call, const MaxPoolRows& rows, int64_t first_row,
                   int64_t last_row, void* scratch);
};

// The scratch of a depthwise convolution, in numbers: inputs with their borders, outputs, weights,
// a line of the tensor, then room for so many int64_t.
struct DepthwiseRoom {
  int64_t laid, values, weights, line, offsets;
};
// Its bands, and the tasks of the backward: so many samples of so many channels, with `lanes`
// numbers of scratch for their sums, of which there are `sums`.
struct DepthwiseCut {
  int64_t rows_of_outputs, rows_of_inputs, samples, channels, lanes, sums;
};
constexpr int kDepthwiseUnit = 16;  // channels that are laid out together where they are innermost
template <class S, class T>
struct DepthwiseKernels {
  using Number = S;
  void (*forward)(const DepthwiseForward& call, const DepthwiseRoom& room, const DepthwiseCut& cut,
                  int64_t first, int64_t last, void* scratch);
  // The sums of a task are those of the weights, then of the bias.
  void (*backward)(const DepthwiseBackward& call, const DepthwiseRoom& room,
                   const DepthwiseCut& cut, int64_t first, int64_t last, void* scratch,
                   double* sums);
  int64_t lanes;  // of a register
};

// States in 8-bit codes (state_codes.h) to floats and back: of signed codes, then of squares. The
// first element begins a group; the random numbers of that group are those of element `first`.
struct StateCodeKernels {
  void (*load[2])(const void* codes, const float* scales, float* x, int64_t n);
  void (*store[2])(const float* x, void* codes, float* scales, int64_t n, uint32_t group, int state,
                   uint32_t key);
};

// Rounded up or down at random; `first` is the index of in[0] in its tensor.
using RoundStochastically = void (*)(const float* in, uint16_t* out, int64_t n, int64_t first,
                                     uint32_t key);
// The numbers (philox.h) of elements from kPhiloxStep `first` on, so many times `steps`.
constexpr int kPhiloxStep = 64;
using PhiloxNumbers = void (*)(const int64_t* seed, int64_t first, int64_t steps,
                               uint32_t* numbers);
// n pixels of so many bytes from planes that are `stride` apart to one another, and back.
using JoinChannels = void (*)(const uint8_t* planes, int64_t stride, int64_t channels,
                              uint8_t* pixels, int64_t n);
using SplitChannels = void (*)(const uint8_t* pixels, int64_t channels, uint8_t* planes,
                               int64_t stride, int64_t n);

// type, name; each is defined in the unit of its family, the converters in all.cpp
#define FT_TABLES(X)                             \
  X(Format, half)                                \
  X(Format, bfloat16)                            \
  X(ByDtype<PointwiseKernels>, pointwise)        \
  X(ByNumber<ChannelwiseKernels>, channelwise)   \
  X(ByDtype<FewBitKernels>, few_bit)             \
  X(ByDtype<BatchNormLayouts>, norm)             \
  X(ByDtype<OptimizerKernels>, optimizer)        \
  X(RoundStochastically, to_bfloat16_stochastic) \
  X(StateCodeKernels, state_codes)               \
  X(ByDtype<GatedKernels>, gated)                \
  X(ByDtype<ScaleKernels>, scale)                \
  X(ByDtype<RowNormKernels>, row_norm)           \
  X(ByNumber<ChainKernels>, chain)               \
  X(PhiloxNumbers, philox_numbers)               \
  X(ByDtype<MaxPoolKernels>, max_pool)           \
  X(ByDtype<DepthwiseKernels>, depthwise)        \
  X(ByDtype<ImageKernels>, image)                \
  X(JoinChannels, join_channels)                 \
  X(SplitChannels, split_channels)

// Struct and initialiser are both made of FT_TABLES: each table reaches the member of its name.
struct Kernels {
  const char* name;
#define FT_MEMBER(Table, name) const Table& name;
  FT_TABLES(FT_MEMBER)
#undef FT_MEMBER
};

// Tables of an instruction set; outside x86 there is the default alone.
namespace tables {
#define FT_DECLARE(Table, name) extern const Table name;
#define FT_DECLARE_ALL(isa) \
  namespace isa {           \
  FT_TABLES(FT_DECLARE)     \
  const Kernels& all();     \
  }
FT_DECLARE_ALL(isa_default)
FT_DECLARE_ALL(isa_avx2)
FT_DECLARE_ALL(isa_avx512)
#undef FT_DECLARE_ALL
#undef FT_DECLARE
}  // namespace tables

}  // namespace cpu
}  // namespace fusedtrain
