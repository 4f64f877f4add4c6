// The optimizer step over all tensors of a call: which launches, and what they are told.
//
// Four launches a step, whatever the number of groups: a sweep over gradients, sums by tensor, the
// coefficients, and the update; a trial of the update makes three more. What the host knows of the
// tensors travels as arguments, so that a CUDA graph keeps it; where there are more tensors than an
// argument holds, a part is launched again. The four launches of ResNet-50's step carry 40 KB.
#include "optimizer_measure.cuh"
#include "optimizer_tail.cuh"

#include <vector>

namespace fusedtrain {
namespace cuda {
namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// How a call is cut: prefix sums over its tensors.
struct Plan {
  const OptimizerCall& call;
  bool by_unit;
  bool coded = false;    // a tensor has a state in codes
  bool doubles = false;  // a tensor is computed in double
  std::vector<int64_t> chunks, unit_chunks, units;

  // Units are clipped by what the call itself measures.
  Plan(const OptimizerCall& call, bool measures)
      : call(call),
        by_unit(measures && call.options->measures != 0 && call.options->unit_factor != 0),
        chunks(call.count + 1),
        unit_chunks(call.count + 1),
        units(call.count + 1) {
    for (int64_t i = 0; i < call.count; ++i) {
      const OptimizerTensor& t = call.tensors[i];
      doubles |= t.param_dtype == Dtype::kFloat64;
      for (const float* scales : t.scales) coded |= scales != nullptr;
      const int64_t some = by_unit && t.numel > 0 ? t.units : 0;
      chunks[i + 1] = chunks[i] + ceil_div(t.numel, kChunk);
      unit_chunks[i + 1] =
          unit_chunks[i] + (some > 0 ? ceil_div(some, units_of_chunk(t.numel, some)) : 0);
      units[i + 1] = units[i] + some;
    }
    if (units.back() > UINT32_MAX || chunks.back() > INT32_MAX)
      throw std::runtime_error("fusedtrain: too many units or elements in one optimizer step");
  }

  const std::vector<int64_t>& measured_chunks() const { return by_unit ? unit_chunks : chunks; }
};

// Where everything lies in the workspace.
struct Workspace {
  Verdict* verdict;
  Coefficients* coefficients;
  double* moments;
  double* clipped;
  double* factors;
  double* partials;
  int64_t doubles;

  Workspace(const Plan& plan, double* start) : doubles(0) {
    const int64_t count = plan.call.count;
    const auto take = [&](int64_t n) {
      double* const place = start + doubles;
      doubles += n;
      return place;
    };
    verdict = reinterpret_cast<Verdict*>(take(sizeof(Verdict) / sizeof(double)));
    coefficients =
        // equal (times two): the workspace only gets larger
        reinterpret_cast<Coefficients*>(take(count * sizeof(Coefficients) / sizeof(double)));
    moments = take(count);  // two floats each
    clipped = plan.by_unit ? take(count) : nullptr;
    factors = plan.by_unit ? take(plan.units.back()) : nullptr;
    const int64_t chunks = plan.chunks.back(), unit_chunks = plan.unit_chunks.back();
    partials = take((chunks > unit_chunks ? chunks : unit_chunks) * kPartials);
  }
};

bool aligned(const void* data, Dtype dtype) {
  // equal (times two): the speed alone changes
  return dtype != Dtype::kFloat64 && reinterpret_cast<uintptr_t>(data) % (4 * bytes_of(dtype)) == 0;
}

void fill(SweptTensor& s, const OptimizerTensor& t, int64_t first_unit, int64_t first_chunk) {
  s = {};
  s.param = t.param;
  s.grad = t.grad;
  s.master = t.master;
  s.average = t.average;
  s.numel = t.numel;
  s.inner = t.inner;
  s.units = static_cast<uint32_t>(t.units);
  s.first_unit = static_cast<uint32_t>(first_unit);
  s.first_chunk = static_cast<uint32_t>(first_chunk);
  const int bytes = t.correction_bits / 8;
  s.wide = bytes == 0 ? aligned(t.master, Dtype::kFloat32)
                      : reinterpret_cast<uintptr_t>(t.master) % (4 * bytes) == 0;
  s.dtypes = static_cast<uint16_t>((t.follows ? kFollows : bytes) << (2 * kCorrection));
  const auto add = [&](int buffer, const void* data, Dtype dtype) {
    if (data == nullptr) return;
    s.dtypes |= static_cast<uint16_t>(static_cast<int>(dtype) << (2 * buffer));
    s.wide = s.wide && aligned(data, dtype);
  };
  add(kParam, t.param, t.param_dtype);
  add(kGrad, t.grad, t.grad_dtype);
  for (int k = 0; k < kMaxStates; ++k) {  // equal (<= for <): an overrun that AddressSanitizer sees
    s.state[k] = t.state[k];
    if (t.scales[k] == nullptr) {
      add(kState + k, t.state[k], t.state_dtype[k]);
    } else {
      s.squares |= static_cast<uint8_t>(t.squares[k] << k);
      s.wide = s.wide && reinterpret_cast<uintptr_t>(t.state[k]) % 4 == 0;
    }
  }
  add(kAverage, t.average, t.average_dtype);
}
void fill(CodedTensor& s, const OptimizerTensor& t, int64_t first_unit, int64_t first_chunk) {
  fill(static_cast<SweptTensor&>(s), t, first_unit, first_chunk);
  for (int k = 0; k < kMaxStates; ++k) s.scales[k] = t.scales[k];
}

class Step {
 public:
  Step(const OptimizerCall& call, bool measures, double* workspace, void* stream)
      : call_(call), plan_(call, measures), work_(plan_, workspace), stream_(stream) {}

