// Max pooling a run at a time: outputs that follow each other in memory and whose windows lie the
// same way, either a piece of a row (contiguous) or the channels of a pixel (channels_last). Each
// element of the window is one pass over the run. Planes of short rows are one run (pool_planes.h).
#pragma once

#include "pool_planes.h"

FT_BEGIN_NAMESPACE

template <class Format>
struct MaxPooling {
  using S = typename Format::Stored;
  using T = typename Format::Number;
  using P = typename PlaceOf<T>::P;
  static constexpr bool kWide = sizeof(S) == sizeof(T);
  static constexpr int64_t kSpan = 2 * kPoolRun + 256;

  // The part of a window that lies in the input, along one dimension.
  struct Window {
    int64_t start, first, last;
    FT_METHOD Window(int64_t at, int64_t stride, int64_t pad, int64_t kernel, int64_t size)
        : start(at * stride - pad),
          first(larger<int64_t>(-start, 0)),
          last(smaller(kernel, size - start)) {}
  };

  // An output, from run to run.
  struct Walk {
    int64_t plane, row, column, channel;
    FT_METHOD Walk(const MaxPool& call, int64_t at) {
      const int64_t pixel = at / call.channels, line = pixel / call.out_width;
      channel = at % call.channels;
      column = pixel % call.out_width;
      row = line % call.out_height;
      plane = line / call.out_height;
    }
    FT_METHOD void advance(const MaxPool& call, int64_t n) {
      if (call.channels > 1) {
        if ((channel += n) < call.channels) return;
        channel = 0;
        n = 1;
      }
      if ((column += n) < call.out_width) return;
      column = 0;
      if (++row < call.out_height) return;
      row = 0;
      ++plane;
    }
  };

  // Outputs [start, start + n) of a row.
  static FT_METHOD void run_row(const MaxPoolForward& call, const S* plane, const Window& rows,
                                int64_t start, int64_t n, T* best, P* place) {
    const int64_t stride = call.stride_w, width = call.width, pad = call.pad_w;
    // Where the first and the last window begin. A division takes as long as a pass over 7 outputs:
    // only windows that reach over an edge need one.
    const int64_t left = start * stride - pad, right = left + (n - 1) * stride;
    const int64_t begin = larger<int64_t>(left, 0), end = smaller(width, right + call.kernel_w);
    for (int64_t k = 0; k < n; ++k)
      place[k] = P(rows.first * call.kernel_w + larger<int64_t>(pad - (start + k) * stride, 0));
    alignas(64) T buffer[kWide ? 1 : kSpan];
    for (int64_t i = rows.first; i < rows.last; ++i) {
      const T* x = numbers<Format>(plane + (rows.start + i) * width + begin, end - begin, buffer);
      for (int64_t j = 0; j < call.kernel_w; ++j) {
        const int64_t first = left + j >= 0 ? start : ceil_div(pad - j, stride);
        const int64_t last = right + j < width ? start + n : ceil_div(width + pad - j, stride);
        const T* from = x + first * stride - pad + j - begin;
        const P code = P(i * call.kernel_w + j);
        T* b = best + (first - start);
        P* p = place + (first - start);
        if (stride == 1)
          take<1>(from, stride, b, p, code, last - first);
        else if (stride == 2)
          take<2>(from, stride, b, p, code, last - first);
        else
          take<0>(from, stride, b, p, code, last - first);
      }
    }
  }

  // n channels of a pixel; `plane` starts at the first of them.
  static FT_METHOD void run_pixel(const MaxPoolForward& call, const S* plane, const Window& rows,
                                  const Window& columns, int64_t n, T* best, P* place) {
    const P first = P(rows.first * call.kernel_w + columns.first);
    for (int64_t k = 0; k < n; ++k) place[k] = first;
    alignas(64) T buffer[kWide ? 1 : kPoolRun];
    for (int64_t i = rows.first; i < rows.last; ++i) {
      for (int64_t j = columns.first; j < columns.last; ++j) {
        const int64_t pixel = (rows.start + i) * call.width + columns.start + j;
        const T* x = numbers<Format>(plane + pixel * call.channels, n, buffer);
        take<1>(x, 1, best, place, P(i * call.kernel_w + j), n);
      }
    }
  }

