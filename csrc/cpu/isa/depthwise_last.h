// Loops of depthwise.cpp where channels are innermost (channels_last): a register holds channels.
// The channels of a cache line are laid out together, so that all taps of a pixel lie side by side.
#pragma once

#include "depthwise.h"

FT_BEGIN_NAMESPACE

template <class Format>
struct DepthwiseLast {
  using S = typename Format::Stored;
  using T = typename Format::Number;
  using V = VectorOf<T>;
  static constexpr bool kPlain = sizeof(S) == sizeof(T);
  static constexpr int kLanes = V::kLanes;
  static constexpr int kUnit = kDepthwiseUnit;  // channels
  static constexpr int kRegisters = kUnit / kLanes;
  static constexpr int kPixels = 8 / kRegisters > 0 ? 8 / kRegisters : 1;

  const Depthwise& call;
  T *laid, *values, *weights;
  int64_t* offsets;
  const int64_t channel, lanes;  // the unit: `lanes` channels from `channel` on

  DepthwiseLast(const Depthwise& call, const DepthwiseRoom& room, void* scratch, int64_t channel,
                int64_t channels)
      : call(call), channel(channel), lanes(smaller<int64_t>(kUnit, channels - channel)) {
    T* next = static_cast<T*>(scratch);
    laid = next, next += room.laid;
    values = next, next += room.values;
    weights = next, next += room.weights + room.line;
    offsets = reinterpret_cast<int64_t*>(next);
  }

  // Lane l is channel `first + l by / of` of a tensor of so many channels.
  struct Lanes {
    int64_t channels, first, by, of;
  };
  Lanes neighbours(int64_t channels) const { return {channels, channel, 1, 1}; }

  FT_METHOD void load(const S* pixel, const Lanes& l, T* to) const {
    if (l.by == 1 && l.of == 1 && lanes == kUnit) {
      if constexpr (kPlain)
        for (int i = 0; i < kUnit; ++i) to[i] = pixel[l.first + i];
      else
        Format::template load<kUnit>(pixel + l.first, to);
      return;
    }
    alignas(64) S some[kUnit] = {};
    for (int64_t i = 0; i < lanes; ++i)
      some[i] = pixel[l.of == 1 ? l.first + i * l.by : (l.first + i) / l.of];
    if constexpr (kPlain)
      for (int i = 0; i < kUnit; ++i) to[i] = some[i];
    else
      Format::template load<kUnit>(some, to);
  }
  FT_METHOD void store(const typename V::Register* from, S* to) const {
    if (kPlain && lanes == kUnit) {
#pragma GCC unroll 8
      for (int v = 0; v < kRegisters; ++v) V::store(from[v], reinterpret_cast<T*>(to) + v * kLanes);
      return;
    }
    alignas(64) T wide[kUnit];
#pragma GCC unroll 8
    for (int v = 0; v < kRegisters; ++v) V::store(from[v], wide + v * kLanes);
    if constexpr (kPlain) {
      for (int64_t i = 0; i < lanes; ++i) to[i] = wide[i];
    } else {
      if (lanes == kUnit) return Format::template store<kUnit>(wide, to);
      alignas(64) S some[kUnit];
      Format::template store<kUnit>(wide, some);
      for (int64_t i = 0; i < lanes; ++i) to[i] = some[i];
    }
  }

  // Rows and columns of a slice of height x width pixels, zeros outside.
  void lay(const S* slice, int64_t height, int64_t width, Span rows, Span columns, const Lanes& l,
           T* to) const {
    const int64_t left = smaller(columns.size, larger<int64_t>(-columns.first, 0));
    const int64_t right = larger(left, smaller(columns.size, width - columns.first));
    for (int64_t r = rows.first; r < rows.first + rows.size; ++r, to += columns.size * kUnit) {
      if (r < 0 || r >= height) {
        for (int64_t i = 0; i < columns.size * kUnit; ++i) to[i] = T(0);
        continue;
      }
      for (int64_t i = 0; i < left * kUnit; ++i) to[i] = T(0);
      const S* from = slice + (r * width + columns.first + left) * l.channels;
      for (int64_t q = left; q < right; ++q, from += l.channels) load(from, l, to + q * kUnit);
      for (int64_t i = right * kUnit; i < columns.size * kUnit; ++i) to[i] = T(0);
    }
  }

