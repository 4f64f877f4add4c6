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

constexpr int64_t kWidth = 512;  // of a run: sums and coefficients of its columns are 20 KiB
constexpr int64_t kTileRows = 4;
constexpr int64_t kTile = kTileRows * 2 * kWidth;
constexpr int64_t kTaskElements = 32768;
constexpr int64_t kMostParts = 64;
constexpr int64_t kGroups = 16;  // from here on a task may keep its channels to itself

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#define FT_SAVED(name, Formula, n, rounds, saved) saved == kOutput,
constexpr bool kByOutput[] = {FT_POINTWISE(FT_SAVED)};
#undef FT_SAVED

const BatchNormKernels<float>& table(float) { return kernels().batch_norm_f32; }
const BatchNormKernels<double>& table(double) { return kernels().batch_norm_f64; }
const PointwiseKernels<float>& formulas_of(float) { return kernels().f32; }
const PointwiseKernels<double>& formulas_of(double) { return kernels().f64; }

// How a tensor is cut: into parts of its rows, and groups of its channels.
struct Cut {
  int64_t rows, channels, inner;
  int64_t group;  // channels of one
  int64_t groups, parts;

  explicit Cut(const BatchNorm& n) : rows(n.rows), channels(n.channels), inner(n.inner) {
    // Channels last, or so narrow rows: all channels of some rows. Else channel by channel.
    group = inner == 1 ? channels : ceil_div(kWidth, inner);
    if (group > channels) group = channels;
    groups = ceil_div(channels, group);
    parts = 1;
    if (grouped()) return;
    parts = rows * channels * inner / kTaskElements / groups;
    if (parts > kMostParts) parts = kMostParts;
    if (parts > rows) parts = rows;
    if (parts < 1) parts = 1;
  }
  bool grouped() const { return groups >= kGroups; }
  int64_t tasks() const { return parts * groups; }
};

// `rows` runs of n elements from `offset` on, `stride` apart; the first element is of `column`, the
// first run of memory row `row`.
struct Tile {
  int64_t offset, rows, stride, n, column, row;
};

// The elements of one task.
struct Task {
  const BatchNorm& call;
  int64_t part, first_row, last_row, first_channel, last_channel;
  int64_t columns;  // the channels of a task's elements repeat after so many, at most
  bool periodic, lanes;
  int64_t tile_rows;

  Task(const BatchNorm& n, const Cut& cut, int64_t task) : call(n) {
    part = task / cut.groups;
    first_row = cut.rows * part / cut.parts;
    last_row = cut.rows * (part + 1) / cut.parts;
    first_channel = task % cut.groups * cut.group;
    last_channel = smaller(cut.channels, first_channel + cut.group);
    const int64_t width = (last_channel - first_channel) * n.inner;
    const bool whole_rows = width == n.channels * n.inner;
    tile_rows = n.branch_scale == nullptr ? kTileRows : 1;
    lanes = last_channel - first_channel == 1 && n.inner > kWidth;
    // Whole rows follow each other: some of them make one run, unless samples are told apart.
    periodic = !lanes && whole_rows && width <= kWidth && n.branch_scale == nullptr;
    columns = lanes ? kWidth : periodic ? kWidth / width * width : width;
  }

  int64_t channel_of(int64_t column) const {
    if (lanes) return first_channel;
    const int64_t width = (last_channel - first_channel) * call.inner;
    return first_channel + column % width / call.inner;
  }

  template <class Visit>
  void flat(int64_t offset, int64_t n, int64_t run, int64_t row, const Visit& visit) const {
    for (int64_t i = 0; i < n;) {
      const int64_t runs = smaller(kTileRows, (n - i) / run);
      const int64_t length = runs > 0 ? run : n - i;
      visit(Tile{offset + i, runs > 0 ? runs : 1, length, length, 0, row});
      i += (runs > 0 ? runs : 1) * length;
    }
  }

