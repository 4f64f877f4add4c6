// The optimizer step over chunks of all tensors.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "../optimizer_step.h"
#include "optimizer_blocks.h"

namespace fusedtrain {
namespace cpu {
namespace {

using formulas::TensorFacts;
using formulas::TrialFacts;

constexpr int64_t kChunk = 16384;  // four float32 streams of it are 256 KiB: second-level cache
static_assert(kChunk % kBlock == 0, "blocks of a chunk");
// A piece of a tensor. Neither chunks nor units depend on the number of threads, so the sums do not
// either.
struct Chunk {
  int64_t tensor, begin, end;
};

// Threads share elements, not chunks: the first half of EfficientNet-B0's chunks, most of them of
// small tensors, has a third of its elements.

// Working data of one call.
struct Work {
  std::vector<Chunk> chunks;
  std::vector<int64_t> first_element;      // [count + 1], of tensors laid end to end
  std::vector<double> partials;            // [chunks, kTensorSums or kTrialSums]
  std::vector<int64_t> first_unit;         // [count + 1], where units are clipped
  std::vector<double> unit_sums;           // [units, kTensorSums]
  std::vector<double> unit_factors;        // [units]
  std::vector<Coefficients> coefficients;  // [count]
  std::vector<float> moments;              // [count, 2]: the scalars of a tensor after the step

  Work(const OptimizerCall& call, Parallel parallel)
      : coefficients(call.count), moments(2 * call.count), parallel_(parallel) {
    int64_t count = 0;
    for (int64_t t = 0; t < call.count; ++t) count += (call.tensors[t].numel + kChunk - 1) / kChunk;
    chunks.reserve(count);
    first_element.reserve(call.count + 1);
    first_element.push_back(0);
    for (int64_t t = 0; t < call.count; ++t) {
      first_element.push_back(first_element[t] + call.tensors[t].numel);
      for (int64_t i = 0; i < call.tensors[t].numel; i += kChunk)
        chunks.push_back({t, i, smaller(i + kChunk, call.tensors[t].numel)});
    }
    partials.resize(chunks.size() * (kTensorSums > kTrialSums ? kTensorSums : kTrialSums));
    if (call.options->unit_factor != 0) cut_into_units(call);
  }

  // Calls part(k) for the chunks; backwards: a thread begins with its last.
  template <class Part>
  void each_chunk(bool backwards, const Part& part) const {
    in_parts(parallel_, first_element.back(), kGrain, [&](int64_t begin, int64_t end) {
      const int64_t first = chunk_from(begin), last = chunk_from(end);
      for (int64_t i = first; i < last; ++i) part(backwards ? first + last - 1 - i : i);
    });
  }
  // Calls part(tensor, unit of the tensor) for the units.
  template <class Part>
  void each_unit(const OptimizerCall& call, const Part& part) const {
    in_parts(parallel_, first_element.back(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t t = tensor_of(begin); t < call.count && first_element[t] < end; ++t) {
        const OptimizerTensor& tensor = call.tensors[t];
        if (tensor.numel == 0) continue;
        const int64_t each = tensor.numel / tensor.units, start = first_element[t];
        for (int64_t u = (std::max(begin - start, int64_t(0)) + each - 1) / each;
             u < tensor.units && start + u * each < end; ++u)
          part(t, u);
      }
    });
  }

 private:
  void cut_into_units(const OptimizerCall& call) {
    first_unit.push_back(0);
    for (int64_t t = 0; t < call.count; ++t)
      first_unit.push_back(first_unit[t] +
                           (call.tensors[t].numel == 0 ? 0 : call.tensors[t].units));
    unit_sums.resize(first_unit[call.count] * kTensorSums);
    unit_factors.resize(first_unit[call.count]);
  }

  // The first chunk that starts at an element or later.
  int64_t chunk_from(int64_t element) const {
    const auto starts_before = [&](const Chunk& chunk, int64_t e) {
      return first_element[chunk.tensor] + chunk.begin < e;
    };
    return std::lower_bound(chunks.begin(), chunks.end(), element, starts_before) - chunks.begin();
  }
  // The tensor that has an element.
  int64_t tensor_of(int64_t element) const {
    return std::upper_bound(first_element.begin(), first_element.end(), element) -
           first_element.begin() - 1;
  }

