// Entry points of a backend: what to compute, pointers, sizes. Plain C++, no torch.
//
// The data of one call are dense: element i of every pointer belongs to element i of the others.
// Input and output may be the same buffer. Zero elements are allowed.
#pragma once

#include <stdint.h>

namespace fusedtrain {

enum class Dtype : int { kFloat32, kFloat64, kFloat16, kBFloat16 };
constexpr int kMaxParameters = 2;

// y[i] = f(x[i]). op counts the lines of FT_POINTWISE.
struct PointwiseForward {
  int op;
  Dtype dtype;
  const void* x;
  void* y;
  double parameters[kMaxParameters];
};

// grad_input[i] = grad[i] f'(saved[i]).
struct PointwiseBackward {
  int op;
  Dtype dtype;
  const void* grad;
  const void* saved;
  void* grad_input;
  double parameters[kMaxParameters];
};

// y[i] = f(x[i]), and the nearest level to f'(x[i]) as a code of so many bits, packed as bits.h
// says. op is one of FT_FEW_BIT, and has codes of that size.
struct FewBitForward {
  int op, bits;
  Dtype dtype;
  const void* x;
  void* y;
  uint8_t* codes;
};
// grad_input[i] = grad[i] times the level of code i.
struct FewBitBackward {
  int op, bits;
  Dtype dtype;
  const void* grad;
  const uint8_t* codes;
  void* grad_input;
};

// A tensor as rows x channels x inner, in memory order. parameters[k] points at one value a
// channel, of the tensor's dtype.
struct ChannelwiseForward {
  int op;  // counts the lines of FT_CHANNELWISE
  Dtype dtype;
  int64_t rows, channels, inner;
  const void* x;
  void* y;
  const void* parameters[kMaxParameters];
};

// Also sums the gradients of the parameters, in shares that add_shares() adds up.
struct ChannelwiseBackward {
  int op;
  Dtype dtype;
  int64_t rows, channels, inner;
  const void* grad;
  const void* x;
  void* grad_input;
  const void* parameters[kMaxParameters];
  int parameter_count;
  double* shares;  // of the gradients of the parameters; channelwise_shares() tells how many
};

// What the backward of a formula takes beside the gradient.
enum Saved { kInput, kOutput };

// Batch norm with what follows it:
//   s = (x - mean) invstd weight + bias, times branch_scale of the sample, plus the residual
//   y = f(s)
// All tensors of a call are of one layout: rows x channels x inner in memory order, row r being of
// sample r / rows_a_sample. Vectors have one value a channel (branch_scale: a sample), of the type
// that is computed in: double for kFloat64, else float.
struct BatchNorm {
  int op;  // counts the lines of FT_POINTWISE, -1: f(s) = s
  Dtype dtype;
  int64_t rows, channels, inner, rows_a_sample;
  double parameters[kMaxParameters];
  const void* x;
  const void* branch_scale;  // or null, as weight and bias
  const void* weight;
  const void* bias;
  void* mean;
  void* invstd;
};

// The statistics of x, and what is made of them.
struct BatchNormStatistics {
  double* average;     // of each channel
  double* variance;    // biased
  void* running_mean;  // both or neither; moved by `momentum`, with the unbiased variance
  void* running_var;
  double momentum, eps;
};

struct BatchNormForward {
  const void* residual;  // or null
  void* y;               // may be x
};

// What n.x was before an output without residual and branch_scale took its place: f(s) = s from 0
// on, slope s below.
struct BatchNormRestore {
  double slope;
  double largest;  // finite number of the dtype: what was rounded beyond it is that
  void* x;
};

// g = grad f'(s), which is the gradient of the residual; d = g times branch_scale.
struct BatchNormBackward {
  const void* grad;
  // The output where the formula takes it, else the residual. Null: there was no residual, and the
  // output, where it is needed, is computed again.
  const void* saved;
  void* grad_residual;  // or null
  const void* ready;    // g where it is there already, which is gone on from then; or null
  void* grad_input;
  double* sums;       // [2, channels]: of d, and of d (x - mean) invstd
  void* grad_weight;  // or null, as grad_bias: the second and the first of them
  void* grad_bias;
  // grad_input = (d - averages[0] / count - averages[1] / count (x - mean) invstd) invstd weight;
  // null: fixed statistics, only d.
  const double* averages;
  double count;
};

// The optimizer step. The options of a parameter group (fusedtrain/optim/_engine.py fills a row of
// float64 numbers in this order).
struct OptionGroup {
  double lr;
  double lr_index;  // of the tensor that holds the rate instead, or -1
  double weight_decay;
  double sign;       // -1: maximize
  double max_lr;     // for "corrected" weight decay, or 0
  double cautious;   // 1: directions that disagree with the gradient's sign are dropped
  double option[8];  // of the rule (optimizers.h)
};

// What one step does to all tensors; the first row of the same table.
struct StepOptions {
  double measures;  // kMeasure... of what the gradient sweep must find out
  double max_norm;  // of all gradients together, or 0
  double norm_eps;
  double unit_factor;  // of adaptive (unit-wise) clipping, or 0
  double unit_eps;
  double average_weight;  // of the new parameter in its moving average, or 0
  double write_back;      // to gradients: 0 nothing, 1 the unscaled and clipped ones, 2 zeros
  double stochastic;      // 1: bfloat16 parameters are rounded stochastically
  double seed;            // an integer below 2^53
  double trial;           // 1: the rule needs sums over a trial of the update
  double seed_high;       // an integer below 2^32: the stream's seed is seed + 2^32 seed_high
  double unused[3];
};
static_assert(sizeof(OptionGroup) == 14 * sizeof(double) &&
              sizeof(StepOptions) == sizeof(OptionGroup));
constexpr int kMeasureFinite = 1, kMeasureGradients = 2, kMeasureParameters = 4;

// What the update of one tensor multiplies by at one step.
struct Coefficients {
  double gradient;    // stored gradient: 1 / scale, clipping, sign
  double keep, size;  // p' = keep p - size u
  double late_decay;  // u += late_decay p
  double caution;     // u *= caution
  double cautious;
  double average;  // average += average (p' - average)
  double key;      // of stochastic rounding: a 32-bit integer, or -1 for rounding to nearest
  double c[8];     // of the rule
};

constexpr int kMaxStates = 3;
constexpr int kTensorSums = 3;     // number of non-finite gradients, sum of g^2, sum of p^2
constexpr int kTrialSums = 3;      // see TrialFacts
constexpr int kTensorScalars = 3;  // step, two second moments
// Of the last step: skipped?, skipped steps, norm of all gradients, clip coefficient, number of
// non-finite gradients, applied steps.
constexpr int kControls = 8;

// One parameter with what belongs to it. All are dense and of the parameter's layout.
struct OptimizerTensor {
  void* param;
  void* grad;
  void* state[kMaxStates];  // null where there is none
  void* master;             // float32, or null
  void* average;            // or null
  Dtype param_dtype, grad_dtype, state_dtype[kMaxStates], average_dtype;
  int64_t numel;
  int64_t units, inner;  // element i in memory is of unit i / inner % units
  int group;
  int scalar;  // its column of `scalars`
};

struct OptimizerCall {
  int rule;    // counts the lines of FT_RULES
  int states;  // highest number of states of a tensor
  int64_t count;
  const OptimizerTensor* tensors;
  int64_t group_count;
  const OptionGroup* groups;
  const StepOptions* options;
  const void* const* lrs;  // on the device
  const Dtype* lr_dtypes;
  int64_t scalar_count;    // columns of `scalars`
  float* scalars;          // [kTensorScalars, scalar_count]
  float* control;          // [kControls]
  const float* scale;      // of the loss, or null
  const float* found_inf;  // not 0: skip; or null
  double* sums;            // [count, kTensorSums]
  double* trial_sums;      // [count, kTrialSums]
};

// torch's GradScaler.update, with hysteresis and bounds; all pointers are to one number.
struct ScaleUpdate {
  float* scale;
  int32_t* growth_tracker;
  int32_t* hysteresis_tracker;
  const float* found_inf;
  double growth_factor, backoff_factor;
  int64_t growth_interval, hysteresis;
  double min_scale, max_scale;
};

// Memory to set to 0.
struct ZeroRange {
  void* data;
  int64_t bytes;
};

// The weight of a convolution with that of the batch norm after it (fusedtrain/reference/fold.py).
// A weight is rows x channels x inner in memory order; channel c of row r makes output channel r /
// rows_per_group * channels + c. Vectors have one value an output channel, and are float, or double
// where the weight is.
struct FoldWeight {
  Dtype dtype;  // of weights
  int64_t rows, channels, inner, rows_per_group;
  const void* weight;
  const void* bias;   // or null: 0
  const void* gamma;  // or null: 1
  const void* mean;
  const void* var;
  double eps;

