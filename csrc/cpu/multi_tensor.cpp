// The optimizer step over chunks of all tensors: converts what is not of the type that the rules
// compute in, block by block, in buffers that stay in the first-level cache.
#include <math.h>
#include <string.h>

#include "kernels.h"

namespace fusedtrain {
namespace cpu {
namespace {

using formulas::TensorFacts;
using formulas::TrialFacts;

constexpr int64_t kChunk = 16384;  // four float32 streams of it are 256 KiB: second-level cache
// What is converted, a piece at a time: so short that all streams of a tensor advance together
// (AdamW on 25 M bfloat16 parameters, one thread: 28 ms with 256, 32 with 512, 41 with 1024, 31
// with 128).
constexpr int64_t kBlock = 256;
// What need not be: longer, but what was just written is still near for averages and write-back.
constexpr int64_t kDirectBlock = 4096;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t bytes_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}
char* at(void* p, Dtype dtype, int64_t i) { return static_cast<char*>(p) + i * bytes_of(dtype); }

constexpr Dtype own_dtype(float) { return Dtype::kFloat32; }
constexpr Dtype own_dtype(double) { return Dtype::kFloat64; }
const OptimizerKernels<float>& table(float) { return kernels().optimizer_f32; }
const OptimizerKernels<double>& table(double) { return kernels().optimizer_f64; }

// n <= kBlock values of any dtype to T and back.
template <class T>
void load(const void* from, Dtype dtype, T* to, int64_t n) {
  float buffer[kBlock];
  switch (dtype) {
    case Dtype::kFloat64:
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(static_cast<const double*>(from)[i]);
      return;
    case Dtype::kFloat32:
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(static_cast<const float*>(from)[i]);
      return;
    default: {
      float* wide = sizeof(T) == sizeof(float) ? reinterpret_cast<float*>(to) : buffer;
      const auto convert = dtype == Dtype::kFloat16 ? kernels().from_half : kernels().from_bfloat16;
      convert(static_cast<const uint16_t*>(from), wide, n);
      if (sizeof(T) != sizeof(float))
        for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(wide[i]);
    }
  }
}
template <class T>
void store(const T* from, void* to, Dtype dtype, int64_t n) {
  float buffer[kBlock];
  switch (dtype) {
    case Dtype::kFloat64:
      for (int64_t i = 0; i < n; ++i) static_cast<double*>(to)[i] = static_cast<double>(from[i]);
      return;
    case Dtype::kFloat32:
      for (int64_t i = 0; i < n; ++i) static_cast<float*>(to)[i] = static_cast<float>(from[i]);
      return;
    default: {
      const float* wide = reinterpret_cast<const float*>(from);
      if (sizeof(T) != sizeof(float)) {
        for (int64_t i = 0; i < n; ++i) buffer[i] = static_cast<float>(from[i]);
        wide = buffer;
      }
      const auto convert = dtype == Dtype::kFloat16 ? kernels().to_half : kernels().to_bfloat16;
      convert(wide, static_cast<uint16_t*>(to), n);
    }
  }
}

// A block of one of a tensor's buffers as T: the memory itself where it is of that type.
template <class T>
struct Block {
  alignas(64) T buffer[kBlock];
  T* values;
  char* memory;
  Dtype dtype;

  bool direct() const { return values != buffer; }

