// Loops of depthwise.cpp: what both layouts share, and the loops over planes (contiguous).
//
// A band of rows is laid out in the first two levels of the cache, as numbers, with borders of
// zeros: then there are no edges, strides and 16-bit data are dealt with once an element, and all
// taps of the kernel read neighbours.
#pragma once

#include "../../ops/depthwise.h"
#include "depthwise_taps.h"

FT_BEGIN_NAMESPACE

using cpu::DepthwiseCut;
using cpu::DepthwiseRoom;
using cpu::kDepthwiseUnit;

// Inputs of one dimension from `first` on, `stride` apart: the outputs that see them. Tap t of the
// n taps is weight `kernel - t kernel_step` with output `output + t output_step` for the first of
// the inputs, one output further for each of the following.
struct Phase {
  int64_t first, count, taps = 0, kernel = 0, kernel_step, output = 0, output_step;

  FT_METHOD Phase(const Depthwise& call, int d, int64_t first, int64_t end) : first(first) {
    const int64_t stride = call.stride[d], dilation = call.dilation[d], u = first + call.pad[d];
    count = ceil_div(end - first, stride);
    int64_t a = stride, b = dilation;
    while (b) {
      const int64_t rest = a % b;
      a = b;
      b = rest;
    }
    kernel_step = stride / a;
    output_step = dilation / a;
    for (int64_t k = 0; k < call.kernel[d]; ++k) {
      if ((u - k * dilation) % stride != 0) continue;
      ++taps;
      kernel = k;
      output = (u - k * dilation) / stride;
    }
  }
  FT_METHOD int64_t kernel_of(int64_t tap) const { return kernel - tap * kernel_step; }
};

FT_INLINE int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// Inputs that the outputs [begin, end) of dimension d read, and outputs that read inputs of it.
struct Span {
  int64_t first, size;
};
FT_INLINE Span inputs_of(const Depthwise& call, int d, int64_t begin, int64_t end) {
  return {begin * call.stride[d] - call.pad[d],
          (end - 1 - begin) * call.stride[d] + (call.kernel[d] - 1) * call.dilation[d] + 1};
}
FT_INLINE Span outputs_of(const Depthwise& call, int d, int64_t begin, int64_t end) {
  const int64_t reach = (call.kernel[d] - 1) * call.dilation[d];
  const int64_t first = floor_div(begin + call.pad[d] - reach, call.stride[d]);
  return {first, floor_div(end - 1 + call.pad[d], call.stride[d]) - first + 1};
}

template <class Format>
struct DepthwisePlanes {
  using S = typename Format::Stored;
  using T = typename Format::Number;
  using V = VectorOf<T>;
  static constexpr bool kPlain = sizeof(S) == sizeof(T);
  static constexpr int kLanes = V::kLanes;

  const Depthwise& call;
  const DepthwiseRoom& room;
  T* laid;
  T* values;  // outputs that are not written where they are computed
  T* weights;
  T* line;  // of 16 bits as numbers
  int64_t* offsets;

  DepthwisePlanes(const Depthwise& call, const DepthwiseRoom& room, void* scratch)
      : call(call), room(room) {
    T* next = static_cast<T*>(scratch);
    laid = next, next += room.laid;
    values = next, next += room.values;
    weights = next, next += room.weights;
    line = next, next += room.line;
    offsets = reinterpret_cast<int64_t*>(next);
  }

  static FT_METHOD void widen(const S* from, T* to, int64_t n) {
    if constexpr (kPlain)
      for (int64_t i = 0; i < n; ++i) to[i] = from[i];
    else
      from_16bit<Format>(from, to, n);
  }
  static FT_METHOD void narrow(const T* from, S* to, int64_t n) {
    if constexpr (kPlain)
      for (int64_t i = 0; i < n; ++i) to[i] = from[i];
    else
      to_16bit<Format>(from, to, n);
  }

  // Rows [rows.first, ...) of a plane of height x width, and its columns from -left on, of which
  // those that are `phases` apart are neighbours.
  void lay(const S* plane, int64_t height, int64_t width, Span rows, int64_t left, int64_t phases,
           int64_t pitch, T* to) {
    for (int64_t r = 0; r < rows.size; ++r, to += phases * pitch) {
      const int64_t row = rows.first + r;
      const bool outside = row < 0 || row >= height;
      const S* const from = plane + row * width;
      if (phases == 1 && !outside) {
        const int64_t first = larger<int64_t>(left, 0), end = smaller(pitch, left + width);
        for (int64_t i = 0; i < smaller(first, pitch); ++i) to[i] = T(0);
        if (first < end) widen(from + first - left, to + first, end - first);
        for (int64_t i = larger(first, end); i < pitch; ++i) to[i] = T(0);
        continue;
      }
      for (int64_t i = 0; i < phases * pitch; ++i) to[i] = T(0);
      if (outside) continue;
      const T* x = numbers<Format>(from, width, line);
      for (int64_t phase = 0; phase < phases; ++phase) {
        // Column q = left + i of the laid row is number q / phases of phase q % phases.
        int64_t i = phase - left, t = 0;
        if (i < 0) t = ceil_div(-i, phases), i += t * phases;
        const int64_t n = smaller(pitch, t + ceil_div(larger<int64_t>(width - i, 0), phases));
        T* const line = to + phase * pitch;
        if (phases == 2)
          for (int64_t k = t; k < n; ++k) line[k] = x[i + 2 * (k - t)];
        else
          for (int64_t k = t; k < n; ++k) line[k] = x[i + phases * (k - t)];
      }
    }
  }

