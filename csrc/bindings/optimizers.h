// The optimizer ops, the same for every backend: lists of tensors -> OptimizerCall of
// ops/optimizers.h.
//
// A backend supplies on_device(), measure(), try_update() and step() of a call, update_scale() and
// zero().
#pragma once

#include <optional>
#include <vector>

#include "../optimizer_rules.h"
#include "../ops/optimizers.h"
#include "../state_codes.h"
#include "checks.h"

namespace fusedtrain {
namespace {

#define FT_RULE_STATES(name, Rule, least, most) most,
constexpr int kStatesOf[] = {FT_RULES(FT_RULE_STATES)};
#undef FT_RULE_STATES
#define FT_RULE_LEAST(name, Rule, least, most) least,
constexpr int kLeastStatesOf[] = {FT_RULES(FT_RULE_LEAST)};
#undef FT_RULE_LEAST

using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

// A tensor that kernels can walk, and the one it stands for.
struct Shadow {
  Tensor original, dense;
};

template <class Backend>
struct OptimizerOps {
  struct Arguments {
    OptimizerCall call = {};
    Tensor device;  // a tensor of the device that all are on
    std::vector<OptimizerTensor> tensors;
    std::vector<const void*> lrs;
    std::vector<Dtype> lr_dtypes;
    Tensors kept;  // dense copies
    std::vector<Shadow> written;

    // Columns of `rows`: group, column of `scalars`, index of each state, of the master, of the
    // average; -1 where there is none.
    static constexpr int kColumns = 2 + kMaxStates + 2;

    Arguments(int64_t rule, const Tensors& params, const Tensors& grads, const Tensors& states,
              const Tensors& masters, const Tensors& averages, const Tensors& lr_tensors,
              const Tensor& scalars, const Tensor& control, const Tensor& table, const Tensor& rows,
              const MaybeTensor& scale, const MaybeTensor& found_inf, bool writes)
        : device(scalars) {
      STD_TORCH_CHECK(rule >= 0 && rule < kRules, "fusedtrain: no such rule");
      call.rule = static_cast<int>(rule);
      call.count = static_cast<int64_t>(params.size());
      STD_TORCH_CHECK(params.size() == grads.size(), "fusedtrain: as many grads as params");
      check_table(table, rows);
      check_vector(scalars, torch::headeronly::ScalarType::Float, "scalars");
      check_vector(control, torch::headeronly::ScalarType::Float, "control");
      STD_TORCH_CHECK(control.numel() == kControls, "fusedtrain: control");
      call.scalar_count = scalars.numel() / kTensorScalars;
      call.scalars = static_cast<float*>(update_data(scalars));
      call.control = static_cast<float*>(update_data(control));
      call.scale = scalar_of(scale, "scale");
      call.found_inf = scalar_of(found_inf, "found_inf");
      for (const Tensor& lr : lr_tensors) {
        check_device(lr, "lr");
        lr_dtypes.push_back(dtype_of(lr, "optimizer_step", "lr"));
        STD_TORCH_CHECK(lr.numel() == 1 && (lr_dtypes.back() == Dtype::kFloat32 ||
                                            lr_dtypes.back() == Dtype::kFloat64),
                        "fusedtrain: lr must be one float32 or float64 number");
        lrs.push_back(read_data(lr));
      }
      call.lrs = lrs.data();
      call.lr_dtypes = lr_dtypes.data();
      for (int64_t g = 0; g < call.group_count; ++g)
        STD_TORCH_CHECK(call.groups[g].lr_index < double(lrs.size()), "fusedtrain: lr_index");

      const int64_t* row = static_cast<const int64_t*>(rows.const_data_ptr());
      const bool writes_grads = writes && call.options->write_back != 0;
      call.states = kLeastStatesOf[call.rule];
      tensors.resize(params.size());
      for (size_t i = 0; i < params.size(); ++i, row += kColumns) {
        OptimizerTensor& t = tensors[i];
        check_device(params[i], "param");
        check_device(grads[i], "grad");
        STD_TORCH_CHECK(same_sizes(params[i], grads[i]),
                        "fusedtrain: a gradient must have the shape of its parameter");
        const Tensor param = walkable(params[i], params[i], writes);
        t.param = writes ? update_data(param) : const_cast<void*>(read_data(param));
        t.param_dtype = dtype_of(param, "optimizer_step", "param");
        const Tensor grad = walkable(grads[i], param, writes_grads);
        t.grad = writes_grads ? update_data(grad) : const_cast<void*>(read_data(grad));
        t.grad_dtype = dtype_of(grad, "optimizer_step", "grad");
        t.numel = param.numel();
        units_of(param, t);
        t.group = static_cast<int>(at_most(row[0], call.group_count, "group"));
        t.scalar = static_cast<int>(at_most(row[1], call.scalar_count, "scalars"));
        for (int k = 0; k < kMaxStates; ++k) {
          const int64_t index = row[2 + k];
          STD_TORCH_CHECK(index < 0 || k < kStatesOf[call.rule], "fusedtrain: too many states");
          set_state(states, index, param, t, k, writes);
          if (index >= 0 && k + 1 > call.states) call.states = k + 1;
        }
        set_master(masters, row[2 + kMaxStates], param, t, writes);
        t.average =
            companion(averages, row[3 + kMaxStates], param, "average", t.average_dtype, writes);
      }
      call.tensors = tensors.data();
    }

