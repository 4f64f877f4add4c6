// Batch norm over the tasks and tiles of a tensor. A tile is a few runs of up to kWidth elements in
// the cache: norm and formula take turns on it, 16-bit data are converted on its edges.
#include <math.h>
#include <string.h>

#include <vector>

#include "../formulas.h"
#include "kernels.h"

namespace fusedtrain {
namespace cpu {
namespace {

// Columns of a tile where channels are last, and its rows. 128 columns or 2 KiB a row are slower
// (by 1.3x and 1.4x: the rows of a tile then meet in the same sets of the cache).
constexpr int64_t kWidth = 112;
constexpr int64_t kTileRows = 8;
constexpr int64_t kTile = 1024;             // elements, at most twice as many: 4 KiB of each tensor
constexpr int64_t kPiece = 1 << 16;         // of a long plane, which several tasks may share
constexpr int64_t kTaskElements = 1 << 14;  // at least, and 64 a channel
constexpr int64_t kMostTasks = 64;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

#define FT_SAVED(name, Formula, n, rounds, saved) saved == kOutput,
constexpr bool kByOutput[] = {FT_POINTWISE(FT_SAVED)};
#undef FT_SAVED

const BatchNormKernels<float>* table(float) { return kernels().batch_norm_f32; }
const BatchNormKernels<double>* table(double) { return kernels().batch_norm_f64; }
const PointwiseKernels<float>& formulas_of(float) { return kernels().f32; }
const PointwiseKernels<double>& formulas_of(double) { return kernels().f64; }

// `rows` runs of n elements from `offset` on, `stride` apart. By column, the first element of a run
// meets the value at `column`; by row, the first run does. `sample` is that of all elements, where
// samples are told apart.
struct Tile {
  int64_t offset, rows, stride, n, column, sample;
};

// The elements of one task. Where channels are last, some rows; else some planes (of one sample and
// channel), or pieces of them, in the order of memory: going through all samples of one channel and
// then of the next finds them in a cache the second time, and still took 1.6x longer (32 x 96 x 56
// x 56, float32), since each plane begins with misses of the translation buffer.
struct Task {
  const BatchNorm& call;
  bool by_row;
  int64_t first, last;  // rows, or pieces
  int64_t pieces;       // of a plane
  int64_t columns;      // how many values a channel stand for in the tiles
  bool periodic;        // rows follow each other, so that several make one run

  explicit Task(const BatchNorm& n)
      : call(n), by_row(n.inner > 1), pieces((n.inner + kPiece - 1) / kPiece) {
    const bool whole = n.channels <= kWidth && n.branch_scale == nullptr;
    periodic = !by_row && whole;
    columns = periodic ? kWidth / n.channels * n.channels : n.channels;
    first = 0;
    last = by_row ? n.rows * n.channels * pieces : n.rows;
  }
  Task(const BatchNorm& n, int64_t task) : Task(n) {
    const int64_t all = last, count = tasks();
    first = all * task / count;
    last = all * (task + 1) / count;
  }
  int64_t tasks() const {  // of all elements
    const int64_t least = 64 * call.channels;
    const int64_t each = least > kTaskElements ? least : kTaskElements;
    int64_t count = call.rows * call.channels * call.inner / each;
    if (count > kMostTasks) count = kMostTasks;
    if (count > last) count = last;
    return count < 1 ? 1 : count;
  }
  int64_t channel_of(int64_t column) const { return column % call.channels; }

  // Sums by column want several rows at once, everything else goes as memory does.
  template <class F>
  void visit(bool sums, const F& f) const {
    if (by_row) return visit_planes(f);
    if (periodic) return visit_whole_rows(f);
    const int64_t rows_of_tile = sums && call.branch_scale == nullptr ? 4 : 1;
    const int64_t width = kTile / rows_of_tile;
    for (int64_t row = first; row < last; row += rows_of_tile) {
      const int64_t rows = smaller(rows_of_tile, last - row), sample = row / call.rows_a_sample;
      for (int64_t column = 0; column < columns;) {
        // A last run of up to twice the width, rather than one of a few elements.
        const int64_t left = columns - column, n = left < 2 * width ? left : width;
        f(Tile{row * columns + column, rows, columns, n, column, sample});
        column += n;
      }
    }
  }