  void measure() {
    sweep<FewSwept, ManySwept>(
        plan_.measured_chunks(), false, [&](const auto& argument, bool in_double, int64_t blocks) {
          using Table = std::decay_t<decltype(argument)>;
          const auto kernel =
              plan_.by_unit
                  ? (in_double ? &measure_units_kernel<double, Table>
                               : &measure_units_kernel<float, Table>)
                  : (in_double ? &measure_kernel<double, Table> : &measure_kernel<float, Table>);
          launch(kernel, blocks, kSweepThreads, stream_, 0, argument);
        });
    add(plan_.measured_chunks(), call_.sums, work_.clipped, nullptr);
  }

  // `unmeasured`: sums that nobody has measured, which become 0; or null.
  void prepare(bool commits, double* unmeasured) { tail(true, commits, unmeasured); }

  void try_update() {
    sweep_parameters(
        false,
        [&](const auto& argument, bool in_double, int64_t blocks) {
          launch_trial(argument, call_.states, in_double, blocks, stream_);
        },
        [&](const auto& argument, int64_t blocks) {
          launch_coded_trial(argument, call_.states, blocks, stream_);
        });
    add(plan_.chunks, call_.trial_sums, nullptr, work_.verdict);
  }

  void finish() { tail(false, true, nullptr); }

  void update() {
    sweep_parameters(
        true,
        [&](const auto& argument, bool in_double, int64_t blocks) {
          launch_update(argument, call_.states, in_double, blocks, stream_);
        },
        [&](const auto& argument, int64_t blocks) {
          launch_coded_update(argument, call_.states, blocks, stream_);
        });
  }

 private:
  // Calls plain(argument, in double?, blocks) and coded(argument, blocks) for the launches of a
  // sweep over parameters: where a state is in codes, all that are not float64 have tables with
  // scales.
  template <class Plain, class Coded>
  void sweep_parameters(bool backwards, const Plain& plain, const Coded& coded) const {
    if (!plan_.coded) return sweep<FewSwept, ManySwept>(plan_.chunks, backwards, plain);
    sweep_by<CodedSwept>(plan_.chunks, backwards,
                         [&](const auto& argument, bool in_double, int64_t blocks) {
                           if (!in_double) coded(argument, blocks);
                         });
    if (!plan_.doubles) return;
    sweep<FewSwept, ManySwept>(plan_.chunks, backwards,
                               [&](const auto& argument, bool in_double, int64_t blocks) {
                                 if (in_double) plain(argument, in_double, blocks);
                               });
  }

  template <class Few, class Many, class F>
  void sweep(const std::vector<int64_t>& chunks, bool backwards, const F& f) const {
    if (call_.count <= Few::kTensors)
      sweep_by<Few>(chunks, backwards, f);
    else
      sweep_by<Many>(chunks, backwards, f);
  }

  // Calls f(argument, in double?, blocks) for the launches of a sweep.
  template <class Table, class F>
  void sweep_by(const std::vector<int64_t>& chunks, bool backwards, const F& f) const {
    const StepOptions& options = *call_.options;
    Table s;
    s.verdict = work_.verdict;
    s.factors = work_.factors;
    s.scale = call_.scale;
    s.unit_factor = options.unit_factor;
    s.unit_eps = options.unit_eps;
    s.average_weight = options.average_weight;
    s.seed = formulas::whole_seed(options);
    s.rule = call_.rule;
    s.measures = static_cast<int>(options.measures);
    s.write_back = static_cast<int>(options.write_back);
    s.stochastic = options.stochastic != 0;
    const int64_t launches = ceil_div(call_.count, Table::kTensors);
    for (int64_t i = 0; i < launches; ++i) {
      const int64_t first = (backwards ? launches - 1 - i : i) * Table::kTensors;
      s.count = static_cast<int>(smaller(call_.count - first, Table::kTensors));
      const int64_t blocks = chunks[first + s.count] - chunks[first];
      if (blocks == 0) continue;
      s.coefficients = work_.coefficients + first;
      s.partials = work_.partials + chunks[first] * kPartials;
      bool any[2] = {};
      for (int j = 0; j < s.count; ++j) {
        const OptimizerTensor& t = call_.tensors[first + j];
        fill(s.tensors[j], t, plan_.units[first + j], chunks[first + j] - chunks[first]);
        any[in_double(s.tensors[j])] |= t.numel > 0;
      }
      for (const bool doubles : {false, true})
        if (any[doubles]) f(s, doubles, blocks);
    }
  }