  Parallel parallel_;
};

const double* factors_of(const OptimizerCall& call, const Work& work, int64_t tensor) {
  return call.options->unit_factor == 0 ? nullptr
                                        : work.unit_factors.data() + work.first_unit[tensor];
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

TensorFacts facts_of(const OptimizerCall& call, Work& work, int64_t tensor, double grad_norm) {
  const OptimizerTensor& t = call.tensors[tensor];
  const OptionGroup& group = call.groups[t.group];
  return {&group,
          lr_of(call, group),
          double(*scalar_of(call, t, 0)) + 1,
          grad_norm,
          sqrt(call.sums[tensor * kTensorSums + 2]),
          work.moments.data() + 2 * tensor};
}

// Norm of a tensor's gradient after clipping.
double clipped_norm(const OptimizerCall& call, const Work& work, int64_t tensor, double clip) {
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

void add(const OptimizerCall& call, const Work& work, double* sums, int width) {
  memset(sums, 0, call.count * width * sizeof(double));
  for (size_t c = 0; c < work.chunks.size(); ++c)
    for (int k = 0; k < width; ++k)
      sums[work.chunks[c].tensor * width + k] += work.partials[c * width + k];
}

void measure_chunks(const OptimizerCall& call, Work& work) {
  work.each_chunk(false, [&](int64_t c) {
    const Chunk& chunk = work.chunks[c];
    double* sums = &work.partials[c * kTensorSums];
    sums[0] = sums[1] = sums[2] = 0;
    measure_one(call, call.tensors[chunk.tensor], chunk.begin, chunk.end, sums);
  });
}

void measure_units(const OptimizerCall& call, Work& work) {
  work.each_unit(call, [&](int64_t tensor, int64_t unit) {
    const OptimizerTensor& t = call.tensors[tensor];
    double* sums = &work.unit_sums[(work.first_unit[tensor] + unit) * kTensorSums];
    sums[0] = sums[1] = sums[2] = 0;
    for (int64_t i = unit * t.inner; i < t.numel; i += t.units * t.inner)
      measure_one(call, t, i, i + t.inner, sums);
  });
}

// call.sums, and those of units where they are clipped.
void measure(const OptimizerCall& call, Work& work) {
  if (call.options->unit_factor == 0) {
    measure_chunks(call, work);
    return add(call, work, call.sums, kTensorSums);
  }
  measure_units(call, work);
  memset(call.sums, 0, call.count * kTensorSums * sizeof(double));
  for (int64_t t = 0; t < call.count; ++t)
    for (int64_t u = work.first_unit[t]; u < work.first_unit[t + 1]; ++u)
      for (int k = 0; k < kTensorSums; ++k)
        call.sums[t * kTensorSums + k] += work.unit_sums[u * kTensorSums + k];
}

// Coefficients from call.sums. False: the step is to be skipped.
bool prepare(const OptimizerCall& call, Work& work) {
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
    for (size_t u = 0; u < work.unit_factors.size(); ++u) {
      const double* sums = &work.unit_sums[u * kTensorSums];
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
    const uint32_t key = formulas::random_key(formulas::whole_seed(options), tensor.scalar,
                                              static_cast<int64_t>(call.control[5]));
    if (options.stochastic != 0 && formulas::rounds_stochastically(tensor)) k.key = key;
    k.state_key = key;
    kPrepare[call.rule](facts, k);
  }
  return true;
}

// call.trial_sums, over a trial of the update.
void try_update(const OptimizerCall& call, Work& work) {
  work.each_chunk(false, [&](int64_t c) {
    const Chunk& chunk = work.chunks[c];
    const OptimizerTensor& t = call.tensors[chunk.tensor];
    const Coefficients& k = work.coefficients[chunk.tensor];
    const double* factors = factors_of(call, work, chunk.tensor);
    double* sums = &work.partials[c * kTrialSums];
    sums[0] = sums[1] = sums[2] = 0;
    if (in_double(t))
      try_range<double>(call, t, k, factors, chunk.begin, chunk.end, sums);
    else
      try_range<float>(call, t, k, factors, chunk.begin, chunk.end, sums);
  });
  add(call, work, call.trial_sums, kTrialSums);
}

// Completes the coefficients by those that depend on call.trial_sums.
void finish(const OptimizerCall& call, Work& work) {
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

// Step counts and what the caller is told.
void commit(const OptimizerCall& call, const Work& work, bool applied) {
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

void update(const OptimizerCall& call, const Work& work) {
  // Backwards: what the sweep over gradients read last is still in the cache.
  work.each_chunk(true, [&](int64_t c) {
    const Chunk& chunk = work.chunks[c];
    const OptimizerTensor& t = call.tensors[chunk.tensor];
    const Coefficients& k = work.coefficients[chunk.tensor];
    const double* factors = factors_of(call, work, chunk.tensor);
    if (in_double(t))
      update_range<double>(call, t, k, factors, chunk.begin, chunk.end);
    else if (const auto kernel = update_16bit(call, t, k))
      update_range_16bit(call, t, k, kernel, chunk.begin, chunk.end);
    else
      update_range<float>(call, t, k, factors, chunk.begin, chunk.end);
  });
}

// After a skipped step, where gradients are to be unscaled or zeroed.
void write_skipped_gradients(const OptimizerCall& call, const Work& work) {
  work.each_chunk(false, [&](int64_t c) {
    const Chunk& chunk = work.chunks[c];
    const OptimizerTensor& t = call.tensors[chunk.tensor];
    if (call.options->write_back == 2)
      memset(byte_at(t.grad, t.grad_dtype, chunk.begin), 0,
             (chunk.end - chunk.begin) * bytes_of(t.grad_dtype));
    else if (in_double(t))
      unscale_range<double>(call, t, chunk.begin, chunk.end);
    else
      unscale_range<float>(call, t, chunk.begin, chunk.end);
  });
}

}  // namespace

void measure(const OptimizerCall& call, Parallel parallel) {
  Work work(call, parallel);
  measure(call, work);
}

void try_update(const OptimizerCall& call, Parallel parallel) {
  Work work(call, parallel);
  if (prepare(call, work))
    try_update(call, work);
  else
    std::fill_n(call.trial_sums, call.count * kTrialSums, 0.0);
}

void optimizer_step(const OptimizerCall& call, bool measures, bool tries, Parallel parallel) {
  Work work(call, parallel);
  if (measures && call.options->measures != 0)
    measure(call, work);
  else if (measures)
    std::fill_n(call.sums, call.count * kTensorSums, 0.0);
  const bool applied = prepare(call, work);
  if (applied && call.options->trial != 0) {
    if (tries) try_update(call, work);
    finish(call, work);
  }
  commit(call, work, applied);
  if (applied)
    update(call, work);
  else if (call.options->write_back == 2 ||
           (call.options->write_back == 1 && call.scale != nullptr))
    write_skipped_gradients(call, work);
}

void update_scale(const ScaleUpdate& update) { formulas::next_scale(update); }

// Ranges are cut like the bytes of one long range.
void zero(const ZeroRange* ranges, int64_t count, Parallel parallel) {
  std::vector<int64_t> starts(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) starts[i + 1] = starts[i] + ranges[i].bytes;
  in_parts(parallel, starts[count], 4 * kGrain, [&](int64_t first, int64_t last) {
    int64_t i = std::upper_bound(starts.begin(), starts.end(), first) - starts.begin() - 1;
    for (; i < count && starts[i] < last; ++i) {
      const int64_t begin = std::max(first, starts[i]), end = std::min(last, starts[i + 1]);
      if (begin < end)
        memset(static_cast<char*>(ranges[i].data) + begin - starts[i], 0, end - begin);
    }
  });
}

}  // namespace cpu
}  // namespace fusedtrain