    // Results of dense copies go where they belong.
    void write_back() {
      for (Shadow& shadow : written) torch::stable::copy_(shadow.original, shadow.dense);
    }

   private:
    void check_device(const Tensor& t, const char* what) const {
      STD_TORCH_CHECK(Backend::on_device(t) && same_device(t, device), "fusedtrain: every ", what,
                      " of a call must be on one device");
    }

    void check_vector(const Tensor& t, torch::headeronly::ScalarType dtype, const char* what) {
      check_device(t, what);
      STD_TORCH_CHECK(t.scalar_type() == dtype && t.is_contiguous(), "fusedtrain: ", what);
    }

    const float* scalar_of(const MaybeTensor& t, const char* what) {
      if (!t.has_value()) return nullptr;
      check_vector(*t, torch::headeronly::ScalarType::Float, what);
      STD_TORCH_CHECK(t->numel() == 1, "fusedtrain: ", what);
      return static_cast<const float*>(read_data(*t));
    }

    void check_table(const Tensor& table, const Tensor& rows) {
      STD_TORCH_CHECK(table.is_cpu() && table.is_contiguous() &&
                          table.scalar_type() == torch::headeronly::ScalarType::Double &&
                          table.numel() * sizeof(double) % sizeof(OptionGroup) == 0 &&
                          table.numel() > 0,
                      "fusedtrain: table");
      STD_TORCH_CHECK(rows.is_cpu() && rows.is_contiguous() &&
                          rows.scalar_type() == torch::headeronly::ScalarType::Long &&
                          rows.numel() == call.count * kColumns,
                      "fusedtrain: rows");
      call.options = static_cast<const StepOptions*>(table.const_data_ptr());
      call.groups = reinterpret_cast<const OptionGroup*>(call.options + 1);
      call.group_count = table.numel() * sizeof(double) / sizeof(OptionGroup) - 1;
    }

    static int64_t at_most(int64_t index, int64_t count, const char* what) {
      STD_TORCH_CHECK(index >= 0 && index < count, "fusedtrain: index of ", what);
      return index;
    }

    // `t`, or a copy of it that is dense and laid out like `model`.
    Tensor walkable(const Tensor& t, const Tensor& model, bool writes) {
      if (is_dense(t) && same_layout(t, model)) return t;
      Tensor copy = new_like(model, t.scalar_type());
      torch::stable::copy_(copy, t);
      if (writes) written.push_back({t, copy});
      kept.push_back(copy);
      return copy;
    }

    const Tensor& listed(const Tensors& list, int64_t index, const Tensor& param,
                         const char* what) const {
      const Tensor& t = list[at_most(index, static_cast<int64_t>(list.size()), what)];
      check_device(t, what);
      STD_TORCH_CHECK(same_sizes(t, param) && is_dense(t) && same_layout(t, param),
                      "fusedtrain: ", what, " and parameter must have the same shape and strides");
      return t;
    }

    void* companion(const Tensors& list, int64_t index, const Tensor& param, const char* what,
                    Dtype& dtype, bool writes) {
      if (index < 0) return nullptr;
      const Tensor& t = listed(list, index, param, what);
      dtype = dtype_of(t, "optimizer_step", what);
      return writes ? update_data(t) : const_cast<void*>(read_data(t));
    }

