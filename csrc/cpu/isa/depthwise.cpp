// The tables of depthwise.h and depthwise_last.h: tasks, which cpu/depthwise.cpp cuts.
#include "depthwise_last.h"

#include "tables.h"

FT_BEGIN_NAMESPACE

template <class Format>
struct DepthwiseTasks {
  using S = typename Format::Stored;
  using T = typename Format::Number;
  using Planes = DepthwisePlanes<Format>;
  using Last = DepthwiseLast<Format>;
  static constexpr int kLanes = VectorOf<T>::kLanes;

  // Calls f(depth, begin, end) for all bands of `rows` rows.
  template <class F>
  static FT_METHOD void each_band(const int64_t* size, int64_t rows, const F& f) {
    for (int64_t depth = 0; depth < size[0]; ++depth)
      for (int64_t begin = 0; begin < size[1]; begin += rows)
        f(depth, begin, smaller(size[1], begin + rows));
  }

  // A task is a band of a plane, or of the channels of a unit.
  static void forward(const DepthwiseForward& call, const DepthwiseRoom& room,
                      const DepthwiseCut& cut, int64_t first, int64_t last, void* scratch) {
    const S *const x = static_cast<const S*>(call.x), *const w = static_cast<const S*>(call.weight);
    const S* const bias = static_cast<const S*>(call.bias);
    S* const y = static_cast<S*>(call.y);
    const int64_t bands = ceil_div(call.out[1], cut.rows_of_outputs);
    const int64_t all = call.out_channels();
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % bands * cut.rows_of_outputs;
      const int64_t end = smaller(call.out[1], begin + cut.rows_of_outputs);
      const int64_t slice = task / bands, depth = slice % call.out[0], part = slice / call.out[0];
      if (call.last) {
        const int64_t units = ceil_div(all, kDepthwiseUnit), sample = part / units;
        Last loops(call, room, scratch, part % units * kDepthwiseUnit, all);
        loops.forward(x + sample * call.inputs() * call.channels, w, bias,
                      y + sample * call.outputs() * all, depth, begin, end);
      } else {
        const int64_t channel = part % call.channels * call.multiplier;
        Planes loops(call, room, scratch);
        loops.forward(x + part * call.inputs(), w + channel * call.taps(),
                      bias ? bias + channel : nullptr, y + part * call.multiplier * call.outputs(),
                      depth, begin, end);
      }
    }
  }

  // A task is some channels of some samples, whose sums go to their place for this task.
  static void backward(const DepthwiseBackward& call, const DepthwiseRoom& room,
                       const DepthwiseCut& cut, int64_t first, int64_t last, void* scratch,
                       double* sums) {
    const int64_t groups = ceil_div(call.channels, cut.channels);
    T* const lanes = static_cast<T*>(scratch);
    void* const rest = lanes + cut.lanes;
    for (int64_t task = first; task < last; ++task) {
      const int64_t channel = task % groups * cut.channels;
      const int64_t channels = smaller(cut.channels, call.channels - channel);
      const int64_t sample = task / groups * cut.samples;
      const int64_t samples = smaller(cut.samples, call.samples - sample);
      const bool adds = call.grad_weight || call.grad_bias;
      if (adds)
        for (int64_t i = 0; i < cut.lanes; ++i) lanes[i] = T(0);
      for (int64_t n = sample; n < sample + samples; ++n) {
        if (call.last)
          last_of(call, room, cut, n, channel, channels, rest, lanes);
        else
          for (int64_t c = 0; c < channels; ++c)
            plane_of(call, room, cut, n, channel + c, rest,
                     lanes + c * call.multiplier * (call.taps() + 1) * kLanes);
      }
      if (adds) finish(call, cut, channels, lanes, sums + task * cut.sums);
    }
  }

  static void plane_of(const DepthwiseBackward& call, const DepthwiseRoom& room,
                       const DepthwiseCut& cut, int64_t sample, int64_t channel, void* scratch,
                       T* lanes) {
    const int64_t plane = sample * call.channels + channel, m = call.multiplier;
    const S* const g = static_cast<const S*>(call.grad) + plane * m * call.outputs();
    Planes loops(call, room, scratch);
    if (call.grad_input) {
      const S* const w = static_cast<const S*>(call.weight) + channel * m * call.taps();
      S* const gx = static_cast<S*>(call.grad_input) + plane * call.inputs();
      each_band(call.in, cut.rows_of_inputs, [&](int64_t depth, int64_t begin, int64_t end) {
        loops.grad_input(g, w, gx, depth, begin, end);
      });
    }
    if (call.grad_weight) {
      const S* const x = static_cast<const S*>(call.x) + plane * call.inputs();
      each_band(call.out, cut.rows_of_outputs, [&](int64_t depth, int64_t begin, int64_t end) {
        loops.grad_weight(g, x, depth, begin, end, lanes);
      });
    }
    if (call.grad_bias)
      for (int64_t k = 0; k < m; ++k)
        loops.add_up(g + k * call.outputs(), lanes + (m * call.taps() + k) * kLanes);
  }

  static void last_of(const DepthwiseBackward& call, const DepthwiseRoom& room,
                      const DepthwiseCut& cut, int64_t sample, int64_t channel, int64_t channels,
                      void* scratch, T* lanes) {
    const int64_t all = call.out_channels(), m = call.multiplier;
    const S* const g = static_cast<const S*>(call.grad) + sample * call.outputs() * all;
    if (call.grad_input) {
      const S* const w = static_cast<const S*>(call.weight);
      S* const gx = static_cast<S*>(call.grad_input) + sample * call.inputs() * call.channels;
      for (int64_t c = 0; c < channels; c += kDepthwiseUnit) {
        Last loops(call, room, scratch, channel + c, call.channels);
        each_band(call.in, cut.rows_of_inputs, [&](int64_t depth, int64_t begin, int64_t end) {
          loops.grad_input(g, w, gx, depth, begin, end);
        });
      }
    }
    if (!call.grad_weight && !call.grad_bias) return;
    const int64_t end_channel = (channel + channels) * m;
    for (int64_t c = channel * m; c < end_channel; c += kDepthwiseUnit) {
      Last loops(call, room, scratch, c, end_channel);
      T* const to = lanes + (c - channel * m) * (call.taps() + 1);
      if (call.grad_weight) {
        const S* const x = static_cast<const S*>(call.x) + sample * call.inputs() * call.channels;
        each_band(call.out, cut.rows_of_outputs, [&](int64_t depth, int64_t begin, int64_t end) {
          loops.grad_weight(g, x, depth, begin, end, to);
        });
      }
      if (call.grad_bias) loops.add_up(g, to + call.taps() * kDepthwiseUnit);
    }
  }

  // Sums of a task: [channels of outputs][taps], then one for each channel of outputs.
  static void finish(const DepthwiseBackward& call, const DepthwiseCut& cut, int64_t channels,
                     const T* lanes, double* sums) {
    const int64_t m = call.multiplier, taps = call.taps();
    double* const bias = sums + cut.channels * m * taps;
    if (call.last) {
      constexpr int kRegisters = kDepthwiseUnit / kLanes;
      for (int64_t c = 0; c < channels * m; ++c) {
        const int64_t unit = c / kDepthwiseUnit * kDepthwiseUnit, lane = c - unit;
        const T* const from = lanes + unit * (taps + 1);
        const T* const of_register = from + lane / kLanes * taps * kLanes + lane % kLanes;
        for (int64_t t = 0; t < taps; ++t) sums[c * taps + t] = of_register[t * kLanes];
        bias[c] = from[taps * kRegisters * kLanes + lane];
      }
      return;
    }
    const auto total = [](const T* from) {
      double sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) sum += from[lane];
      return sum;
    };
    for (int64_t c = 0; c < channels; ++c) {
      const T* const from = lanes + c * m * (taps + 1) * kLanes;
      for (int64_t t = 0; t < m * taps; ++t) sums[c * m * taps + t] = total(from + t * kLanes);
      for (int64_t k = 0; k < m; ++k) bias[c * m + k] = total(from + (m * taps + k) * kLanes);
    }
  }
};

FT_END_NAMESPACE

namespace fusedtrain {
namespace cpu {

template <class Format>
static constexpr TableOf<DepthwiseKernels, Format> depthwise_kernels() {
  using Tasks = FT_ISA::DepthwiseTasks<Format>;
  return {Tasks::forward, Tasks::backward, Tasks::kLanes};
}

constexpr ByDtype<DepthwiseKernels> tables::FT_ISA::depthwise = FT_BY_DTYPE(depthwise_kernels);

}  // namespace cpu
}  // namespace fusedtrain
