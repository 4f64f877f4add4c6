// torch::stable tensors -> cpu entry points of ops.h. Schemas are defined in fusedtrain/ops.
#include "binding_activations.h"
#include "binding_batch_norm.h"
#include "binding_chains.h"
#include "binding_few_bit.h"
#include "binding_fold.h"
#include "binding_images.h"
#include "binding_optimizers.h"
#include "binding_pool.h"

#include <string.h>

#include <algorithm>
#include <vector>

namespace fusedtrain {
namespace {

// Elements a thread takes at least; torch's own pointwise kernels use the same number.
constexpr int64_t kGrain = 32768;

struct Cpu {
  explicit Cpu(const Tensor&) {}

  static bool on_device(const Tensor& t) { return t.is_cpu(); }

  static Tensor new_output(const Tensor& model) {
    return prepared(torch::stable::empty_like(model));
  }
  static Tensor prepared(Tensor output) {
    cpu::prepare_output(output.mutable_data_ptr(), output.numel() * output.element_size());
    return output;
  }

  template <class Call>
  void pointwise(const Call& call, int64_t n) const {
    if (n <= kGrain) {
      cpu::pointwise(call, 0, n);
      return;
    }
    torch::stable::parallel_for(
        0, n, kGrain, [&](int64_t begin, int64_t end) { cpu::pointwise(call, begin, end); });
  }

  template <class Call>
  void few_bit(const Call& call, int64_t n) const {
    torch::stable::parallel_for(
        0, bit_blocks(n), kGrain / kBitBlock, [&](int64_t first, int64_t last) {
          cpu::few_bit(call, first * kBitBlock, std::min(last * kBitBlock, n));
        });
  }

  template <class Call>
  void channelwise(const Call& call) const {
    const int64_t tasks = cpu::channelwise_tasks(call.rows, call.channels, call.inner);
    torch::stable::parallel_for(
        0, tasks, 2, [&](int64_t first, int64_t last) { cpu::channelwise(call, first, last); });
  }

  void channelwise(ChannelwiseBackward call, Tensor* const* gradients) const {
    std::vector<double> shares(cpu::channelwise_shares(call.rows, call.channels, call.inner), 0.0);
    call.shares = shares.data();
    channelwise(call);
    for (int k = 0; k < kMaxParameters && gradients[k] != nullptr; ++k) {
      std::vector<int64_t> sizes(gradients[k]->sizes().begin(), gradients[k]->sizes().end());
      Tensor sums = torch::stable::empty(sizes, torch::headeronly::ScalarType::Double);
      torch::stable::zero_(sums);
      cpu::add_shares(call, k, static_cast<double*>(sums.mutable_data_ptr()));
      torch::stable::copy_(*gradients[k], sums);
    }
  }

  void statistics(const BatchNorm& n, const BatchNormStatistics& s) const;
  void train(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f) const;
  void evaluate(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f) const {
    cpu::invert(n, s);
    normalise(n, f);
  }
  void normalise(const BatchNorm& n, const BatchNormForward& f) const;
  void restore(const BatchNorm& n, const BatchNormRestore& r) const;
  void reduce(const BatchNorm& n, const BatchNormBackward& b) const;
  void grad_input(const BatchNorm& n, const BatchNormBackward& b) const;
  void backward(const BatchNorm& n, const BatchNormBackward& b) const;
  template <class Call>
  void fold(const Call& call) const {
    const int64_t outputs = call.outputs();
    const int64_t each = call.rows_per_group * call.inner + 1;
    torch::stable::parallel_for(0, outputs, (kGrain + each - 1) / each,
                                [&](int64_t first, int64_t last) { cpu::fold(call, first, last); });
  }

  template <class Call>
  static void run_chain(int64_t tasks, void (*run)(const Call&, int64_t, int64_t),
                        const Call& call) {
    torch::stable::parallel_for(0, tasks, 2,
                                [&](int64_t first, int64_t last) { run(call, first, last); });
  }
  void chain(const GatedForward& call) const {
    run_chain(cpu::gated_tasks(call), cpu::gated, call);
  }
  void chain(const GatedBackward& call) const {
    run_chain(cpu::gated_tasks(call), cpu::gated, call);
  }
  void chain(const ScaleForward& call) const {
    run_chain(cpu::chain_tasks(call.shape), cpu::scale_add, call);
  }
  void chain(const BiasActForward& call) const {
    run_chain(cpu::chain_tasks(call.shape), cpu::bias_act, call);
  }
  void chain(ScaleBackward call) const {
    std::vector<double> shares(call.grad_scale ? cpu::chain_shares(call.shape) : 0, 0.0);
    call.shares = shares.data();
    run_chain(cpu::chain_tasks(call.shape), cpu::scale_add, call);
    if (call.grad_scale)
      cpu::add_chain_shares(call.shape, call.dtype, call.shares, call.grad_scale);
  }
  void chain(BiasActBackward call) const {
    std::vector<double> shares(call.grad_bias ? cpu::chain_shares(call.shape) : 0, 0.0);
    call.shares = shares.data();
    run_chain(cpu::chain_tasks(call.shape), cpu::bias_act, call);
    if (call.grad_bias) cpu::add_chain_shares(call.shape, call.dtype, call.shares, call.grad_bias);
  }