    // Floats, or codes with their scales behind them in the list.
    void set_state(const Tensors& states, int64_t index, const Tensor& param, OptimizerTensor& t,
                   int k, bool writes) {
      using torch::headeronly::ScalarType;
      if (index < 0) return;
      const Tensor& state = listed(states, index, param, "state");
      const ScalarType type = state.scalar_type();
      if (type != ScalarType::Char && type != ScalarType::Byte) {
        t.state_dtype[k] = dtype_of(state, "optimizer_step", "state");
      } else {
        STD_TORCH_CHECK(t.param_dtype != Dtype::kFloat64,
                        "fusedtrain: states of float64 parameters cannot be codes");
        const Tensor& scales =
            states[at_most(index + 1, static_cast<int64_t>(states.size()), "scales")];
        check_vector(scales, ScalarType::Float, "scales");
        STD_TORCH_CHECK(scales.numel() == (t.numel + formulas::kGroup - 1) / formulas::kGroup,
                        "fusedtrain: codes have a scale for each group of 32");
        t.state_dtype[k] = Dtype::kFloat32;
        t.squares[k] = type == ScalarType::Byte;
        t.scales[k] = static_cast<float*>(writes ? update_data(scales)
                                                 : const_cast<void*>(read_data(scales)));
      }
      t.state[k] = writes ? update_data(state) : const_cast<void*>(read_data(state));
    }

    // Float32 weights, or corrections of a 16-bit parameter.
    void set_master(const Tensors& masters, int64_t index, const Tensor& param, OptimizerTensor& t,
                    bool writes) {
      using torch::headeronly::ScalarType;
      if (index < 0) return;
      const Tensor& master = listed(masters, index, param, "master");
      const ScalarType type = master.scalar_type();
      t.correction_bits = type == ScalarType::Short ? 16 : (type == ScalarType::Char ? 8 : 0);
      if (t.correction_bits != 0) {
        STD_TORCH_CHECK(t.param_dtype == Dtype::kFloat16 || t.param_dtype == Dtype::kBFloat16,
                        "fusedtrain: only 16-bit parameters have corrections");
      } else {
        STD_TORCH_CHECK(type == ScalarType::Float && t.param_dtype != Dtype::kFloat64,
                        "fusedtrain: master weights are float32, or corrections of int16 or int8");
      }
      t.follows = call.options->masters_follow != 0 && t.correction_bits == 0 &&
                  (t.param_dtype == Dtype::kFloat16 || t.param_dtype == Dtype::kBFloat16);
      t.master = writes ? update_data(master) : const_cast<void*>(read_data(master));
    }

    // A unit is one index of the first dimension: an output channel of a convolution, a neuron.
    static void units_of(const Tensor& param, OptimizerTensor& t) {
      t.units = 1;
      t.inner = t.numel;
      if (param.sizes().size() < 2 || t.numel == 0 || param.sizes()[0] == 1) return;
      t.units = param.sizes()[0];
      t.inner = param.strides()[0];
    }
  };

  // The backend writes every element: no launch to fill them.
  static Tensor new_sums(const Tensor& scalars, int64_t count, int width) {
    return new_contiguous(scalars, {count, width}, torch::headeronly::ScalarType::Double);
  }
  // Sums of another call do not tell what the units of its tensors are clipped by.
  static void check_sums(const Arguments& a) {
    STD_TORCH_CHECK(a.call.options->unit_factor == 0,
                    "fusedtrain: units are clipped by what their own call measures");
  }
  // Sums of an earlier call, which are read.
  static double* sums_of(const Tensor& sums, const Arguments& a, int width) {
    STD_TORCH_CHECK(sums.scalar_type() == torch::headeronly::ScalarType::Double &&
                        sums.is_contiguous() && sums.numel() == a.call.count * width &&
                        Backend::on_device(sums) && same_device(sums, a.device),
                    "fusedtrain: sums: of another shape, dtype or device than this call's");
    return const_cast<double*>(static_cast<const double*>(read_data(sums)));
  }

#define FT_OPTIMIZER_ARGUMENTS                                                                    \
  int64_t rule, Tensors params, Tensors grads, Tensors states, Tensors masters, Tensors averages, \
      Tensors lrs, Tensor scalars, Tensor control, Tensor table, Tensor rows, MaybeTensor scale,  \
      MaybeTensor found_inf
#define FT_OPTIMIZER_CALL                                                                    \
  rule, params, grads, states, masters, averages, lrs, scalars, control, table, rows, scale, \
      found_inf