  template <class Visit>
  void visit(const Visit& visit) const {
    const int64_t row_size = call.channels * call.inner;
    if (periodic)
      return flat(first_row * row_size, (last_row - first_row) * row_size, columns, first_row,
                  visit);
    if (lanes) {
      for (int64_t row = first_row; row < last_row; ++row)
        flat(row * row_size + first_channel * call.inner, call.inner, kWidth, row, visit);
      return;
    }
    // A last piece of up to twice the width, rather than one of a few elements.
    for (int64_t row = first_row; row < last_row; row += tile_rows) {
      const int64_t rows = smaller(tile_rows, last_row - row);
      for (int64_t column = 0; column < columns;) {
        const int64_t left = columns - column;
        const int64_t n = left < 2 * kWidth ? left : kWidth;
        visit(Tile{row * row_size + first_channel * call.inner + column, rows, row_size, n, column,
                   row});
        column += n;
      }
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
  alignas(64) T x_buffer[kTile], g_buffer[kTile], saved_buffer[kTile], work[kTile];

  explicit Worker(const Task& task)
      : task(task), call(task.call), k(table(T())), formulas(formulas_of(T())) {
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
    return call.branch_scale == nullptr ? T(1)
                                        : at<T>(call.branch_scale, t.row / call.rows_a_sample);
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
    double* first = shares + 2 * task.part * call.channels;
    double* second = first + call.channels;
    for (int64_t c = task.first_channel; c < task.last_channel; ++c) first[c] = second[c] = 0;
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
    task.visit([&](const Tile& t) {
      k.collect(read(call.x, t, x_buffer), t.rows, t.n, mean.data() + (mean.empty() ? 0 : t.column),
                sums.data() + t.column, slopes.data() + t.column);
    });
    leave_sums(shares);
  }

  // What double data are centred by: the first element of the channel.
  static double center_of(const BatchNorm& call, int64_t channel) {
    if (sizeof(T) != sizeof(double)) return 0;
    const double first = static_cast<const double*>(call.x)[channel * call.inner];
    return first - first == 0 ? first : 0;
  }

  void normalise(const BatchNormForward& f) {
    fill_forward();
    task.visit([&](const Tile& t) {
      const Run<T> y = target(f.y, t);
      k.normalise(read(call.x, t, x_buffer), read(f.residual, t, saved_buffer), y, t.rows, t.n,
                  mean.data() + t.column, scale.data() + t.column, bias.data() + t.column,
                  factor(t));
      activate(y, t);
      if (kNarrow) store({y.data, y.stride}, f.y, t);
    });
  }

  // grad f'(s) of a tile.
  Run<const T> gradient(const BatchNormBackward& b, Run<const T> x, const Tile& t) {
    const Run<const T> g = read(b.grad, t, g_buffer);
    if (call.op < 0) return g;
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
    if (g.stride == t.n && saved.stride == t.n)
      f(g.data, saved.data, work, t.rows * t.n, parameters);
    else
      for (int64_t row = 0; row < t.rows; ++row)
        f(g.data + row * g.stride, saved.data + row * saved.stride, work + row * t.n, t.n,
          parameters);
    return {work, t.n};
  }

  void reduce(const BatchNormBackward& b, double* shares) {
    fill_forward();
    clear_sums();
    task.visit([&](const Tile& t) {
      const Run<const T> x = read(call.x, t, x_buffer);
      const Run<const T> g = gradient(b, x, t);
      if (b.grad_residual != nullptr) store(g, b.grad_residual, t);
      k.reduce(x, g, t.rows, t.n, mean.data() + t.column, factor(t), sums.data() + t.column,
               slopes.data() + t.column);
    });
    leave_sums(shares);
  }

  // `ready`: b.grad_residual is there, and is what to go on from.
  void grad_input(const BatchNormBackward& b, bool ready) {
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
    const bool needs_x = !ready && call.op >= 0 && (!kByOutput[call.op] || b.saved == nullptr);
    task.visit([&](const Tile& t) {
      const Run<const T> x = read(needs_x || x_data != nullptr ? call.x : nullptr, t, x_buffer);
      const Run<const T> g = ready ? read(b.grad_residual, t, g_buffer) : gradient(b, x, t);
      if (!ready && b.grad_residual != nullptr) store(g, b.grad_residual, t);
      if (b.grad_input == nullptr) return;
      const Run<T> out = target(b.grad_input, t);
      k.grad_input(x_data != nullptr ? x : Run<const T>{nullptr, 0}, g, out, t.rows, t.n,
                   mean.data() + t.column, scale.data() + t.column, average.data() + t.column,
                   slope.data() + t.column, factor(t));
      if (kNarrow) store({out.data, out.stride}, b.grad_input, t);
    });
  }
};

// Sums of all parts, in their order.
double sum_shares(const BatchNorm& n, const BatchNormWork& work, int64_t which, int64_t channel) {
  double sum = 0;
  const int64_t parts = work.share_count / (2 * n.channels);
  for (int64_t part = 0; part < parts; ++part)
    sum += work.shares[(2 * part + which) * n.channels + channel];
  return sum;
}

template <class T>
void write(void* p, int64_t i, double value) {
  if (p != nullptr) static_cast<T*>(p)[i] = static_cast<T>(value);
}

template <class T>
void settle_channels(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormWork& work,
                     int64_t first, int64_t last) {
  const double count = double(n.rows) * double(n.inner);
  for (int64_t c = first; c < last; ++c) {
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
void settle_channels(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work,
                     int64_t first, int64_t last) {
  for (int64_t c = first; c < last; ++c) {
    b.sums[c] = sum_shares(n, work, 0, c);
    b.sums[n.channels + c] = sum_shares(n, work, 1, c) * double(at<T>(n.invstd, c));
    write<T>(b.grad_bias, c, b.sums[c]);
    write<T>(b.grad_weight, c, b.sums[n.channels + c]);
  }
}

// Calls f with a worker of each task, in the order that is asked for.
template <class T, bool kNarrow, class F>
void each_task(const BatchNorm& n, int64_t first, int64_t last, bool backwards, const F& f) {
  const Cut cut(n);
  for (int64_t i = first; i < last; ++i) {
    const Task task(n, cut, backwards ? first + last - 1 - i : i);
    Worker<T, kNarrow> worker(task);
    f(worker);
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
void settle_all(const BatchNorm& n, const What& what, const BatchNormWork& work, int64_t first,
                int64_t last) {
  if (n.dtype == Dtype::kFloat64)
    settle_channels<double>(n, what, work, first, last);
  else
    settle_channels<float>(n, what, work, first, last);
}

}  // namespace

BatchNormWork batch_norm_work(const BatchNorm& n) {
  const Cut cut(n);
  return {cut.tasks(), cut.grouped(), 2 * cut.parts * n.channels, nullptr};
}

void statistics(const BatchNorm& n, const BatchNormWork& work, int64_t first, int64_t last) {
  each(n, first, last, false, [&](auto& worker) { worker.statistics(work.shares); });
}
void settle(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormWork& work) {
  settle_all(n, s, work, 0, n.channels);
}
void forward(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f,
             const BatchNormWork& work, int64_t first, int64_t last) {
  each(n, first, last, false, [&](auto& worker) {
    worker.statistics(work.shares);
    settle_all(n, s, work, worker.task.first_channel, worker.task.last_channel);
    worker.normalise(f);
  });
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
void normalise(const BatchNorm& n, const BatchNormForward& f, const BatchNormWork& work,
               int64_t first, int64_t last) {
  each(n, first, last, !work.grouped, [&](auto& worker) { worker.normalise(f); });
}
void reduce(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work,
            int64_t first, int64_t last) {
  each(n, first, last, false, [&](auto& worker) { worker.reduce(b, work.shares); });
}
void settle(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work) {
  settle_all(n, b, work, 0, n.channels);
}
void grad_input(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work,
                int64_t first, int64_t last) {
  each(n, first, last, !work.grouped, [&](auto& worker) { worker.grad_input(b, false); });
}
void backward(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work,
              int64_t first, int64_t last) {
  each(n, first, last, false, [&](auto& worker) {
    worker.reduce(b, work.shares);
    settle_all(n, b, work, worker.task.first_channel, worker.task.last_channel);
    // Of 16-bit data it has been rounded.
    const bool ready = b.grad_residual != nullptr && n.dtype <= Dtype::kFloat64;
    worker.grad_input(b, ready);
  });
}

}  // namespace cpu
}  // namespace fusedtrain