  void images(const NormalizeImages& call) const {
    const int64_t blocks = cpu::image_blocks(call);
    const int64_t each = call.samples * call.channels * call.pixels / blocks + 1;
    torch::stable::parallel_for(
        0, blocks, (kGrain + each - 1) / each,
        [&](int64_t first, int64_t last) { cpu::normalize_images(call, first, last); });
  }

  template <class Call>
  void max_pool2d(const Call& call) const {
    torch::stable::parallel_for(
        0, cpu::max_pool2d_tasks(call), 2,
        [&](int64_t first, int64_t last) { cpu::max_pool2d(call, first, last); });
  }

  void measure(const OptimizerCall& call) const;
  void try_update(const OptimizerCall& call) const;
  void step(const OptimizerCall& call, bool measures, bool tries) const;
  void update_scale(const ScaleUpdate& update) const { formulas::next_scale(update); }
  void zero(const ZeroRange* ranges, int64_t count) const;
};

// What one call of batch norm works with.
struct NormWork : cpu::BatchNormWork {
  explicit NormWork(const BatchNorm& n, bool sums)
      : cpu::BatchNormWork{cpu::batch_norm_tasks(n), nullptr},
        list(sums ? 2 * tasks * n.channels : 0) {
    shares = list.data();
  }
  template <class Part>
  void parallel(const Part& part) const {
    if (tasks == 1) return part(0, 1);
    torch::stable::parallel_for(0, tasks, 1, part);
  }

 private:
  std::vector<double> list;
};

void Cpu::statistics(const BatchNorm& n, const BatchNormStatistics& s) const {
  const NormWork work(n, true);
  cpu::guess(n, s);
  const auto sum = [&](int64_t first, int64_t last) { cpu::statistics(n, s, work, first, last); };
  work.parallel(sum);
  if (cpu::guess_again(n, s, work)) work.parallel(sum);
  cpu::settle(n, s, work);
}

void Cpu::train(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f) const {
  statistics(n, s);
  normalise(n, f);
}

void Cpu::normalise(const BatchNorm& n, const BatchNormForward& f) const {
  const NormWork work(n, false);
  work.parallel([&](int64_t first, int64_t last) { cpu::normalise(n, f, first, last); });
}

void Cpu::restore(const BatchNorm& n, const BatchNormRestore& r) const {
  const NormWork work(n, false);
  work.parallel([&](int64_t first, int64_t last) { cpu::restore(n, r, first, last); });
}

void Cpu::reduce(const BatchNorm& n, const BatchNormBackward& b) const {
  const NormWork work(n, true);
  work.parallel([&](int64_t first, int64_t last) { cpu::reduce(n, b, work, first, last); });
  cpu::settle(n, b, work);
}

void Cpu::grad_input(const BatchNorm& n, const BatchNormBackward& b) const {
  const NormWork work(n, false);
  work.parallel([&](int64_t first, int64_t last) { cpu::grad_input(n, b, first, last); });
}

void Cpu::backward(const BatchNorm& n, const BatchNormBackward& b) const {
  // grad f'(s) is computed once, and waits in grad_input where nobody asks for it.
  if (b.averages == nullptr && b.grad_residual == nullptr) return reduce(n, b);  // and grad_input
  BatchNormBackward sums = b, rest = b;
  if (n.op >= 0 && b.grad_residual == nullptr) sums.grad_residual = b.grad_input;
  rest.ready = sums.grad_residual;
  rest.grad_residual = nullptr;
  reduce(n, sums);
  grad_input(n, rest);
}

// What one call of an optimizer op works with.
struct Work : cpu::OptimizerWork {
  explicit Work(const OptimizerCall& call) : cpu::OptimizerWork{}, call(call) {
    chunk_count = cpu::optimizer_chunks(call);
    for (int64_t t = 0; t < call.count; ++t) elements += call.tensors[t].numel;
    chunk_list.resize(chunk_count);
    cpu::cut_into_chunks(call, chunk_list.data());
    partial_list.resize(chunk_count * (kTensorSums > kTrialSums ? kTensorSums : kTrialSums));
    coefficient_list.resize(call.count);
    moment_list.resize(2 * call.count);
    unit_list.resize(call.count + 1);
    if (call.options->unit_factor != 0) {
      unit_count = cpu::optimizer_units(call, unit_list.data());
      unit_sum_list.resize(unit_count * (kTensorSums + 1));
    }
    chunks = chunk_list.data();
    partials = partial_list.data();
    first_unit = unit_list.data();
    unit_sums = unit_sum_list.data();
    unit_factors = unit_sums + unit_count * kTensorSums;
    coefficients = coefficient_list.data();
    moments = moment_list.data();
  }

