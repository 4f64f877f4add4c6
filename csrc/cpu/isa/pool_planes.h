// Max pooling a plane at a time, where rows are short: a pass over a row of 7 takes as long as one
// over 32. A plane is laid out in a pitch in which the outputs, and what one element of their
// windows reads, are runs over the whole plane: rows and columns that are a stride apart are
// neighbours, with a border that never wins. Nanoseconds an element (float32, one core of an AMD
// EPYC), a row at a time and so, forward and backward: 56 x 56, 2 x 2: 1.1, 1.2 and 0.64, 0.71;
// 14 x 14, 2 x 2: 5.5, 5.5 and 1.2, 1.0; 7 x 7, 3 x 3: 27.8, 19.1 and 6.5, 5.6.
#pragma once

#include "pool_runs.h"

FT_BEGIN_NAMESPACE

template <class Format>
struct SmallPlanes {
  using S = typename Format::Stored;
  using T = typename Format::Number;
  using P = typename PlaceOf<T>::P;
  static constexpr bool kWide = sizeof(S) == sizeof(T);
  static constexpr int64_t kLongestRow = 64, kMost = 4096, kSlack = 64;

  const MaxPool& call;
  int64_t stride_h, stride_w;
  int64_t pitch, rows;  // of the rows that are a stride apart
  int64_t part;         // elements of them, and room
  int64_t run;          // from the first output to the last
  int64_t known = -1;   // the plane that is in the buffers
  alignas(64) T laid[kMost + kSlack];
  alignas(64) T values[kMost + kSlack];  // of outputs, or gradients, in the pitch
  alignas(64) P places[kMost + kSlack];
  alignas(64) P firsts[kMost + kSlack];  // where the first element is in the input
  alignas(64) T whole[kMost + kSlack];   // of 16 bits as numbers

  static bool fits(const MaxPool& call) {
    if (call.channels != 1 || call.width > kLongestRow || call.kernel_w > kLongestRow) return false;
    int64_t pitch, rows, stride_h, stride_w;
    measure(call, &stride_h, &stride_w, &pitch, &rows);
    return stride_h * stride_w * (pitch * rows + kStep) <= kMost;
  }
  static FT_METHOD void measure(const MaxPool& call, int64_t* stride_h, int64_t* stride_w,
                                int64_t* pitch, int64_t* rows) {
    // A single window has no stride.
    *stride_h = call.out_height > 1 ? call.stride_h : call.kernel_h;
    *stride_w = call.out_width > 1 ? call.stride_w : call.kernel_w;
    *pitch = larger(call.out_width + (call.kernel_w - 1) / *stride_w,
                    ceil_div(call.width + call.pad_w, *stride_w));
    *rows = larger(call.out_height + (call.kernel_h - 1) / *stride_h,
                   ceil_div(call.height + call.pad_h, *stride_h));
  }

  explicit SmallPlanes(const MaxPool& call) : call(call) {
    measure(call, &stride_h, &stride_w, &pitch, &rows);
    part = pitch * rows + kStep;
    run = (call.out_height - 1) * pitch + call.out_width;
  }

  // Where an element of the window of output 0 is.
  FT_METHOD int64_t base(int64_t i, int64_t j) const {
    return (i % stride_h * stride_w + j % stride_w) * part + i / stride_h * pitch + j / stride_w;
  }
  // Where the columns of a residue are, of a row of inputs: column t is input t stride + first.
  FT_METHOD T* line(int64_t h, int64_t residue) {
    const int64_t u = h + call.pad_h;
    return laid + (u % stride_h * stride_w + residue) * part + u / stride_h * pitch;
  }

  // Calls f with the place and the number of each column of a row of inputs.
  template <class F>
  FT_METHOD void each_column(int64_t h, const F& f) {
    const int64_t pad = call.pad_w, width = call.width;
    if (stride_w == 1) {
      T* const whole_row = line(h, 0) + pad;
#pragma GCC ivdep
      for (int64_t w = 0; w < width; ++w) f(whole_row[w], w);
    } else if (stride_w == 2 && pad == 0) {
      T *const even = line(h, 0), *const odd = line(h, 1);
      const int64_t pairs = width / 2;
#pragma GCC ivdep
      for (int64_t t = 0; t < pairs; ++t) f(even[t], 2 * t), f(odd[t], 2 * t + 1);
      if (width % 2) f(even[pairs], width - 1);
    } else {
      for (int64_t w = 0, u = pad; w < width; ++w, ++u) f(line(h, u % stride_w)[u / stride_w], w);
    }
  }