  template <class F>
  void visit_whole_rows(const F& f) const {
    const int64_t end = last * call.channels;
    for (int64_t i = first * call.channels; i < end;) {
      const int64_t full = smaller(kTileRows, (end - i) / columns);
      const int64_t rows = full > 0 ? full : 1, n = full > 0 ? columns : end - i;
      f(Tile{i, rows, n, n, 0, 0});
      i += rows * n;
    }
  }

  template <class F>
  void visit_planes(const F& f) const {
    const int64_t inner = call.inner;
    for (int64_t i = first; i < last;) {
      const int64_t plane = i / pieces, row = plane / call.channels;
      const int64_t channel = plane % call.channels, sample = row / call.rows_a_sample;
      if (inner <= kTile) {  // one or several planes of a sample (pieces is 1)
        const int64_t most = smaller(kTile / inner, call.channels - channel);
        const int64_t planes = smaller(most, last - i);
        f(Tile{plane * inner, planes, inner, inner, channel, sample});
        i += planes;
        continue;
      }
      const int64_t start = i % pieces * kPiece, end = smaller(inner, start + kPiece);
      for (int64_t k = start; k < end; k += kTile) {
        const int64_t n = smaller(kTile, end - k);
        f(Tile{plane * inner + k, 1, n, n, channel, sample});
      }
      ++i;
    }
  }
};

template <class T>
T at(const void* p, int64_t i) {
  return p == nullptr ? T(0) : static_cast<const T*>(p)[i];
}

// Works on one task in type T; narrow data are 16-bit in memory.
template <class T, bool kNarrow>
struct Worker {
  const Task& task;
  const BatchNorm& call;
  const BatchNormKernels<T>& k;
  const PointwiseKernels<T>& formulas;
  Format format;
  double parameters[kMaxParameters];
  std::vector<T> mean, scale, bias, average, slope;
  std::vector<double> sums, slopes;
  alignas(64) T x_buffer[2 * kTile], g_buffer[2 * kTile], saved_buffer[2 * kTile], work[2 * kTile];

  explicit Worker(const Task& task)
      : task(task),
        call(task.call),
        k(table(T())[task.by_row ? 1 : 0]),
        formulas(formulas_of(T())) {
    if (kNarrow) format = format_of(call.dtype);
    if (call.op >= 0) round_parameters(call.op, call.dtype, call.parameters, parameters);
  }

  Run<const T> read(const void* base, const Tile& t, T* buffer) const {
    if (base == nullptr) return {nullptr, 0};
    if constexpr (!kNarrow) {
      return {static_cast<const T*>(base) + t.offset, t.stride};
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(base) + t.offset;
      if (t.stride == t.n)
        format.load(from, buffer, t.rows * t.n);
      else
        for (int64_t row = 0; row < t.rows; ++row)
          format.load(from + row * t.stride, buffer + row * t.n, t.n);
      return {buffer, t.n};
    }
  }
  // Where to compute what is to be stored, and the storing of it.
  Run<T> target(void* base, const Tile& t) {
    if constexpr (!kNarrow)
      return {static_cast<T*>(base) + t.offset, t.stride};
    else
      return {work, t.n};
  }
  void store(Run<const T> from, void* base, const Tile& t) const {
    if constexpr (kNarrow) {
      uint16_t* to = static_cast<uint16_t*>(base) + t.offset;
      for (int64_t row = 0; row < t.rows; ++row)
        format.store(from.data + row * from.stride, to + row * t.stride, t.n);
    } else {
      T* to = static_cast<T*>(base) + t.offset;
      if (to == from.data) return;
      for (int64_t row = 0; row < t.rows; ++row)
        memcpy(to + row * t.stride, from.data + row * from.stride, t.n * sizeof(T));
    }
  }
  T factor(const Tile& t) const {
    return call.branch_scale == nullptr ? T(1) : at<T>(call.branch_scale, t.sample);
  }