  // Runs of outputs from the first on, and their places.
  struct Runs {
    const MaxPoolForward& call;
    // So many outputs of a row, and their windows fit into the buffer.
    int64_t longest;

    explicit Runs(const MaxPoolForward& call)
        : call(call),
          longest(kWide ? kPoolRun
                        : larger<int64_t>((kSpan - call.kernel_w) / call.stride_w + 1, 1)) {}

    void outputs(const S* x, int64_t begin, int64_t end, T* best, P* places) {
      const int64_t channels = call.channels, plane_size = call.height * call.width * channels;
      for (int64_t k = 0; k < end - begin; ++k) best[k] = -T(__builtin_inf());
      Walk at(call, begin);
      for (int64_t done = 0, n; done < end - begin; done += n) {
        const S* plane = x + at.plane * plane_size;
        const Window rows(at.row, call.stride_h, call.pad_h, call.kernel_h, call.height);
        T* b = best + done;
        P* p = places + done;
        if (channels == 1) {
          n = smaller(smaller(call.out_width - at.column, end - begin - done), longest);
          run_row(call, plane, rows, at.column, n, b, p);
        } else {
          n = smaller(channels - at.channel, end - begin - done);
          const Window columns(at.column, call.stride_w, call.pad_w, call.kernel_w, call.width);
          run_pixel(call, plane + at.channel, rows, columns, n, b, p);
        }
        at.advance(call, n);
      }
    }
  };

  static void forward(const MaxPoolForward& call, int64_t first_block, int64_t last_block) {
    if (SmallPlanes<Format>::fits(call)) {
      SmallPlanes<Format> planes(call);
      planes.start_forward();
      return pool_blocks(call, planes, first_block, last_block);
    }
    Runs runs(call);
    pool_blocks(call, runs, first_block, last_block);
  }

  template <class Maker>
  static FT_METHOD void pool_blocks(const MaxPoolForward& call, Maker& maker, int64_t first_block,
                                    int64_t last_block) {
    const int64_t last = smaller(last_block * kBitBlock, call.outputs());
    alignas(64) P places[kPoolRun];
    alignas(64) T buffer[kWide ? 1 : kPoolRun];
    for (int64_t begin = first_block * kBitBlock; begin < last; begin += kPoolRun) {
      const int64_t end = smaller(begin + kPoolRun, last);
      S* y = static_cast<S*>(call.y) + begin;
      T* best = buffer;
      if constexpr (kWide) best = y;
      maker.outputs(static_cast<const S*>(call.x), begin, end, best, places);
      if constexpr (!kWide) to_16bit<Format>(best, y, end - begin);
      if (call.bits == 0) continue;
      const int64_t blocks = ceil_div(end - begin, kBitBlock);
      for (int64_t k = end - begin; k < blocks * kBitBlock; ++k) places[k] = 0;
      for (int64_t b = 0; b < blocks; ++b)
        pack_places(call.bits, places + b * kBitBlock,
                    call.codes + (begin / kBitBlock + b) * block_bytes(call.bits));
    }
  }

  // Sums of a row of inputs, contiguous: those of columns that are a multiple of the stride apart
  // lie side by side, so that gradients are added to neighbours.
  static FT_METHOD void add_row(const MaxPoolBackward& call, const cpu::MaxPoolRows& r, int64_t i,
                                const P* place, const T* grad, T* sums) {
    // From the last column of the window: sums are in the order of the outputs.
    int64_t j = call.kernel_w - 1, phase = j % r.stride, step = j / r.stride;
    for (; j >= 0; --j, --phase) {
      if (phase < 0) phase = r.stride - 1, --step;
      add_where(place, grad, P(i * call.kernel_w + j), sums + phase * r.steps + step,
                call.out_width);
    }
  }
  static FT_METHOD void add_pixels(const MaxPoolBackward& call, int64_t i, const P* place,
                                   const T* grad, T* sums) {
    for (int64_t o = 0; o < call.out_width; ++o) {
      const Window columns(o, call.stride_w, call.pad_w, call.kernel_w, call.width);
      for (int64_t j = columns.first; j < columns.last; ++j)
        add_where(place + o * call.channels, grad + o * call.channels, P(i * call.kernel_w + j),
                  sums + (columns.start + j) * call.channels, call.channels);
    }
  }