  // --- forward

  void start_forward() {
    for (int64_t k = 0; k < stride_h * stride_w * part; ++k) laid[k] = -T(__builtin_inf());
    for (int64_t k = 0; k < run; ++k) firsts[k] = 0;
    for (int64_t r = 0; r < call.out_height; ++r)
      for (int64_t c = 0; c < call.out_width; ++c)
        firsts[r * pitch + c] = P(larger<int64_t>(call.pad_h - r * stride_h, 0) * call.kernel_w +
                                  larger<int64_t>(call.pad_w - c * stride_w, 0));
  }
  FT_METHOD void lay(const T* x) {
    for (int64_t h = 0; h < call.height; ++h, x += call.width)
      each_column(h, [x](T& there, int64_t w) __attribute__((always_inline)) { there = x[w]; });
  }
  void pool(const S* x) {
    lay(numbers<Format>(x, call.height * call.width, whole));
    for (int64_t k = 0; k < run; ++k) values[k] = -T(__builtin_inf()), places[k] = firsts[k];
    for (int64_t i = 0; i < call.kernel_h; ++i)
      for (int64_t j = 0; j < call.kernel_w; ++j)
        take<1>(laid + base(i, j), 1, values, places, P(i * call.kernel_w + j), run);
  }
  // Outputs [first, last) of all planes, and their places.
  void outputs(const S* x, int64_t first, int64_t last, T* best, P* place) {
    const int64_t size = call.out_height * call.out_width, width = call.out_width;
    while (first < last) {
      const int64_t plane = first / size, begin = first - plane * size;
      const int64_t end = smaller(size, begin + last - first);
      if (plane != known) pool(x + plane * call.height * call.width);
      known = plane;
      for (int64_t k = begin; k < end;) {
        const int64_t row = k / width, stop = smaller(end, (row + 1) * width), n = stop - k;
        const int64_t at = row * pitch + k - row * width;
#pragma GCC ivdep
        for (int64_t m = 0; m < n; ++m) best[m] = values[at + m], place[m] = places[at + m];
        best += n, place += n, k = stop;
      }
      first += end - begin;
    }
  }

  // --- backward

  void start_backward() {
    for (int64_t k = 0; k < run; ++k) places[k] = P(-1), values[k] = T(0);
  }
  FT_METHOD void spread(const S* grad, const uint8_t* codes, int64_t first) {
    const int64_t size = call.out_height * call.out_width, width = call.out_width;
    const T* from = numbers<Format>(grad, size, whole);
    unpack_places(call.bits, codes, first, size, firsts);
    for (int64_t row = 0; row < call.out_height; ++row) {
      T* value = values + row * pitch;
      P* place = places + row * pitch;
#pragma GCC ivdep
      for (int64_t k = 0; k < width; ++k)
        value[k] = from[row * width + k], place[k] = firsts[row * width + k];
    }
  }
  void unpool(const S* grad, const uint8_t* codes, int64_t plane) {
    const int64_t size = call.out_height * call.out_width;
    spread(grad + plane * size, codes, plane * size);
    for (int64_t k = 0; k < stride_h * stride_w * part; ++k) laid[k] = T(0);
    // From the last element of the window: sums are in the order of the outputs.
    for (int64_t i = call.kernel_h - 1; i >= 0; --i)
      for (int64_t j = call.kernel_w - 1; j >= 0; --j)
        add_where(places, values, P(i * call.kernel_w + j), laid + base(i, j), run);
  }
  // Rows [first, last) of all planes' inputs.
  void inputs(const S* grad, const uint8_t* codes, int64_t first, int64_t last, S* out) {
    const int64_t width = call.width;
    for (int64_t row = first; row < last;) {
      const int64_t plane = row / call.height, begin = row - plane * call.height;
      const int64_t end = smaller(call.height, begin + last - row);
      if (plane != known) unpool(grad, codes, plane);
      known = plane;
      T* to = whole;
      if constexpr (kWide) to = out + row * width;
      T* const start = to;
      for (int64_t h = begin; h < end; ++h, to += width)
        each_column(h, [to](T& there, int64_t w) __attribute__((always_inline)) { to[w] = there; });
      if constexpr (!kWide) to_16bit<Format>(start, out + row * width, (end - begin) * width);
      row += end - begin;
    }
  }
};

FT_END_NAMESPACE