  using Part = void (*)(const OptimizerCall&, const cpu::OptimizerWork&, int64_t, int64_t);
  void parallel(int64_t n, Part part) const {
    if (elements <= kGrain) return part(call, *this, 0, n);
    torch::stable::parallel_for(
        0, n, 2, [&](int64_t first, int64_t last) { part(call, *this, first, last); });
  }

  // call.sums, and those of units where they are clipped.
  void measure() const {
    if (call.options->unit_factor != 0)
      parallel(unit_count, cpu::measure_units);
    else
      parallel(chunk_count, cpu::measure);
    cpu::add_measures(call, *this);
  }

  void try_update() const {
    parallel(chunk_count, cpu::try_update);
    cpu::add_trials(call, *this);
  }

  const OptimizerCall& call;
  int64_t elements = 0;

 private:
  std::vector<cpu::OptimizerChunk> chunk_list;
  std::vector<double> partial_list, unit_sum_list;
  std::vector<int64_t> unit_list;
  std::vector<Coefficients> coefficient_list;
  std::vector<float> moment_list;
};

void Cpu::measure(const OptimizerCall& call) const { Work(call).measure(); }

void Cpu::try_update(const OptimizerCall& call) const {
  const Work work(call);
  if (cpu::prepare(call, work))
    work.try_update();
  else
    std::fill_n(call.trial_sums, call.count * kTrialSums, 0.0);
}

void Cpu::step(const OptimizerCall& call, bool measures, bool tries) const {
  const Work work(call);
  if (measures && call.options->measures != 0)
    work.measure();
  else if (measures)
    std::fill_n(call.sums, call.count * kTensorSums, 0.0);
  const bool applied = cpu::prepare(call, work);
  if (applied && call.options->trial != 0) {
    if (tries) work.try_update();
    cpu::finish(call, work);
  }
  cpu::commit(call, work, applied);
  if (applied)
    work.parallel(work.chunk_count, cpu::update);
  else if (call.options->write_back == 2 ||
           (call.options->write_back == 1 && call.scale != nullptr))
    work.parallel(work.chunk_count, cpu::write_skipped_gradients);
}

// Ranges are cut like the bytes of one long range.
void Cpu::zero(const ZeroRange* ranges, int64_t count) const {
  std::vector<int64_t> starts(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) starts[i + 1] = starts[i] + ranges[i].bytes;
  const auto part = [&](int64_t first, int64_t last) {
    int64_t i = std::upper_bound(starts.begin(), starts.end(), first) - starts.begin() - 1;
    for (; i < count && starts[i] < last; ++i) {
      const int64_t begin = std::max(first, starts[i]), end = std::min(last, starts[i + 1]);
      if (begin < end)
        memset(static_cast<char*>(ranges[i].data) + begin - starts[i], 0, end - begin);
    }
  };
  torch::stable::parallel_for(0, starts[count], 4 * kGrain, part);
}

}  // namespace
}  // namespace fusedtrain

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) {
  using namespace fusedtrain;
  using Ops = Activations<Cpu>;
  FT_POINTWISE(FT_IMPLEMENT_POINTWISE)
  FT_CHANNELWISE(FT_IMPLEMENT_CHANNELWISE)
  FT_IMPLEMENT_OPTIMIZERS(Cpu)
  FT_IMPLEMENT_BATCH_NORM(Cpu)
  FT_IMPLEMENT_FOLD(Cpu)
  FT_IMPLEMENT_CHAINS(Cpu)
  FT_IMPLEMENT_FEW_BIT(Cpu)
  FT_IMPLEMENT_IMAGES(Cpu)
  FT_IMPLEMENT_POOL(Cpu)
}