  template <int kStride>
  static FT_METHOD void interleave(const MaxPoolBackward& call, const cpu::MaxPoolRows& r,
                                   const T* sums, T* out) {
    const int64_t stride = kStride > 0 ? kStride : r.stride, pad = call.pad_w;
    const int64_t end = call.width + pad, steps = r.steps;
    const int64_t first = smaller(ceil_div(pad, stride) * stride, end);
    const int64_t last = larger(end / stride * stride, first);
    for (int64_t u = pad; u < first; ++u) out[u - pad] = sums[u % stride * steps + u / stride];
#pragma GCC ivdep
    for (int64_t t = first / stride; t < last / stride; ++t)
      for (int64_t phase = 0; phase < stride; ++phase)
        out[t * stride + phase - pad] = sums[phase * steps + t];
    for (int64_t u = last; u < end; ++u) out[u - pad] = sums[u % stride * steps + u / stride];
  }

  // Rows [first_row, last_row) of all planes' inputs. `scratch` has r.scratch numbers.
  static void backward(const MaxPoolBackward& call, const cpu::MaxPoolRows& r, int64_t first_row,
                       int64_t last_row, void* scratch) {
    if (SmallPlanes<Format>::fits(call)) {
      SmallPlanes<Format> planes(call);
      planes.start_backward();
      return planes.inputs(static_cast<const S*>(call.grad), call.codes, first_row, last_row,
                           static_cast<S*>(call.grad_input));
    }
    const int64_t length = call.out_width * call.channels, size = call.width * call.channels;
    const bool one = call.channels == 1;
    T* const sums = static_cast<T*>(scratch);
    T* const gradients = sums + r.sums;
    T* const finished = gradients + (kWide ? 0 : r.kept * length);
    P* const places = reinterpret_cast<P*>(finished + (kWide ? 0 : size));
    int64_t held[256];  // which row of outputs a slot has
    for (int64_t slot = 0; slot < r.kept; ++slot) held[slot] = -1;
    for (int64_t row = first_row; row < last_row; ++row) {
      const int64_t plane = row / call.height, h = row % call.height + call.pad_h;
      S* out = static_cast<S*>(call.grad_input) + row * size;
      T* to = finished;
      if constexpr (kWide) to = out;
      T* const totals = one ? sums : to;
      const int64_t count = one ? r.sums : size;
      for (int64_t k = 0; k < count; ++k) totals[k] = T(0);
      const int64_t least = h - call.kernel_h + 1;
      const int64_t first = least > 0 ? ceil_div(least, call.stride_h) : 0;
      const int64_t last = smaller(h / call.stride_h, call.out_height - 1);
      for (int64_t o = first; o <= last; ++o) {
        const int64_t source = plane * call.out_height + o, slot = o % r.kept;
        P* place = places + slot * length;
        const S* stored = static_cast<const S*>(call.grad) + source * length;
        const T* grad = gradients + slot * length;
        if constexpr (kWide) grad = stored;
        if (held[slot] != source) {
          held[slot] = source;
          unpack_places(call.bits, call.codes, source * length, length, place);
          if constexpr (!kWide) from_16bit<Format>(stored, gradients + slot * length, length);
        }
        const int64_t i = h - o * call.stride_h;
        if (one)
          add_row(call, r, i, place, grad, totals);
        else
          add_pixels(call, i, place, grad, totals);
      }
      if (one && r.stride == 1)
        interleave<1>(call, r, sums, to);
      else if (one && r.stride == 2)
        interleave<2>(call, r, sums, to);
      else if (one)
        interleave<0>(call, r, sums, to);
      if constexpr (!kWide) to_16bit<Format>(to, out, size);
    }
  }
};

FT_END_NAMESPACE