  // Output (r, c) is the sum of weights and laid[r row_step + c column_step + offset].
  struct Sums {
    const T* laid;
    int64_t row_step, column_step, taps, rows, columns;
    S* out;
    int64_t out_row, out_column;
    const T* start;  // null: zeros
  };
  template <int kCount>
  FT_METHOD void add_up(const Sums& sums, const T* from, S* to) const {
    typename V::Register total[kCount][kRegisters];
#pragma GCC unroll 8
    for (int p = 0; p < kCount; ++p)
#pragma GCC unroll 8
      for (int v = 0; v < kRegisters; ++v)
        total[p][v] = sums.start ? V::load(sums.start + v * kLanes) : V::all(T(0));
    const T* w = weights;
    for (int64_t t = 0; t < sums.taps; ++t, w += kUnit) {
      const T* const x = from + offsets[t];
#pragma GCC unroll 8
      for (int v = 0; v < kRegisters; ++v) {
        const auto weight = V::load(w + v * kLanes);
#pragma GCC unroll 8
        for (int p = 0; p < kCount; ++p)
          total[p][v] += weight * V::load(x + p * sums.column_step + v * kLanes);
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < kCount; ++p) store(total[p], to + p * sums.out_column);
  }
  void run(const Sums& sums) const {
    const T* from = sums.laid;
    S* to = sums.out;
    for (int64_t r = 0; r < sums.rows; ++r, from += sums.row_step, to += sums.out_row) {
      int64_t c = 0;
      if (sums.columns >= kPixels)
        for (; c < sums.columns; c += kPixels) {
          const int64_t at = smaller<int64_t>(c, sums.columns - kPixels);
          add_up<kPixels>(sums, from + at * sums.column_step, to + at * sums.out_column);
        }
      for (; c < sums.columns; ++c)
        add_up<1>(sums, from + c * sums.column_step, to + c * sums.out_column);
    }
  }

  // Weights of a tap as a register's lanes; those of lane l belong to output channel `first + l
  // by`.
  FT_METHOD void lay_weight(const S* weight, int64_t first, int64_t by, int64_t tap, T* to) const {
    alignas(64) S some[kUnit] = {};
    for (int64_t i = 0; i < lanes; ++i) some[i] = weight[(first + i * by) * call.taps() + tap];
    if constexpr (kPlain)
      for (int i = 0; i < kUnit; ++i) to[i] = some[i];
    else
      Format::template load<kUnit>(some, to);
  }

  // --- forward and weights: lanes are channels of outputs

  struct Inputs {
    Span rows, columns, slices;
    int64_t row, slice;
  };
  Inputs lay_inputs(const S* sample, int64_t depth, int64_t begin, int64_t end) {
    Inputs in = {inputs_of(call, 1, begin, end), inputs_of(call, 2, 0, call.out[2]), {0, 0}, 0, 0};
    in.row = in.columns.size * kUnit;
    in.slice = in.rows.size * in.row;
    const Lanes l = {call.channels, channel, 1, call.multiplier};
    for (int64_t k = 0; k < call.kernel[0]; ++k) {
      const int64_t at = depth * call.stride[0] - call.pad[0] + k * call.dilation[0];
      if (at < 0 || at >= call.in[0]) continue;
      if (in.slices.size == 0) in.slices.first = k;
      lay(sample + at * call.in[1] * call.in[2] * call.channels, call.in[1], call.in[2], in.rows,
          in.columns, l, laid + in.slices.size++ * in.slice);
    }
    return in;
  }

  void forward(const S* sample, const S* weight, const S* bias, S* y, int64_t depth, int64_t begin,
               int64_t end) {
    const Inputs in = lay_inputs(sample, depth, begin, end);
    const int64_t kernel_h = call.kernel[1], kernel_w = call.kernel[2], all = call.out_channels();
    alignas(64) T start[kUnit];
    if (bias) load(bias, neighbours(all), start);
    Sums sums = {};
    for (int64_t s = 0; s < in.slices.size; ++s)
      for (int64_t h = 0; h < kernel_h; ++h)
        for (int64_t k = 0; k < kernel_w; ++k) {
          const int64_t t = sums.taps++;
          offsets[t] = s * in.slice + h * call.dilation[1] * in.row + k * call.dilation[2] * kUnit;
          lay_weight(weight, channel, 1, ((in.slices.first + s) * kernel_h + h) * kernel_w + k,
                     weights + t * kUnit);
        }
    sums.laid = laid;
    sums.row_step = call.stride[1] * in.row;
    sums.column_step = call.stride[2] * kUnit;
    sums.rows = end - begin;
    sums.columns = call.out[2];
    sums.out_column = all;
    sums.out_row = call.out[2] * all;
    sums.out = y + (depth * call.out[1] + begin) * sums.out_row + channel;
    sums.start = bias ? start : nullptr;
    run(sums);
  }

  // --- the gradient of inputs: lanes are channels of inputs

  void grad_input(const S* grad, const S* weight, S* grad_input, int64_t depth, int64_t begin,
                  int64_t end) {
    const int64_t kernel_h = call.kernel[1], kernel_w = call.kernel[2];
    const int64_t multiplier = call.multiplier, all = call.out_channels();
    const Phase slices(call, 0, depth, depth + 1);
    const Span rows = outputs_of(call, 1, begin, end), columns = outputs_of(call, 2, 0, call.in[2]);
    const int64_t row = columns.size * kUnit, slice = rows.size * row;
    int64_t seen = 0;
    for (int64_t m = 0; m < multiplier; ++m)
      for (int64_t t = 0; t < slices.taps; ++t) {
        const int64_t at = slices.output + t * slices.output_step;
        if (at < 0 || at >= call.out[0]) continue;
        lay(grad + at * call.out[1] * call.out[2] * all, call.out[1], call.out[2], rows, columns,
            {all, channel * multiplier + m, multiplier, 1}, laid + seen++ * slice);
      }
    S* const to = grad_input + depth * call.in[1] * call.in[2] * call.channels + channel;
    for (int64_t i = begin; i < smaller(end, begin + call.stride[1]); ++i) {
      const Phase down(call, 1, i, end);
      for (int64_t j = 0; j < smaller(call.stride[2], call.in[2]); ++j) {
        const Phase across(call, 2, j, call.in[2]);
        Sums sums = {};
        int64_t s = 0;
        for (int64_t m = 0; m < multiplier; ++m)
          for (int64_t z = 0; z < slices.taps; ++z) {
            const int64_t at = slices.output + z * slices.output_step;
            if (at < 0 || at >= call.out[0]) continue;
            for (int64_t h = 0; h < down.taps; ++h)
              for (int64_t k = 0; k < across.taps; ++k) {
                const int64_t t = sums.taps++;
                offsets[t] = s * slice + (down.output + h * down.output_step - rows.first) * row +
                             (across.output + k * across.output_step - columns.first) * kUnit;
                const int64_t tap =
                    (slices.kernel_of(z) * kernel_h + down.kernel_of(h)) * kernel_w +
                    across.kernel_of(k);
                lay_weight(weight, channel * multiplier + m, multiplier, tap, weights + t * kUnit);
              }
            ++s;
          }
        sums.laid = laid;
        sums.row_step = row;
        sums.column_step = kUnit;
        sums.rows = down.count;
        sums.columns = across.count;
        sums.out = to + (i * call.in[2] + j) * call.channels;
        sums.out_row = call.stride[1] * call.in[2] * call.channels;
        sums.out_column = call.stride[2] * call.channels;
        run(sums);
      }
    }
  }

  // --- the gradient of weights: sums[register][tap][lane]

  void grad_weight(const S* grad, const S* sample, int64_t depth, int64_t begin, int64_t end,
                   T* sums) {
    const Inputs in = lay_inputs(sample, depth, begin, end);
    const int64_t taps = call.kernel[1] * call.kernel[2], all = call.out_channels();
    lay(grad + depth * call.out[1] * call.out[2] * all, call.out[1], call.out[2],
        {begin, end - begin}, {0, call.out[2]}, neighbours(all), values);
    for (int64_t k = 0; k < call.kernel[2]; ++k) offsets[k] = k * call.dilation[2] * kUnit;
    Products<T> p = {};
    p.row_step = call.stride[1] * in.row;
    p.tap_step = call.dilation[1] * in.row;
    p.x_step = call.stride[2] * kUnit;
    p.offsets = offsets;
    p.kernel_rows = call.kernel[1];
    p.kernel_columns = call.kernel[2];
    p.grad_row = call.out[2] * kUnit;
    p.grad_step = kUnit;
    p.rows = end - begin;
    p.steps = call.out[2];
    for (int64_t s = 0; s < in.slices.size; ++s)
      for (int v = 0; v < kRegisters; ++v) {
        p.x = laid + s * in.slice + v * kLanes;
        p.grad = values + v * kLanes;
        add_products(p, sums + (v * call.taps() + (in.slices.first + s) * taps) * kLanes);
      }
  }

  void add_up(const S* grad, T* sums) const {
    const Lanes l = neighbours(call.out_channels());
    alignas(64) T some[kUnit];
    for (int64_t i = 0; i < call.outputs(); ++i, grad += call.out_channels()) {
      load(grad, l, some);
      for (int lane = 0; lane < kUnit; ++lane) sums[lane] += some[lane];
    }
  }
};

FT_END_NAMESPACE