  // y = f(y), in place.
  void activate(Run<T> y, const Tile& t) const {
    if (call.op < 0) return;
    const auto f = formulas.forward[call.op];
    if (y.stride == t.n) return f(y.data, y.data, t.rows * t.n, parameters);
    for (int64_t row = 0; row < t.rows; ++row)
      f(y.data + row * y.stride, y.data + row * y.stride, t.n, parameters);
  }

  void fill_forward() {
    mean.resize(task.columns);
    scale.resize(task.columns);
    bias.resize(task.columns);
    for (int64_t i = 0; i < task.columns; ++i) {
      const int64_t c = task.channel_of(i);
      mean[i] = at<T>(call.mean, c);
      scale[i] = at<T>(call.invstd, c);
      if (call.weight != nullptr) scale[i] *= at<T>(call.weight, c);
      bias[i] = at<T>(call.bias, c);
    }
  }

  // Shares of a task: two numbers for each of its channels.
  void clear_sums() {
    sums.assign(task.columns, 0.0);
    slopes.assign(task.columns, 0.0);
  }
  void leave_sums(double* shares) const {
    double* first = shares;
    double* second = first + call.channels;
    for (int64_t c = 0; c < call.channels; ++c) first[c] = second[c] = 0;
    for (int64_t i = 0; i < task.columns; ++i) {
      const int64_t c = task.channel_of(i);
      first[c] += sums[i];
      second[c] += slopes[i];
    }
  }

  void statistics(double* shares) {
    clear_sums();
    if constexpr (sizeof(T) == sizeof(double)) {
      mean.resize(task.columns);
      for (int64_t i = 0; i < task.columns; ++i) mean[i] = center_of(call, task.channel_of(i));
    }
    task.visit(true, [&](const Tile& t) {
      k.collect(read(call.x, t, x_buffer), t.rows, t.n, mean.data() + (mean.empty() ? 0 : t.column),
                sums.data() + t.column, slopes.data() + t.column);
    });
    leave_sums(shares);
  }

  // What double data are centred by: the median of the first, the middle and the last element of
  // the channel. One of them alone, where it is an outlier, costs as many digits as the channel has
  // elements.
  static double center_of(const BatchNorm& call, int64_t channel) {
    if (sizeof(T) != sizeof(double)) return 0;
    const double* x = static_cast<const double*>(call.x);
    const int64_t count = call.rows * call.inner;
    double values[3];
    for (int i = 0; i < 3; ++i) {
      const int64_t at = i * (count - 1) / 2;
      values[i] = x[(at / call.inner * call.channels + channel) * call.inner + at % call.inner];
    }
    const double low = values[0] < values[1] ? values[0] : values[1];
    const double high = values[0] < values[1] ? values[1] : values[0];
    const double median = values[2] < low ? low : values[2] > high ? high : values[2];
    return median - median == 0 ? median : 0;
  }

  void normalise(const BatchNormForward& f) {
    fill_forward();
    task.visit(false, [&](const Tile& t) {
      const Run<T> y = target(f.y, t);
      k.normalise(read(call.x, t, x_buffer), read(f.residual, t, saved_buffer), y, t.rows, t.n,
                  mean.data() + t.column, scale.data() + t.column, bias.data() + t.column,
                  factor(t));
      activate(y, t);
      if (kNarrow) store({y.data, y.stride}, f.y, t);
    });
  }