  // --- forward and weights: inputs that are a stride apart are neighbours

  int64_t input_pitch() const {
    return call.out[2] + (call.kernel[2] - 1) * call.dilation[2] / call.stride[2];
  }

  // Lays out what the outputs [begin, end) of slice `depth` read of a plane of inputs. Slices of
  // the kernel that see the border alone have no place; returns the first that sees inputs, and how
  // many do.
  Span lay_inputs(const S* x, int64_t depth, int64_t begin, int64_t end) {
    const Span rows = inputs_of(call, 1, begin, end);
    const int64_t slice = rows.size * call.stride[2] * input_pitch();
    Span seen = {0, 0};
    for (int64_t k = 0; k < call.kernel[0]; ++k) {
      const int64_t at = depth * call.stride[0] - call.pad[0] + k * call.dilation[0];
      if (at < 0 || at >= call.in[0]) continue;
      if (seen.size == 0) seen.first = k;
      lay(x + at * call.in[1] * call.in[2], call.in[1], call.in[2], rows, call.pad[2],
          call.stride[2], input_pitch(), laid + seen.size++ * slice);
    }
    return seen;
  }
  int64_t laid_row() const { return call.stride[2] * input_pitch(); }
  int64_t offset_of(int64_t column) const {
    const int64_t q = column * call.dilation[2];
    return q % call.stride[2] * input_pitch() + q / call.stride[2];
  }

  // Outputs [begin, end) of slice `depth` of all planes of outputs of an input channel.
  void forward(const S* x, const S* weight, const S* bias, S* y, int64_t depth, int64_t begin,
               int64_t end) {
    const Span seen = lay_inputs(x, depth, begin, end);
    const int64_t rows = inputs_of(call, 1, begin, end).size;
    const int64_t kernel_h = call.kernel[1], kernel_w = call.kernel[2];
    Correlation<T> c = {};
    c.laid = laid;
    c.row_step = call.stride[1] * laid_row();
    c.tap_step = call.dilation[1] * laid_row();
    c.offsets = offsets;
    c.weights = weights;
    c.tap_columns = seen.size * kernel_w;
    c.kernel_rows = kernel_h;
    c.rows = end - begin;
    c.columns = call.out[2];
    for (int64_t s = 0; s < seen.size; ++s)
      for (int64_t k = 0; k < kernel_w; ++k)
        offsets[s * kernel_w + k] = s * rows * laid_row() + offset_of(k);
    for (int64_t m = 0; m < call.multiplier; ++m) {
      widen(weight + m * call.taps(), line, call.taps());
      T* next = weights;
      for (int64_t s = 0; s < seen.size; ++s)
        for (int64_t k = 0; k < kernel_w; ++k)
          for (int64_t h = 0; h < kernel_h; ++h)
            *next++ = line[((seen.first + s) * kernel_h + h) * kernel_w + k];
      c.start = T(0);
      if (bias) widen(bias + m, &c.start, 1);
      S* const to = y + m * call.outputs() + (depth * call.out[1] + begin) * call.out[2];
      if constexpr (kPlain) {
        c.out = to;
        c.out_step = c.columns;
        correlate(c);
      } else {
        c.out = values;
        c.out_step = c.columns;
        correlate(c);
        narrow(values, to, c.rows * c.columns);
      }
    }
  }

  // --- the gradient of inputs: a correlation for each phase of rows and of columns