  // `copied`: in the buffer in any case.
  void open(void* data, Dtype type, int64_t i, int64_t n, bool copied = false) {
    dtype = type;
    memory = at(data, type, i);
    values = type == own_dtype(T()) && !copied ? reinterpret_cast<T*>(memory) : buffer;
    if (!direct()) load(memory, type, buffer, n);
  }
  void open_empty(int64_t n) {  // reads as 0, keeps nothing
    values = buffer;
    memory = nullptr;
    memset(buffer, 0, n * sizeof(T));
  }
  void close(int64_t n) {
    if (!direct() && memory != nullptr) store(buffer, memory, dtype, n);
  }
};

bool in_double(const OptimizerTensor& t) { return t.param_dtype == Dtype::kFloat64; }

double unscale(const OptimizerCall& call) {
  // To float at once, as torch's GradScaler rounds it.
  return call.scale == nullptr ? 1.0 : static_cast<float>(1.0 / double(*call.scale));
}

// Calls f(i, n) for the blocks of a chunk.
template <class F>
void by_block(int64_t begin, int64_t end, bool direct, const F& f) {
  const int64_t length = direct ? kDirectBlock : kBlock;
  for (int64_t i = begin; i < end; i += length) f(i, smaller(length, end - i));
}

bool is_direct(const OptimizerTensor& t) {
  const Dtype own = in_double(t) ? Dtype::kFloat64 : Dtype::kFloat32;
  return t.grad_dtype == own && (t.param_dtype == own || t.master != nullptr);
}

// Whether all that an update works on is of the type that it computes in.
bool is_direct(const OptimizerCall& call, const OptimizerTensor& t, const Coefficients& k) {
  const Dtype own = in_double(t) ? Dtype::kFloat64 : Dtype::kFloat32;
  bool direct = is_direct(t) && t.master == nullptr && call.options->unit_factor == 0;
  for (int s = 0; s < call.states; ++s) direct &= t.state[s] != nullptr && t.state_dtype[s] == own;
  return direct && (k.average == 0 || t.average_dtype == own);
}

template <class T>
void measure_range(const OptimizerCall& call, const OptimizerTensor& t, int64_t begin, int64_t end,
                   double* sums) {
  const T factor = static_cast<T>(unscale(call));
  Block<T> g, p;
  by_block(begin, end, is_direct(t), [&](int64_t i, int64_t n) {
    g.open(t.grad, t.grad_dtype, i, n);
    table(T()).measure(g.values, factor, n, sums);
    if (static_cast<int>(call.options->measures) & kMeasureParameters) {
      double parameter[2] = {};
      if (t.master != nullptr)
        p.open(t.master, Dtype::kFloat32, i, n);
      else
        p.open(t.param, t.param_dtype, i, n);
      table(T()).measure(p.values, T(1), n, parameter);
      sums[2] += parameter[1];
    }
  });
}

template <class T>
void unscale_range(const OptimizerCall& call, const OptimizerTensor& t, int64_t begin,
                   int64_t end) {
  const T factor = static_cast<T>(unscale(call));
  Block<T> g;
  by_block(begin, end, is_direct(t), [&](int64_t i, int64_t n) {
    g.open(t.grad, t.grad_dtype, i, n);
    table(T()).multiply(g.values, factor, n);
    g.close(n);
  });
}

void measure_one(const OptimizerCall& call, const OptimizerTensor& t, int64_t begin, int64_t end,
                 double* sums) {
  if (in_double(t))
    measure_range<double>(call, t, begin, end, sums);
  else
    measure_range<float>(call, t, begin, end, sums);
}

// Gradients of the block become clipped ones, unit by unit.
template <class T>
void clip_units(const OptimizerTensor& t, const double* factors, T* g, int64_t i, int64_t n) {
  for (int64_t k = 0; k < n;) {
    const int64_t in_unit = (i + k) % t.inner, unit = (i + k) / t.inner % t.units;
    const int64_t m = smaller(n - k, t.inner - in_unit);
    table(T()).multiply(g + k, static_cast<T>(factors[unit]), m);
    k += m;
  }
}

// The buffers of one tensor that a step reads, block by block.
template <class T>
struct Buffers {
  Block<T> param, grad, state[kMaxStates], average;
  T* states[kMaxStates];