  // Per tensor: number of non-finite gradients, sum of their squares, sum of squares of the
  // parameter.
  static Tensor measure(FT_OPTIMIZER_ARGUMENTS) {
    Arguments a(FT_OPTIMIZER_CALL, false);
    Tensor sums = new_sums(scalars, a.call.count, kTensorSums);
    if (a.call.count == 0) return sums;
    a.call.sums = static_cast<double*>(write_data(sums));
    Backend(scalars).measure(a.call);
    return sums;
  }

  // Per tensor the sums over a trial of the update.
  static Tensor try_update(FT_OPTIMIZER_ARGUMENTS, Tensor sums) {
    Arguments a(FT_OPTIMIZER_CALL, false);
    check_sums(a);
    Tensor trial_sums = new_sums(scalars, a.call.count, kTrialSums);
    if (a.call.count == 0) return trial_sums;
    a.call.sums = sums_of(sums, a, kTensorSums);
    a.call.trial_sums = static_cast<double*>(write_data(trial_sums));
    Backend(scalars).try_update(a.call);
    return trial_sums;
  }

  // The step; `sums` and `trial_sums` are measured here where they are not given. Returns sums,
  // which are 0 where nothing is measured.
  static Tensor step(FT_OPTIMIZER_ARGUMENTS, MaybeTensor sums, MaybeTensor trial_sums) {
    Arguments a(FT_OPTIMIZER_CALL, true);
    // A copy, since an op must not return its argument.
    Tensor measured = sums.has_value() ? torch::stable::clone(*sums)
                                       : new_sums(scalars, a.call.count, kTensorSums);
    if (sums.has_value()) check_sums(a);
    if (a.call.count == 0) return measured;
    Tensor tried = new_sums(scalars, a.call.options->trial != 0 ? a.call.count : 0, kTrialSums);
    a.call.sums = sums.has_value() ? sums_of(*sums, a, kTensorSums)
                                   : static_cast<double*>(write_data(measured));
    a.call.trial_sums = trial_sums.has_value() ? sums_of(*trial_sums, a, kTrialSums)
                                               : static_cast<double*>(write_data(tried));
    Backend(scalars).step(a.call, !sums.has_value(), !trial_sums.has_value());
    a.write_back();
    return measured;
  }

  static void update_scale(Tensor scale, Tensor growth_tracker, Tensor hysteresis_tracker,
                           Tensor found_inf, double growth_factor, double backoff_factor,
                           int64_t growth_interval, int64_t hysteresis, double min_scale,
                           double max_scale) {
    using torch::headeronly::ScalarType;
    const auto one = [&](const Tensor& t, ScalarType dtype, const char* what) {
      STD_TORCH_CHECK(t.numel() == 1 && t.scalar_type() == dtype && Backend::on_device(t) &&
                          same_device(t, scale),
                      "fusedtrain::update_scale: ", what);
      return update_data(t);
    };
    const ScaleUpdate update{
        static_cast<float*>(one(scale, ScalarType::Float, "scale")),
        static_cast<int32_t*>(one(growth_tracker, ScalarType::Int, "growth_tracker")),
        static_cast<int32_t*>(one(hysteresis_tracker, ScalarType::Int, "hysteresis_tracker")),
        static_cast<const float*>(one(found_inf, ScalarType::Float, "found_inf")),
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        min_scale,
        max_scale};
    Backend(scale).update_scale(update);
  }

  static void zero(Tensors tensors) {
    std::vector<ZeroRange> ranges;
    for (const Tensor& t : tensors)
      STD_TORCH_CHECK(Backend::on_device(t) && same_device(t, tensors[0]),
                      "fusedtrain::zero_tensors: all tensors must be on one device");
    for (Tensor& t : tensors) {
      if (is_dense(t))
        ranges.push_back({write_data(t), t.numel() * static_cast<int64_t>(t.element_size())});
      else
        torch::stable::zero_(t);
    }
    if (!ranges.empty())
      Backend(tensors[0]).zero(ranges.data(), static_cast<int64_t>(ranges.size()));
  }
};

FT_REGISTER(m) {
  m.impl("measure_gradients", TORCH_BOX(&OptimizerOps<Backend>::measure));
  m.impl("try_update", TORCH_BOX(&OptimizerOps<Backend>::try_update));
  m.impl("optimizer_step", TORCH_BOX(&OptimizerOps<Backend>::step));
  m.impl("update_scale", TORCH_BOX(&OptimizerOps<Backend>::update_scale));
  m.impl("zero_tensors", TORCH_BOX(&OptimizerOps<Backend>::zero));
}

}  // namespace
}  // namespace fusedtrain