  int64_t outputs() const { return rows / rows_per_group * channels; }
};
struct FoldForward : FoldWeight {
  const void* beta;  // or null: 0
  void* folded;
  void* folded_bias;
};
struct FoldBackward : FoldWeight {
  const void* grad_folded;
  const void* grad_folded_bias;
  void* grad_weight;
  void* grad_bias;
  void* grad_gamma;
};

// Gated products: y = f(gate) value. Every tensor is `rows` runs of n elements, each run
// `*_stride` elements after the one before; y and grad are dense. op as in BatchNorm.
struct Gated {
  int op;
  Dtype dtype;
  int64_t rows, n;
  double parameters[kMaxParameters];
  const void* gate;
  const void* value;
  int64_t gate_stride, value_stride;
};
struct GatedForward : Gated {
  void* y;
};
struct GatedBackward : Gated {
  const void* grad;
  void* grad_gate;
  void* grad_value;
  int64_t grad_gate_stride, grad_value_stride;
};

// A dense tensor as samples x rows x channels x inner, in memory order.
struct Channels {
  int64_t samples, rows, channels, inner;
  int64_t numel() const { return samples * rows * channels * inner; }
};

// y = x scale + residual, scale being one value of the tensor's dtype a sample and channel.
struct ScaleForward {
  Dtype dtype;
  Channels shape;
  const void* x;
  const void* scale;
  const void* residual;  // or null
  void* y;
};
// grad_input = grad scale (or null); grad_scale, the sum of grad x, of the type computed in (or
// null, as x then).
struct ScaleBackward {
  Dtype dtype;
  Channels shape;
  const void* grad;
  const void* x;
  const void* scale;
  void* grad_input;
  void* grad_scale;
  double* shares;  // chain_shares() of them
};

// z = x + bias, y = drop(clamp(gain f(z))). Samples are 1; the bias is one value of the tensor's
// dtype a channel, or null. Element i in memory is dropped where word i of the Philox stream of
// `seed` (philox.h) is below `threshold`, and else multiplied by `keep`.
struct BiasAct {
  int op;
  Dtype dtype;
  Channels shape;
  double parameters[kMaxParameters];
  const void* bias;
  double gain, clamp;   // negative: none
  const int64_t* seed;  // two numbers, or null: nothing is dropped
  uint32_t threshold;
  double keep;
};
struct BiasActForward : BiasAct {
  const void* x;
  void* y;
};
struct BiasActBackward : BiasAct {
  const void* grad;
  const void* saved;  // y where the formula takes the output, else x
  void* grad_input;
  void* grad_bias;  // of the type computed in, or null
  double* shares;   // chain_shares() of them
};

// y = x upper + (x lower + shift) of bytes, one value of each a channel: 1 / (255 std) in two parts
// of 16 bits, and -mean / std. Products of such a part and a byte are exact, so the result has the
// same bits where a compiler fuses them with the additions and where it does not. Channels are the
// innermost dimension of x or y (`last`), or each sample has a plane of `pixels` for each of them.
struct NormalizeImages {
  Dtype dtype;  // of y; not kFloat64
  int64_t samples, channels, pixels;
  bool x_last, y_last;
  const uint8_t* x;
  const float* coefficients;  // [3, channels]: upper, lower, shift
  void* y;
};
// Where x_last != y_last.
constexpr int64_t kMostChannelsMoved = 16;
// The maximum of every window. In memory order a tensor is planes x height x width x channels: one
// channel where it is contiguous, the samples as planes where it is channels_last. Windows are so
// placed that each has an element of the input. The code of an output is the place of its maximum
// in the window, row by row, with so many `bits` of 1, 2, 4 or 8 (csrc/bits.h).
struct MaxPool {
  Dtype dtype;
  int64_t planes, channels, height, width, out_height, out_width;
  int64_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
  int bits;
  int64_t inputs() const { return planes * channels * height * width; }
  int64_t outputs() const { return planes * channels * out_height * out_width; }
};
struct MaxPoolForward : MaxPool {
  const void* x;
  void* y;
  uint8_t* codes;  // null and 0 bits: nobody asks for them
};
// An input of several windows gets its sum in the order of the outputs, in the type computed in.
struct MaxPoolBackward : MaxPool {
  const void* grad;
  const uint8_t* codes;
  void* grad_input;
};

namespace cpu {

// Output channels [first, last). None depends on another.
void fold(const FoldForward& call, int64_t first, int64_t last);
void fold(const FoldBackward& call, int64_t first, int64_t last);

// In tasks that may run on any thread in any order.
int64_t max_pool2d_tasks(const MaxPoolForward& call);
int64_t max_pool2d_tasks(const MaxPoolBackward& call);
void max_pool2d(const MaxPoolForward& call, int64_t first_task, int64_t last_task);
void max_pool2d(const MaxPoolBackward& call, int64_t first_task, int64_t last_task);

// In tasks that may run on any thread in any order; sums do not depend on the number of threads.
int64_t gated_tasks(const Gated& call);
void gated(const GatedForward& call, int64_t first_task, int64_t last_task);
void gated(const GatedBackward& call, int64_t first_task, int64_t last_task);
int64_t chain_tasks(const Channels& shape);
// Doubles that the shares of a sum take, zeros at first.
int64_t chain_shares(const Channels& shape);
// Into one value a sample and channel, of the type that the dtype is computed in.
void add_chain_shares(const Channels& shape, Dtype dtype, const double* shares, void* sums);
void scale_add(const ScaleForward& call, int64_t first_task, int64_t last_task);
void scale_add(const ScaleBackward& call, int64_t first_task, int64_t last_task);
void bias_act(const BiasActForward& call, int64_t first_task, int64_t last_task);
void bias_act(const BiasActBackward& call, int64_t first_task, int64_t last_task);

// In blocks of pixels that may run on any thread in any order.
int64_t image_blocks(const NormalizeImages& call);
void normalize_images(const NormalizeImages& call, int64_t first_block, int64_t last_block);

// Elements [begin, end) on the calling thread.
void pointwise(const PointwiseForward& call, int64_t begin, int64_t end);
void pointwise(const PointwiseBackward& call, int64_t begin, int64_t end);
// begin is the first element of a block of codes.
void few_bit(const FewBitForward& call, int64_t begin, int64_t end);
void few_bit(const FewBitBackward& call, int64_t begin, int64_t end);

// The work is cut into tasks that do not depend on the number of threads, so the sums do not
// either.
int64_t channelwise_tasks(int64_t rows, int64_t channels, int64_t inner);
void channelwise(const ChannelwiseForward& call, int64_t first_task, int64_t last_task);
void channelwise(const ChannelwiseBackward& call, int64_t first_task, int64_t last_task);
// Doubles that the shares of all tasks take, zeros at first: at most about the bytes of the input,
// mostly far fewer.
int64_t channelwise_shares(int64_t rows, int64_t channels, int64_t inner);
// The gradient of parameter `which`, one value a channel.
void add_shares(const ChannelwiseBackward& call, int which, double* gradient);

// Tells the system that a fresh output is about to be written whole, so that it may map it in huge
// pages (docs/decisions/0002-huge-pages.md). FUSEDTRAIN_HUGE_PAGES=0 turns this off.
void prepare_output(void* data, int64_t bytes);

// Batch norm, in tasks that may run on any thread in any order, and do not depend on the number of
// threads. Each task leaves its share of a sum; once all have, settle() adds them up.
struct BatchNormWork {
  int64_t tasks;
  double* shares;  // [tasks, 2, channels], none of which need be set
};
int64_t batch_norm_tasks(const BatchNorm& n);
// s.average is what the sums are centred by: a guess, and a better one where that was bad (true)
void guess(const BatchNorm& n, const BatchNormStatistics& s);
bool guess_again(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormWork& work);
void statistics(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormWork& work,
                int64_t first, int64_t last);
// s.average and s.variance; where n.mean is not null, also n.mean, n.invstd, running statistics
void settle(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormWork& work);
// n.mean and n.invstd from the running statistics
void invert(const BatchNorm& n, const BatchNormStatistics& s);
void normalise(const BatchNorm& n, const BatchNormForward& f, int64_t first, int64_t last);
void restore(const BatchNorm& n, const BatchNormRestore& r, int64_t first, int64_t last);
// with averages null (fixed statistics) also grad_input, unless grad_residual is asked for
void reduce(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work,
            int64_t first, int64_t last);
// b.sums and what depends on them
void settle(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work);
void grad_input(const BatchNorm& n, const BatchNormBackward& b, int64_t first, int64_t last);

// The optimizer step, in parts whose pieces may run on any thread in any order. Neither chunks nor
// units depend on the number of threads, so the sums do not either.
struct OptimizerChunk {
  int64_t tensor, begin, end;
};
struct OptimizerWork {
  int64_t chunk_count, unit_count;
  OptimizerChunk* chunks;
  double* partials;            // [chunk_count, kTensorSums or kTrialSums]
  int64_t* first_unit;         // [count + 1], where units are clipped
  double* unit_sums;           // [unit_count, kTensorSums], where units are clipped
  double* unit_factors;        // [unit_count]
  Coefficients* coefficients;  // [count]
  float* moments;              // [count, 2]: the scalars of a tensor after the step
};
int64_t optimizer_chunks(const OptimizerCall& call);
void cut_into_chunks(const OptimizerCall& call, OptimizerChunk* chunks);
int64_t optimizer_units(const OptimizerCall& call, int64_t* first_unit);
// Of gradients and parameters, by chunk or by unit; then call.sums from that.
void measure(const OptimizerCall& call, const OptimizerWork& work, int64_t first, int64_t last);
void measure_units(const OptimizerCall& call, const OptimizerWork& work, int64_t first,
                   int64_t last);
void add_measures(const OptimizerCall& call, const OptimizerWork& work);
// Coefficients from call.sums. False: the step is to be skipped.
bool prepare(const OptimizerCall& call, const OptimizerWork& work);
// Sums over a trial of the update, by chunk; then call.trial_sums from that.
void try_update(const OptimizerCall& call, const OptimizerWork& work, int64_t first, int64_t last);
void add_trials(const OptimizerCall& call, const OptimizerWork& work);
// What depends on call.trial_sums.
void finish(const OptimizerCall& call, const OptimizerWork& work);
// Step counts and what the caller is told.
void commit(const OptimizerCall& call, const OptimizerWork& work, bool applied);
void update(const OptimizerCall& call, const OptimizerWork& work, int64_t first, int64_t last);
// After a skipped step, where gradients are to be unscaled or zeroed.
void write_skipped_gradients(const OptimizerCall& call, const OptimizerWork& work, int64_t first,
                             int64_t last);

// "default", "avx2" or "avx512": what this process uses.
const char* capability();

}  // namespace cpu

// On the current device, in order on a cudaStream_t. A launch that fails throws std::runtime_error.
namespace cuda {

// The device that kernels are launched on from here, in this thread.
void set_device(int device);

void pointwise(const PointwiseForward& call, int64_t n, void* stream);
void pointwise(const PointwiseBackward& call, int64_t n, void* stream);
void few_bit(const FewBitForward& call, int64_t n, void* stream);
void few_bit(const FewBitBackward& call, int64_t n, void* stream);

void channelwise(const ChannelwiseForward& call, void* stream);
void channelwise(const ChannelwiseBackward& call, void* stream);
// Doubles that the shares take; none of them need be set.
int64_t channelwise_shares(const ChannelwiseBackward& call);
// The gradient of parameter `which`, one value of the call's dtype a channel.
void add_shares(const ChannelwiseBackward& call, int which, void* gradient, void* stream);

// Batch norm. `workspace` has batch_norm_workspace() doubles, none of which need be set; sums have
// a fixed order for a device.
int64_t batch_norm_workspace(const BatchNorm& n);
// s.average and s.variance; where n.mean is not null, also n.mean, n.invstd, running statistics
void statistics(const BatchNorm& n, const BatchNormStatistics& s, double* workspace, void* stream);
void normalise(const BatchNorm& n, const BatchNormForward& f, void* stream);
// the same with s.running_mean and s.running_var; n.mean and n.invstd as well
void evaluate(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f,
              void* stream);
void restore(const BatchNorm& n, const BatchNormRestore& r, void* stream);
// b.sums and what depends on them, b.grad_residual; with averages null also b.grad_input
void reduce(const BatchNorm& n, const BatchNormBackward& b, double* workspace, void* stream);
// b.grad_input, b.grad_residual
void grad_input(const BatchNorm& n, const BatchNormBackward& b, void* stream);

// The optimizer step; the pointers of a call are the device's. Nothing but kernel launches: a CUDA
// graph may capture it. `workspace` has optimizer_workspace() doubles, none of which need be set.
int64_t optimizer_workspace(const OptimizerCall& call);
// call.sums
void measure(const OptimizerCall& call, double* workspace, void* stream);
// call.trial_sums, from call.sums
void try_update(const OptimizerCall& call, double* workspace, void* stream);
// `measures`, `tries`: call.sums and call.trial_sums are to be found out first.
void optimizer_step(const OptimizerCall& call, bool measures, bool tries, double* workspace,
                    void* stream);

void fold(const FoldForward& call, void* stream);
void fold(const FoldBackward& call, void* stream);

void gated(const GatedForward& call, void* stream);
void gated(const GatedBackward& call, void* stream);
// Doubles for the shares of a sum, none of which need be set.
int64_t chain_shares(const Channels& shape);
void scale_add(const ScaleForward& call, void* stream);
void scale_add(const ScaleBackward& call, void* stream);
void bias_act(const BiasActForward& call, void* stream);
void bias_act(const BiasActBackward& call, void* stream);

void normalize_images(const NormalizeImages& call, void* stream);
void max_pool2d(const MaxPoolForward& call, void* stream);
void max_pool2d(const MaxPoolBackward& call, void* stream);

void update_scale(const ScaleUpdate& update, void* stream);
void zero(const ZeroRange* ranges, int64_t count, void* stream);

}  // namespace cuda
}  // namespace fusedtrain