  // grad f'(s) of a tile; also stored to b.grad_residual, where that is not null.
  Run<const T> gradient(const BatchNormBackward& b, Run<const T> x, const Tile& t) {
    const Run<const T> g = read(b.grad, t, g_buffer);
    if (call.op < 0) {
      if (b.grad_residual != nullptr) store(g, b.grad_residual, t);
      return g;
    }
    const bool by_output = kByOutput[call.op];
    Run<const T> saved = read(b.saved, t, saved_buffer);
    if (!by_output || b.saved == nullptr) {
      const Run<T> s{work, t.n};
      k.normalise(x, saved, s, t.rows, t.n, mean.data() + t.column, scale.data() + t.column,
                  bias.data() + t.column, factor(t));
      if (by_output) activate(s, t);
      saved = {work, t.n};
    }
    const auto f = formulas.backward[call.op];
    const Run<T> out = b.grad_residual != nullptr ? target(b.grad_residual, t) : Run<T>{work, t.n};
    if (g.stride == t.n && saved.stride == t.n && out.stride == t.n)
      f(g.data, saved.data, out.data, t.rows * t.n, parameters);
    else
      for (int64_t row = 0; row < t.rows; ++row)
        f(g.data + row * g.stride, saved.data + row * saved.stride, out.data + row * out.stride,
          t.n, parameters);
    if (kNarrow && b.grad_residual != nullptr) store({out.data, out.stride}, b.grad_residual, t);
    return {out.data, out.stride};
  }

  void reduce(const BatchNormBackward& b, double* shares) {
    fill_forward();
    clear_sums();
    task.visit(true, [&](const Tile& t) {
      const Run<const T> x = read(call.x, t, x_buffer);
      const Run<const T> g = gradient(b, x, t);
      k.reduce(x, g, t.rows, t.n, mean.data() + t.column, factor(t), sums.data() + t.column,
               slopes.data() + t.column);
    });
    leave_sums(shares);
  }

  void grad_input(const BatchNormBackward& b) {
    fill_forward();
    average.assign(task.columns, T(0));
    slope.assign(task.columns, T(0));
    for (int64_t i = 0; b.averages != nullptr && i < task.columns; ++i) {
      const int64_t c = task.channel_of(i);
      const double invstd = double(at<T>(call.invstd, c));
      average[i] = T(b.averages[c] / b.count);
      slope[i] = T(b.averages[call.channels + c] / b.count * invstd * double(scale[i]));
    }
    const void* x_data = b.averages != nullptr ? call.x : nullptr;
    const bool needs_x =
        b.ready == nullptr && call.op >= 0 && (!kByOutput[call.op] || b.saved == nullptr);
    task.visit(false, [&](const Tile& t) {
      const Run<const T> x = read(needs_x || x_data != nullptr ? call.x : nullptr, t, x_buffer);
      const Run<const T> g = b.ready != nullptr ? read(b.ready, t, g_buffer) : gradient(b, x, t);
      if (b.grad_residual != nullptr) store(g, b.grad_residual, t);
      if (b.grad_input == nullptr) return;
      const Run<T> out = target(b.grad_input, t);
      k.grad_input(x_data != nullptr ? x : Run<const T>{nullptr, 0}, g, out, t.rows, t.n,
                   mean.data() + t.column, scale.data() + t.column, average.data() + t.column,
                   slope.data() + t.column, factor(t));
      if (kNarrow) store({out.data, out.stride}, b.grad_input, t);
    });
  }
};

// Sums of all tasks, in their order.
double sum_shares(const BatchNorm& n, const BatchNormWork& work, int64_t which, int64_t channel) {
  double sum = 0;
  for (int64_t task = 0; task < work.tasks; ++task)
    sum += work.shares[(2 * task + which) * n.channels + channel];
  return sum;
}

template <class T>
void write(void* p, int64_t i, double value) {
  if (p != nullptr) static_cast<T*>(p)[i] = static_cast<T>(value);
}

template <class T>
void settle_channels(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormWork& work) {
  const double count = double(n.rows) * double(n.inner);
  for (int64_t c = 0; c < n.channels; ++c) {
    const double sum = sum_shares(n, work, 0, c), squares = sum_shares(n, work, 1, c);
    const double average = sum / count, variance = squares / count - average * average;
    s.average[c] = Worker<T, false>::center_of(n, c) + average;
    s.variance[c] = variance < 0 ? 0 : variance;
    if (n.mean == nullptr) continue;
    write<T>(n.mean, c, s.average[c]);
    write<T>(n.invstd, c, 1 / sqrt(s.variance[c] + s.eps));
    if (s.running_mean == nullptr) continue;
    const double keep = 1 - s.momentum, unbiased = s.variance[c] * (count / (count - 1));
    write<T>(s.running_mean, c,
             keep * double(at<T>(s.running_mean, c)) + s.momentum * s.average[c]);
    write<T>(s.running_var, c, keep * double(at<T>(s.running_var, c)) + s.momentum * unbiased);
  }
}

template <class T>
void settle_channels(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work) {
  for (int64_t c = 0; c < n.channels; ++c) {
    b.sums[c] = sum_shares(n, work, 0, c);
    b.sums[n.channels + c] = sum_shares(n, work, 1, c) * double(at<T>(n.invstd, c));
    write<T>(b.grad_bias, c, b.sums[c]);
    write<T>(b.grad_weight, c, b.sums[n.channels + c]);
  }
}

// Calls f with a worker of each task and the task's number, in the order that is asked for.
template <class T, bool kNarrow, class F>
void each_task(const BatchNorm& n, int64_t first, int64_t last, bool backwards, const F& f) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t number = backwards ? first + last - 1 - i : i;
    const Task task(n, number);
    Worker<T, kNarrow> worker(task);
    f(worker, number);
  }
}
template <class F>
void each(const BatchNorm& n, int64_t first, int64_t last, bool backwards, const F& f) {
  if (n.dtype == Dtype::kFloat64)
    each_task<double, false>(n, first, last, backwards, f);
  else if (n.dtype == Dtype::kFloat32)
    each_task<float, false>(n, first, last, backwards, f);
  else
    each_task<float, true>(n, first, last, backwards, f);
}

template <class What>
void settle_all(const BatchNorm& n, const What& what, const BatchNormWork& work) {
  if (n.dtype == Dtype::kFloat64)
    settle_channels<double>(n, what, work);
  else
    settle_channels<float>(n, what, work);
}

}  // namespace