  void open(const OptimizerCall& call, const OptimizerTensor& t, const double* unit_factors,
            int64_t i, int64_t n) {
    if (t.master != nullptr)
      param.open(t.master, Dtype::kFloat32, i, n);
    else
      param.open(t.param, t.param_dtype, i, n);
    grad.open(t.grad, t.grad_dtype, i, n, unit_factors != nullptr);
    if (unit_factors != nullptr) clip_units(t, unit_factors, grad.values, i, n);
    for (int k = 0; k < call.states; ++k) {
      if (t.state[k] != nullptr)
        state[k].open(t.state[k], t.state_dtype[k], i, n);
      else
        state[k].open_empty(n);
      states[k] = state[k].values;
    }
  }
};

// The kernel of a tensor that is of one 16-bit format and asks for nothing but its update, or null.
// (AdamW on 25 M parameters, one thread: bfloat16 24 ms, converted in buffers 28; float16 16, 26.)
OptimizerKernels16::Update update_16bit(const OptimizerCall& call, const OptimizerTensor& t,
                                        const Coefficients& k) {
  const Dtype dtype = t.param_dtype;
  bool plain = (dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16) && t.grad_dtype == dtype &&
               t.master == nullptr && k.average == 0 && k.key < 0 &&
               call.options->unit_factor == 0 && call.options->write_back != 1;
  for (int s = 0; s < call.states; ++s) plain &= t.state[s] != nullptr && t.state_dtype[s] == dtype;
  if (!plain) return nullptr;
  const OptimizerKernels16& kernels16 =
      dtype == Dtype::kFloat16 ? kernels().optimizer_f16 : kernels().optimizer_bf16;
  return kernels16.update[call.rule][call.states];
}

template <class T>
void update_range(const OptimizerCall& call, const OptimizerTensor& t, const Coefficients& k,
                  const double* unit_factors, int64_t begin, int64_t end) {
  const auto rule = table(T()).update[call.rule][call.states];
  const int write_back = static_cast<int>(call.options->write_back);
  Buffers<T> b;
  by_block(begin, end, is_direct(call, t, k), [&](int64_t i, int64_t n) {
    b.open(call, t, unit_factors, i, n);
    rule(k, b.param.values, b.grad.values, b.states, n);
    for (int s = 0; s < call.states; ++s) b.state[s].close(n);
    if (k.average != 0) {
      b.average.open(t.average, t.average_dtype, i, n);
      table(T()).average(b.average.values, b.param.values, static_cast<T>(k.average), n);
      b.average.close(n);
    }
    if (k.key >= 0) {
      // T is float here: only bfloat16 parameters have a key.
      kernels().to_bfloat16_stochastic(reinterpret_cast<const float*>(b.param.values),
                                       reinterpret_cast<uint16_t*>(at(t.param, t.param_dtype, i)),
                                       n, i, static_cast<uint32_t>(k.key));
    } else {
      b.param.close(n);
      if (t.master != nullptr)
        store(b.param.values, at(t.param, t.param_dtype, i), t.param_dtype, n);
    }
    if (write_back == 1) {
      table(T()).multiply(b.grad.values, static_cast<T>(fabs(k.gradient)), n);
      b.grad.close(n);
    } else if (write_back == 2) {
      memset(at(t.grad, t.grad_dtype, i), 0, n * bytes_of(t.grad_dtype));
    }
  });
}

void update_range_16bit(const OptimizerCall& call, const OptimizerTensor& t, const Coefficients& k,
                        OptimizerKernels16::Update kernel, int64_t begin, int64_t end) {
  const auto from = [&](void* data) { return static_cast<uint16_t*>(data) + begin; };
  uint16_t* states[kMaxStates];
  for (int s = 0; s < call.states; ++s) states[s] = from(t.state[s]);
  kernel(k, from(t.param), from(t.grad), states, end - begin);
  if (call.options->write_back == 2) memset(from(t.grad), 0, 2 * (end - begin));
}

template <class T>
void try_range(const OptimizerCall& call, const OptimizerTensor& t, const Coefficients& k,
               const double* unit_factors, int64_t begin, int64_t end, double* sums) {
  const auto rule = table(T()).trial[call.rule][call.states];
  Buffers<T> b;
  by_block(begin, end, is_direct(call, t, k), [&](int64_t i, int64_t n) {
    b.open(call, t, unit_factors, i, n);
    rule(k, b.param.values, b.grad.values, b.states, n, sums);
  });
}

const double* factors_of(const OptimizerCall& call, const OptimizerWork& work, int64_t tensor) {
  return call.options->unit_factor == 0 ? nullptr : work.unit_factors + work.first_unit[tensor];
}

double lr_of(const OptimizerCall& call, const OptionGroup& group) {
  const int64_t i = static_cast<int64_t>(group.lr_index);
  if (i < 0) return group.lr;
  return call.lr_dtypes[i] == Dtype::kFloat64 ? *static_cast<const double*>(call.lrs[i])
                                              : *static_cast<const float*>(call.lrs[i]);
}

float* scalar_of(const OptimizerCall& call, const OptimizerTensor& t, int which) {
  return call.scalars + which * call.scalar_count + t.scalar;
}

TensorFacts facts_of(const OptimizerCall& call, const OptimizerWork& work, int64_t tensor,
                     double grad_norm) {
  const OptimizerTensor& t = call.tensors[tensor];
  const OptionGroup& group = call.groups[t.group];
  return {&group,
          lr_of(call, group),
          double(*scalar_of(call, t, 0)) + 1,
          grad_norm,
          sqrt(call.sums[tensor * kTensorSums + 2]),
          work.moments + 2 * tensor};
}

// Norm of a tensor's gradient after clipping.
double clipped_norm(const OptimizerCall& call, const OptimizerWork& work, int64_t tensor,
                    double clip) {
  double squares = call.sums[tensor * kTensorSums + 1];
  if (const double* factors = factors_of(call, work, tensor)) {
    squares = 0;
    const int64_t first = work.first_unit[tensor];
    for (int64_t u = first; u < work.first_unit[tensor + 1]; ++u)
      squares += work.unit_sums[u * kTensorSums + 1] * factors[u - first] * factors[u - first];
  }
  return sqrt(squares) * clip;
}

double global_norm(const OptimizerCall& call) {
  double squares = 0;
  for (int64_t t = 0; t < call.count; ++t) squares += call.sums[t * kTensorSums + 1];
  return sqrt(squares);
}

double clip_of(const OptimizerCall& call) {
  const StepOptions& options = *call.options;
  if (options.max_norm == 0) return 1;
  return formulas::clip_coefficient(global_norm(call), options.max_norm, options.norm_eps);
}

void add(const OptimizerCall& call, const OptimizerWork& work, double* sums, int width) {
  memset(sums, 0, call.count * width * sizeof(double));
  for (int64_t c = 0; c < work.chunk_count; ++c)
    for (int k = 0; k < width; ++k)
      sums[work.chunks[c].tensor * width + k] += work.partials[c * width + k];
}

}  // namespace

int64_t optimizer_chunks(const OptimizerCall& call) {
  int64_t chunks = 0;
  for (int64_t t = 0; t < call.count; ++t) chunks += (call.tensors[t].numel + kChunk - 1) / kChunk;
  return chunks;
}

void cut_into_chunks(const OptimizerCall& call, OptimizerChunk* chunks) {
  for (int64_t t = 0; t < call.count; ++t)
    for (int64_t i = 0; i < call.tensors[t].numel; i += kChunk)
      *chunks++ = {t, i, smaller(i + kChunk, call.tensors[t].numel)};
}

int64_t optimizer_units(const OptimizerCall& call, int64_t* first_unit) {
  int64_t units = 0;
  for (int64_t t = 0; t < call.count; ++t) {
    first_unit[t] = units;
    units += call.tensors[t].numel == 0 ? 0 : call.tensors[t].units;
  }
  first_unit[call.count] = units;
  return units;
}

void measure(const OptimizerCall& call, const OptimizerWork& work, int64_t first, int64_t last) {
  for (int64_t c = first; c < last; ++c) {
    const OptimizerChunk& chunk = work.chunks[c];
    double* sums = work.partials + c * kTensorSums;
    sums[0] = sums[1] = sums[2] = 0;
    measure_one(call, call.tensors[chunk.tensor], chunk.begin, chunk.end, sums);
  }
}

void measure_units(const OptimizerCall& call, const OptimizerWork& work, int64_t first,
                   int64_t last) {
  int64_t tensor = 0;
  for (int64_t u = first; u < last; ++u) {
    while (u >= work.first_unit[tensor + 1]) ++tensor;
    const OptimizerTensor& t = call.tensors[tensor];
    double* sums = work.unit_sums + u * kTensorSums;
    sums[0] = sums[1] = sums[2] = 0;
    for (int64_t i = (u - work.first_unit[tensor]) * t.inner; i < t.numel; i += t.units * t.inner)
      measure_one(call, t, i, i + t.inner, sums);
  }
}

void add_measures(const OptimizerCall& call, const OptimizerWork& work) {
  if (call.options->unit_factor == 0) return add(call, work, call.sums, kTensorSums);
  memset(call.sums, 0, call.count * kTensorSums * sizeof(double));
  for (int64_t t = 0; t < call.count; ++t)
    for (int64_t u = work.first_unit[t]; u < work.first_unit[t + 1]; ++u)
      for (int k = 0; k < kTensorSums; ++k)
        call.sums[t * kTensorSums + k] += work.unit_sums[u * kTensorSums + k];
}

bool prepare(const OptimizerCall& call, const OptimizerWork& work) {
  using Prepare = void (*)(const TensorFacts&, Coefficients&);
#define FT_PREPARE(name, Rule, least, most) formulas::Rule<double>::prepare,
  static constexpr Prepare kPrepare[] = {FT_RULES(FT_PREPARE)};
#undef FT_PREPARE
  const StepOptions& options = *call.options;
  bool skip = call.found_inf != nullptr && !(*call.found_inf == 0);
  if (static_cast<int>(options.measures) & kMeasureFinite)
    for (int64_t t = 0; t < call.count; ++t) skip |= call.sums[t * kTensorSums] != 0;
  if (skip) return false;
  if (options.unit_factor != 0)
    for (int64_t u = 0; u < work.unit_count; ++u) {
      const double* sums = work.unit_sums + u * kTensorSums;
      work.unit_factors[u] = formulas::adaptive_clip_coefficient(
          sqrt(sums[1]), sqrt(sums[2]), options.unit_factor, options.unit_eps);
    }
  const double clip = clip_of(call), unscaled = unscale(call);
  for (int64_t t = 0; t < call.count; ++t) {
    const OptimizerTensor& tensor = call.tensors[t];
    work.moments[2 * t] = *scalar_of(call, tensor, 1);
    work.moments[2 * t + 1] = *scalar_of(call, tensor, 2);
    const TensorFacts facts = facts_of(call, work, t, clipped_norm(call, work, t, clip));
    Coefficients& k = work.coefficients[t];
    k = {};
    k.gradient = unscaled * clip * facts.group->sign;
    k.caution = 1;
    k.cautious = facts.group->cautious;
    k.average = tensor.average == nullptr ? 0 : options.average_weight;
    k.key = -1;
    if (options.stochastic != 0 && tensor.param_dtype == Dtype::kBFloat16 &&
        tensor.master == nullptr)
      k.key = formulas::random_key(formulas::whole_seed(options), tensor.scalar,
                                   static_cast<int64_t>(call.control[5]));
    kPrepare[call.rule](facts, k);
  }
  return true;
}

void try_update(const OptimizerCall& call, const OptimizerWork& work, int64_t first, int64_t last) {
  for (int64_t c = first; c < last; ++c) {
    const OptimizerChunk& chunk = work.chunks[c];
    const OptimizerTensor& t = call.tensors[chunk.tensor];
    const Coefficients& k = work.coefficients[chunk.tensor];
    const double* factors = factors_of(call, work, chunk.tensor);
    double* sums = work.partials + c * kTrialSums;
    sums[0] = sums[1] = sums[2] = 0;
    if (in_double(t))
      try_range<double>(call, t, k, factors, chunk.begin, chunk.end, sums);
    else
      try_range<float>(call, t, k, factors, chunk.begin, chunk.end, sums);
  }
}

void add_trials(const OptimizerCall& call, const OptimizerWork& work) {
  add(call, work, call.trial_sums, kTrialSums);
}

void finish(const OptimizerCall& call, const OptimizerWork& work) {
  using Finish = void (*)(const TensorFacts&, const TrialFacts&, Coefficients&);
#define FT_FINISH(name, Rule, least, most) formulas::finish_step<formulas::Rule>,
  static constexpr Finish kFinish[] = {FT_RULES(FT_FINISH)};
#undef FT_FINISH
  const double clip = clip_of(call);
  for (int64_t t = 0; t < call.count; ++t) {
    const double* sums = call.trial_sums + t * kTrialSums;
    const TrialFacts trial{sums[0], sums[1], sums[2], double(call.tensors[t].numel)};
    const double norm = clipped_norm(call, work, t, clip);
    kFinish[call.rule](facts_of(call, work, t, norm), trial, work.coefficients[t]);
  }
}

void commit(const OptimizerCall& call, const OptimizerWork& work, bool applied) {
  const bool measured = call.options->measures != 0;
  double bad = 0;
  for (int64_t t = 0; measured && t < call.count; ++t) bad += call.sums[t * kTensorSums];
  float* control = call.control;
  control[0] = applied ? 0.0f : 1.0f;
  control[1] += applied ? 0.0f : 1.0f;
  control[2] = static_cast<float>(measured ? global_norm(call) : NAN);
  control[3] = static_cast<float>(measured ? clip_of(call) : 1);
  control[4] = static_cast<float>(bad);
  if (!applied) return;
  control[5] += 1;
  for (int64_t t = 0; t < call.count; ++t) {
    const OptimizerTensor& tensor = call.tensors[t];
    *scalar_of(call, tensor, 0) += 1;
    *scalar_of(call, tensor, 1) = work.moments[2 * t];
    *scalar_of(call, tensor, 2) = work.moments[2 * t + 1];
  }
}

void update(const OptimizerCall& call, const OptimizerWork& work, int64_t first, int64_t last) {
  // Backwards: what the sweep over gradients read last is still in the cache.
  for (int64_t c = last; c-- > first;) {
    const OptimizerChunk& chunk = work.chunks[c];
    const OptimizerTensor& t = call.tensors[chunk.tensor];
    const Coefficients& k = work.coefficients[chunk.tensor];
    const double* factors = factors_of(call, work, chunk.tensor);
    if (in_double(t))
      update_range<double>(call, t, k, factors, chunk.begin, chunk.end);
    else if (const auto kernel = update_16bit(call, t, k))
      update_range_16bit(call, t, k, kernel, chunk.begin, chunk.end);
    else
      update_range<float>(call, t, k, factors, chunk.begin, chunk.end);
  }
}

void write_skipped_gradients(const OptimizerCall& call, const OptimizerWork& work, int64_t first,
                             int64_t last) {
  for (int64_t c = first; c < last; ++c) {
    const OptimizerChunk& chunk = work.chunks[c];
    const OptimizerTensor& t = call.tensors[chunk.tensor];
    if (call.options->write_back == 2)
      memset(at(t.grad, t.grad_dtype, chunk.begin), 0,
             (chunk.end - chunk.begin) * bytes_of(t.grad_dtype));
    else if (in_double(t))
      unscale_range<double>(call, t, chunk.begin, chunk.end);
    else
      unscale_range<float>(call, t, chunk.begin, chunk.end);
  }
}

}  // namespace cpu
}  // namespace fusedtrain