  // Inputs [begin, end) of slice `depth` of a plane.
  void grad_input(const S* grad, const S* weight, S* grad_input, int64_t depth, int64_t begin,
                  int64_t end) {
    const int64_t kernel_h = call.kernel[1], kernel_w = call.kernel[2];
    const Phase slices(call, 0, depth, depth + 1);
    const Span rows = outputs_of(call, 1, begin, end), columns = outputs_of(call, 2, 0, call.in[2]);
    const int64_t pitch = columns.size, slice = rows.size * pitch;
    // Slices of the gradients of every output of the channel: weights of slice s from `kernels[s]`.
    int64_t* const kernels = offsets + room.offsets / 2;
    int64_t seen = 0;
    for (int64_t m = 0; m < call.multiplier; ++m)
      for (int64_t t = 0; t < slices.taps; ++t) {
        const int64_t at = slices.output + t * slices.output_step;
        if (at < 0 || at >= call.out[0]) continue;
        kernels[seen] = (m * call.kernel[0] + slices.kernel_of(t)) * kernel_h * kernel_w;
        lay(grad + m * call.outputs() + at * call.out[1] * call.out[2], call.out[1], call.out[2],
            rows, -columns.first, 1, pitch, laid + seen++ * slice);
      }
    widen(weight, line, call.multiplier * call.taps());
    const int64_t phases = call.stride[2], width = call.in[2];
    const bool direct = kPlain && phases == 1;
    const int64_t part = ceil_div(width, phases);
    S* const to = grad_input + (depth * call.in[1]) * width;
    for (int64_t i = begin; i < smaller(end, begin + call.stride[1]); ++i) {
      const Phase down(call, 1, i, end);
      Correlation<T> c = {};
      c.row_step = pitch;
      c.tap_step = down.output_step * pitch;
      c.offsets = offsets;
      c.weights = weights;
      c.kernel_rows = down.taps;
      c.rows = down.count;
      for (int64_t j = 0; j < smaller(phases, width); ++j) {
        const Phase across(call, 2, j, width);
        c.laid = laid + (down.taps ? down.output - rows.first : 0) * pitch;
        c.tap_columns = seen * across.taps;
        T* next = weights;
        for (int64_t s = 0, n = 0; s < seen; ++s)
          for (int64_t t = 0; t < across.taps; ++t) {
            offsets[n++] = s * slice + across.output + t * across.output_step - columns.first;
            for (int64_t h = 0; h < down.taps; ++h)
              *next++ = line[kernels[s] + down.kernel_of(h) * kernel_w + across.kernel_of(t)];
          }
        c.columns = across.count;
        if (direct) {
          c.out = reinterpret_cast<T*>(to + i * width);
          c.out_step = call.stride[1] * width;
        } else {
          c.out = values + j * part;
          c.out_step = phases * part;
        }
        correlate(c);
      }
      if (direct) continue;
      for (int64_t r = 0; r < down.count; ++r) {
        const T* from = values + r * phases * part;
        S* const row = to + (i + r * call.stride[1]) * width;
        if (phases == 1) {
          narrow(from, row, width);
          continue;
        }
        T* joined = line_of(row);
        if (phases == 2) {
          const T* const odd = from + part;
          const int64_t pairs = width / 2;
          for (int64_t t = 0; t < pairs; ++t) joined[2 * t] = from[t], joined[2 * t + 1] = odd[t];
          if (width % 2) joined[width - 1] = from[pairs];
        } else {
          for (int64_t j = 0; j < smaller(phases, width); ++j)
            for (int64_t t = 0, k = j; k < width; ++t, k += phases) joined[k] = from[j * part + t];
        }
        if constexpr (!kPlain) narrow(joined, row, width);
      }
    }
  }
  FT_METHOD T* line_of(S* row) {
    if constexpr (kPlain)
      return row;
    else
      return values + room.values - call.in[2];
  }

  // --- the gradient of weights: sums[tap][lane], whose lanes are added up at the end of a task

  void grad_weight(const S* grad, const S* x, int64_t depth, int64_t begin, int64_t end, T* sums) {
    const Span seen = lay_inputs(x, depth, begin, end);
    const int64_t slice = inputs_of(call, 1, begin, end).size * laid_row();
    const int64_t kernel_h = call.kernel[1], kernel_w = call.kernel[2];
    for (int64_t k = 0; k < kernel_w; ++k) offsets[k] = offset_of(k);
    const int64_t rows = end - begin;
    Products<T> p = {};
    p.row_step = call.stride[1] * laid_row();
    p.tap_step = call.dilation[1] * laid_row();
    p.offsets = offsets;
    p.kernel_rows = kernel_h;
    p.kernel_columns = kernel_w;
    p.x_step = p.grad_step = kLanes;
    p.grad_row = call.out[2];
    p.rows = rows;
    p.steps = call.out[2] / kLanes;
    p.rest = call.out[2] % kLanes;
    for (int64_t m = 0; m < call.multiplier; ++m) {
      const S* from = grad + m * call.outputs() + (depth * call.out[1] + begin) * call.out[2];
      const T* const g = numbers<Format>(from, rows * call.out[2], values);
      for (int64_t s = 0; s < seen.size; ++s) {
        T* const to = sums + (m * call.taps() + (seen.first + s) * kernel_h * kernel_w) * kLanes;
        p.x = laid + s * slice;
        p.grad = g;
        add_products(p, to);
      }
    }
  }

  void add_up(const S* grad, T* sums) {
    typename V::Register total = V::load(sums);
    for (int64_t i = 0; i < call.outputs(); i += kLanes * 8) {
      const int64_t n = smaller<int64_t>(kLanes * 8, call.outputs() - i);
      alignas(64) T some[kLanes * 8] = {};
      widen(grad + i, some, n);
      for (int k = 0; k < 8; ++k) total += V::load(some + k * kLanes);
    }
    V::store(total, sums);
  }
};

FT_END_NAMESPACE