int64_t batch_norm_tasks(const BatchNorm& n) { return Task(n).tasks(); }

void statistics(const BatchNorm& n, const BatchNormWork& work, int64_t first, int64_t last) {
  each(n, first, last, false,
       [&](auto& worker, int64_t task) { worker.statistics(work.shares + 2 * task * n.channels); });
}
void settle(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormWork& work) {
  settle_all(n, s, work);
}

void invert(const BatchNorm& n, const BatchNormStatistics& s) {
  for (int64_t c = 0; c < n.channels; ++c) {
    if (n.dtype == Dtype::kFloat64) {
      write<double>(n.mean, c, at<double>(s.running_mean, c));
      write<double>(n.invstd, c, 1 / sqrt(at<double>(s.running_var, c) + s.eps));
    } else {
      write<float>(n.mean, c, double(at<float>(s.running_mean, c)));
      write<float>(n.invstd, c, 1 / sqrt(double(at<float>(s.running_var, c)) + s.eps));
    }
  }
}

// The second sweep goes backwards: what the first one read last is still in the cache.
void normalise(const BatchNorm& n, const BatchNormForward& f, int64_t first, int64_t last) {
  each(n, first, last, true, [&](auto& worker, int64_t) { worker.normalise(f); });
}
void reduce(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work,
            int64_t first, int64_t last) {
  each(n, first, last, false,
       [&](auto& worker, int64_t task) { worker.reduce(b, work.shares + 2 * task * n.channels); });
}
void settle(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work) {
  settle_all(n, b, work);
}
void grad_input(const BatchNorm& n, const BatchNormBackward& b, int64_t first, int64_t last) {
  each(n, first, last, true, [&](auto& worker, int64_t) { worker.grad_input(b); });
}

}  // namespace cpu
}  // namespace fusedtrain