  void add(const std::vector<int64_t>& chunks, double* sums, double* clipped,
           const Verdict* verdict) const {
    AddArgument a;
    a.verdict = verdict;
    for (int64_t first = 0; first < call_.count; first += kAddedTensors) {
      const int64_t count = smaller(call_.count - first, kAddedTensors);
      a.partials = work_.partials + chunks[first] * kPartials;
      a.sums = sums + first * kTensorSums;
      a.clipped = clipped == nullptr ? nullptr : clipped + first;
      for (int64_t i = 0; i <= count; ++i)
        a.first_chunk[i] = static_cast<uint32_t>(chunks[first + i] - chunks[first]);
      launch(&add_kernel, count, kSweepThreads, stream_, 0, a);
    }
  }

  TailGroup tail_group(const OptionGroup& group) const {
    const int64_t i = static_cast<int64_t>(group.lr_index);
    if (i < 0) return {group, nullptr, false};
    return {group, call_.lrs[i], call_.lr_dtypes[i] == Dtype::kFloat64};
  }

  void tail(bool prepares, bool commits, double* unmeasured) const {
    if (call_.count <= FewTails::kTensors && call_.group_count <= FewTails::kGroups)
      tail<FewTails>(prepares, commits, unmeasured);
    else
      tail<ManyTails>(prepares, commits, unmeasured);
  }

  // Launches over as many tensors as an argument holds, with their groups.
  template <class Table>
  void tail(bool prepares, bool commits, double* unmeasured) const {
    const auto kernel = prepares ? &prepare_kernel<Table> : &finish_kernel<Table>;
    Table a;
    a.options = *call_.options;
    a.verdict = work_.verdict;
    a.all_sums = call_.sums;
    a.all = call_.count;
    a.scalars = call_.scalars;
    a.scalar_count = call_.scalar_count;
    a.control = call_.control;
    a.scale = call_.scale;
    a.found_inf = call_.found_inf;
    a.rule = call_.rule;
    a.commits = commits;
    std::vector<int> place(call_.group_count, -1);  // of a group in the argument
    for (int64_t first = 0; first < call_.count; first += a.count) {
      int groups = 0;
      for (a.count = 0; a.count < smaller(Table::kTensors, call_.count - first); ++a.count) {
        const OptimizerTensor& t = call_.tensors[first + a.count];
        int& group = place[t.group];
        if (group < 0) {
          if (groups == Table::kGroups) break;
          group = groups++;
          a.groups[group] = tail_group(call_.groups[t.group]);
        }
        const bool stochastic = a.options.stochastic != 0 && formulas::rounds_stochastically(t);
        a.tensors[a.count] = {t.numel, t.scalar, static_cast<uint16_t>(group), stochastic};
      }
      a.first = first == 0;
      a.coefficients = work_.coefficients + first;
      a.moments = reinterpret_cast<float*>(work_.moments + first);
      a.clipped = work_.clipped == nullptr ? nullptr : work_.clipped + first;
      a.sums = call_.sums + first * kTensorSums;
      a.unmeasured = unmeasured == nullptr ? nullptr : unmeasured + first * kTensorSums;
      a.trial_sums = prepares ? nullptr : call_.trial_sums + first * kTrialSums;
      launch(kernel, ceil_div(a.count, kTailThreads), kTailThreads, stream_, 0, a);
      place.assign(place.size(), -1);
    }
  }

  const OptimizerCall& call_;
  const Plan plan_;
  const Workspace work_;
  void* const stream_;
};

}  // namespace

int64_t optimizer_workspace(const OptimizerCall& call) {
  return Workspace(Plan(call, true), nullptr).doubles;
}

void measure(const OptimizerCall& call, double* workspace, void* stream) {
  Step(call, true, workspace, stream).measure();
}

void try_update(const OptimizerCall& call, double* workspace, void* stream) {
  Step step(call, false, workspace, stream);
  step.prepare(false, nullptr);
  step.try_update();
}

void optimizer_step(const OptimizerCall& call, bool measures, bool tries, double* workspace,
                    void* stream) {
  Step step(call, measures, workspace, stream);
  const bool trial = call.options->trial != 0, unmeasured = call.options->measures == 0;
  if (measures && !unmeasured) step.measure();
  step.prepare(!trial, measures && unmeasured ? call.sums : nullptr);
  if (trial) {
    if (tries) step.try_update();
    step.finish();
  }
  step.update();
}

}  // namespace cuda
}  // namespace fusedtrain
