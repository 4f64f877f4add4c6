// Batch norm over the tasks and tiles of a tensor. A tile is a few runs of elements in the cache:
// the loops of batch_norm.h go over it. Formulas that are not compiled into them take turns with
// the norm on it; 16-bit data are then converted on its edges.
#include <math.h>
#include <string.h>

#include <type_traits>

#include "../formulas.h"
#include "batch_norm_tiles.h"
#include "kernels.h"

namespace fusedtrain {
namespace cpu {
namespace {

#define FT_SAVED(name, Formula, n, rounds, saved) saved == kOutput,
constexpr bool kByOutput[] = {FT_POINTWISE(FT_SAVED)};
#undef FT_SAVED

template <class T>
T at(const void* p, int64_t i) {
  return p == nullptr ? T(0) : static_cast<const T*>(p)[i];
}

// The kernels of numbers T stored as S, and those of numbers alone.
const BatchNormLayouts<float, float>& kernels_of(Dtype, float, float) { return kernels().norm_f32; }
const BatchNormLayouts<double, double>& kernels_of(Dtype, double, double) {
  return kernels().norm_f64;
}
const BatchNormLayouts<uint16_t, float>& kernels_of(Dtype dtype, uint16_t, float) {
  return dtype == Dtype::kFloat16 ? kernels().norm_f16 : kernels().norm_bf16;
}
const PointwiseKernels<float>& formulas_of(float) { return kernels().f32; }
const PointwiseKernels<double>& formulas_of(double) { return kernels().f64; }

// Works on the tasks of a thread in type T, stored as S.
template <class S, class T>
struct Worker {
  static constexpr bool kNarrow = sizeof(S) != sizeof(T);

  Task task;
  const BatchNorm& call;
  const BatchNormKernels<S, T>& stored;
  const BatchNormKernels<T, T>& numbers;
  const PointwiseKernels<T>& formulas;
  Format format;
  double parameters[kMaxParameters] = {};
  Array<T> mean, scale, bias, average, slope;
  Array<T> ones, factor_scale;
  Array<T> sums, slopes;  // of the last few runs
  Array<double> all_sums, all_slopes;
  int64_t runs = 0;  // that are in `sums`
  alignas(64) T x_buffer[2 * kTile], g_buffer[2 * kTile], saved_buffer[2 * kTile], work[2 * kTile];

  template <class Layouts>
  static const auto& of_layout(const Layouts& layouts, const Task& task) {
    return task.by_row ? layouts.by_row : layouts.by_column;
  }
  explicit Worker(const BatchNorm& n)
      : task(n),
        call(n),
        stored(of_layout(kernels_of(n.dtype, S(), T()), task)),
        numbers(of_layout(kernels_of(n.dtype, T(), T()), task)),
        formulas(formulas_of(T())) {
    if (kNarrow) format = format_of(call.dtype);
    if (call.op >= 0) round_parameters(call.op, call.dtype, call.parameters, parameters);
  }

  // A tile where it is stored.
  template <class Data>
  auto place(Data* base, const Tile& t) const {
    using Element = std::conditional_t<std::is_const<Data>::value, const S, S>;
    Element* data = static_cast<Element*>(base);
    return Run<Element>{data == nullptr ? nullptr : data + t.offset, t.stride};
  }
  // A tile as numbers.
  Run<const T> read(const void* base, const Tile& t, T* buffer) const {
    const Run<const S> from = place(base, t);
    if constexpr (kNarrow) {
      if (base == nullptr) return {nullptr, 0};
      for (int64_t row = 0; row < t.rows; ++row)
        format.load(from.data + row * from.stride, buffer + row * t.n, t.n);
      return {buffer, t.n};
    } else {
      (void)buffer;
      return from;
    }
  }
  // Where to compute what is to be stored, and the storing of it.
  Run<T> target(void* base, const Tile& t) {
    if constexpr (kNarrow)
      return {work, t.n};
    else
      return place(base, t);
  }
  void store(Run<const T> from, void* base, const Tile& t) const {
    if constexpr (kNarrow) {
      const Run<S> to = place(base, t);
      for (int64_t row = 0; row < t.rows; ++row)
        format.store(from.data + row * from.stride, to.data + row * to.stride, t.n);
    }
  }
  void copy(const void* from, void* to, const Tile& t) const {
    const Run<const S> in = place(from, t);
    const Run<S> out = place(to, t);
    for (int64_t row = 0; row < t.rows; ++row)
      memcpy(out.data + row * out.stride, in.data + row * in.stride, t.n * sizeof(S));
  }

  bool by_sample() const { return call.branch_scale != nullptr; }

  // What the loops over a tile have in common.
  template <class Element>
  NormTile<Element, T> operands(const Tile& t) const {
    NormTile<Element, T> o = {};
    o.rows = t.rows;
    o.n = t.n;
    o.mean = &mean[t.column];
    o.scale = &scale[t.column];
    o.bias = &bias[t.column];
    o.factor = by_sample() ? at<T>(call.branch_scale, t.sample) : T(1);
    o.parameters = parameters;
    return o;
  }

  // y = f(y), in place.
  void activate(Run<T> y, const Tile& t) const {
    for (int64_t row = 0; row < t.rows; ++row)
      formulas.forward[call.op](y.data + row * y.stride, y.data + row * y.stride, t.n, parameters);
  }

  void fill_forward() {
    for (Array<T>* a : {&mean, &scale, &bias}) a->assign(task.columns, T(0));
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
    all_sums.assign(task.columns, 0.0);
    all_slopes.assign(task.columns, 0.0);
    sums.assign(task.columns, T(0));
    slopes.assign(task.columns, T(0));
    runs = 0;
  }
  void add_sums(int64_t begin, int64_t end) {
    stored.move_sums(&sums[begin], &all_sums[begin], end - begin);
    stored.move_sums(&slopes[begin], &all_slopes[begin], end - begin);
  }
  // Runs of a plane are sums of many elements, and are added at once.
  void count_sums(const Tile& t) {
    if (task.by_row) return add_sums(t.column, t.column + t.rows);
    if (t.column == 0) runs += t.rows;
    if (runs < kRunsOfSums || t.column + t.n < task.columns) return;
    add_sums(0, task.columns);
    runs = 0;
  }
  void leave_sums(double* shares) {
    add_sums(0, task.columns);
    double* first = shares;
    double* second = first + call.channels;
    for (int64_t c = 0; c < call.channels; ++c) {
      first[c] = all_sums[c];
      second[c] = all_slopes[c];
    }
    for (int64_t i = call.channels; i < task.columns; i += call.channels)
      for (int64_t c = 0; c < call.channels; ++c) {
        first[c] += all_sums[i + c];
        second[c] += all_slopes[i + c];
      }
  }

  void fill_centers(const BatchNormStatistics& s) {
    for (Array<T>* a : {&mean, &scale, &bias}) a->assign(task.columns, T(0));
    for (int64_t i = 0; i < task.columns; ++i) mean[i] = T(s.average[task.channel_of(i)]);
  }
  void statistics(double* shares) {
    clear_sums();
    task.visit(true, false, [&](const Tile& t) {
      NormTile<S, T> o = operands<S>(t);
      o.x = place(call.x, t);
      o.sums = &sums[t.column];
      o.slopes = &slopes[t.column];
      stored.collect(o);
      count_sums(t);
    });
    leave_sums(shares);
  }

  void normalise(const BatchNormForward& f) {
    const auto loop = call.op < 0 ? stored.normalise : stored.forward[call.op];
    task.visit(false, by_sample(), [&](const Tile& t) {
      if (loop != nullptr) {
        NormTile<S, T> o = operands<S>(t);
        o.x = place(call.x, t);
        o.saved = place(f.residual, t);
        o.out = place(f.y, t);
        return loop(o);
      }
      NormTile<T, T> o = operands<T>(t);
      o.x = read(call.x, t, x_buffer);
      o.saved = read(f.residual, t, saved_buffer);
      o.out = target(f.y, t);
      numbers.normalise(o);
      activate(o.out, t);
      store({o.out.data, o.out.stride}, f.y, t);
    });
  }

  void fill_restore() {
    fill_forward();
    for (int64_t i = 0; i < task.columns; ++i) scale[i] = T(1) / scale[i];
  }
  void restore(const BatchNormRestore& r) {
    task.visit(false, false, [&](const Tile& t) {
      NormTile<S, T> o = operands<S>(t);
      o.x = place(call.x, t);
      o.out = place(r.x, t);
      o.factor = T(1) / T(r.slope);
      o.parameters = &r.largest;
      stored.restore(o);
    });
  }

  // grad f'(s) of a tile, in turns; also stored to b.grad_residual, where that is not null.
  Run<const T> gradient(const BatchNormBackward& b, Run<const T> x, const Tile& t) {
    const bool by_output = kByOutput[call.op];
    const Run<const T> g = read(b.grad, t, g_buffer);
    Run<const T> saved = read(b.saved, t, saved_buffer);
    if (!by_output || b.saved == nullptr) {
      NormTile<T, T> o = operands<T>(t);
      o.x = x;
      o.saved = saved;
      o.out = {work, t.n};
      numbers.normalise(o);
      if (by_output) activate(o.out, t);
      saved = {work, t.n};
    }
    const Run<T> out = b.grad_residual != nullptr ? target(b.grad_residual, t) : Run<T>{work, t.n};
    for (int64_t row = 0; row < t.rows; ++row)
      formulas.backward[call.op](g.data + row * g.stride, saved.data + row * saved.stride,
                                 out.data + row * out.stride, t.n, parameters);
    if (b.grad_residual != nullptr) store({out.data, out.stride}, b.grad_residual, t);
    return {out.data, out.stride};
  }

  // With fixed statistics no gradient of the input depends on the sums: it is there at once.
  static bool at_once(const BatchNormBackward& b) {
    return b.averages == nullptr && b.grad_input != nullptr && b.grad_residual == nullptr;
  }
  void fill_reduce() {
    fill_forward();
    ones.assign(task.columns, T(1));
    factor_scale.assign(task.columns, T(0));
  }
  const T* out_scale(const BatchNormBackward& b, const Tile& t, int64_t count) {
    if (!at_once(b)) return &ones[t.column];
    if (!by_sample()) return &scale[t.column];
    const T factor = at<T>(call.branch_scale, t.sample);
    for (int64_t i = t.column; i < t.column + count; ++i) factor_scale[i] = factor * scale[i];
    return &factor_scale[t.column];
  }
  void reduce(const BatchNormBackward& b, double* shares) {
    const auto loop = call.op < 0 ? stored.reduce : stored.backward[call.op];
    void* const out = at_once(b) ? b.grad_input : b.grad_residual;
    clear_sums();
    task.visit(true, by_sample(), [&](const Tile& t) {
      if (loop != nullptr) {
        NormTile<S, T> o = operands<S>(t);
        o.x = place(call.x, t);
        o.grad = place(b.grad, t);
        o.saved = place(b.saved, t);
        o.out = out != nullptr ? place(out, t) : Run<S>{reinterpret_cast<S*>(work), t.n};
        o.out_scale = out_scale(b, t, task.by_row ? t.rows : t.n);
        o.sums = &sums[t.column];
        o.slopes = &slopes[t.column];
        loop(o);
        if (call.op < 0 && at_once(b)) {
          o.x = {nullptr, 0};
          stored.grad_input(o, o.mean, o.mean);
        } else if (call.op < 0 && out != nullptr) {
          copy(b.grad, out, t);
        }
      } else {
        NormTile<T, T> o = operands<T>(t);
        o.x = read(call.x, t, x_buffer);
        o.grad = gradient(b, o.x, t);
        o.sums = &sums[t.column];
        o.slopes = &slopes[t.column];
        numbers.reduce(o);
        if (at_once(b)) {
          o.x = {nullptr, 0};
          o.out = target(b.grad_input, t);
          numbers.grad_input(o, o.mean, o.mean);
          store({o.out.data, o.out.stride}, b.grad_input, t);
        }
      }
      count_sums(t);
    });
    leave_sums(shares);
  }

  void fill_backward(const BatchNormBackward& b) {
    fill_forward();
    average.assign(task.columns, T(0));
    slope.assign(task.columns, T(0));
    for (int64_t i = 0; b.averages != nullptr && i < task.columns; ++i) {
      const int64_t c = task.channel_of(i);
      const double invstd = double(at<T>(call.invstd, c));
      average[i] = T(b.averages[c] / b.count);
      slope[i] = T(b.averages[call.channels + c] / b.count * invstd * double(scale[i]));
    }
  }
  void grad_input(const BatchNormBackward& b) {
    const bool corrected = b.averages != nullptr;
    const void* ready = call.op < 0 ? b.grad : b.ready;
    task.visit(false, by_sample(), [&](const Tile& t) {
      if (ready != nullptr) {
        if (b.grad_residual != nullptr) copy(ready, b.grad_residual, t);
        if (b.grad_input == nullptr) return;
        NormTile<S, T> o = operands<S>(t);
        if (corrected) o.x = place(call.x, t);
        o.grad = place(ready, t);
        o.out = place(b.grad_input, t);
        return stored.grad_input(o, &average[t.column], &slope[t.column]);
      }
      const Run<const T> x = read(call.x, t, x_buffer), g = gradient(b, x, t);
      if (b.grad_input == nullptr) return;
      NormTile<T, T> o = operands<T>(t);
      if (corrected) o.x = x;
      o.grad = g;
      o.out = target(b.grad_input, t);
      numbers.grad_input(o, &average[t.column], &slope[t.column]);
      store({o.out.data, o.out.stride}, b.grad_input, t);
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

// What the data of the channels are centred by, a guess of their mean: the median of three elements
// from where an image has no border.
template <class Read>
void guess_means(const BatchNorm& n, double* means, const Read& read) {
  static constexpr double kProbes[] = {0.29, 0.53, 0.83};
  int64_t index[3];  // of channel 0
  for (int i = 0; i < 3; ++i) {
    const int64_t k = int64_t(kProbes[i] * double(n.rows * n.inner));
    index[i] = k / n.inner * n.channels * n.inner + k % n.inner;
  }
  for (int64_t c = 0; c < n.channels; ++c) {
    const double x = read(index[0] + c * n.inner), y = read(index[1] + c * n.inner);
    const double z = read(index[2] + c * n.inner);
    const double low = x < y ? x : y, high = x < y ? y : x;
    const double median = z < low ? low : z > high ? high : z;
    means[c] = median - median == 0 ? median : 0;
  }
}

// Whether the guess of a mean was so far from it that the variance, a difference, lost digits: then
// a second look, with the mean that was found, mends it.
bool is_far(double distance, double variance) { return distance * distance > 64 * variance; }

template <class T>
void settle_channels(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormWork& work) {
  const double count = double(n.rows) * double(n.inner);
  for (int64_t c = 0; c < n.channels; ++c) {
    const double sum = sum_shares(n, work, 0, c), squares = sum_shares(n, work, 1, c);
    const double average = sum / count, variance = squares / count - average * average;
    s.average[c] += average;
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

// Calls fill with a worker, then f with it on each task and the task's number, in the order that is
// asked for.
template <class S, class T, class Fill, class F>
void each_task(const BatchNorm& n, int64_t first, int64_t last, bool backwards, const Fill& fill,
               const F& f) {
  Worker<S, T> worker(n);
  fill(worker);
  for (int64_t i = first; i < last; ++i) {
    const int64_t number = backwards ? first + last - 1 - i : i;
    worker.task.take(number);
    f(worker, number);
  }
}
template <class Fill, class F>
void each(const BatchNorm& n, int64_t first, int64_t last, bool backwards, const Fill& fill,
          const F& f) {
  if (n.dtype == Dtype::kFloat64)
    each_task<double, double>(n, first, last, backwards, fill, f);
  else if (n.dtype == Dtype::kFloat32)
    each_task<float, float>(n, first, last, backwards, fill, f);
  else
    each_task<uint16_t, float>(n, first, last, backwards, fill, f);
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

void guess(const BatchNorm& n, const BatchNormStatistics& s) {
  if (n.dtype == Dtype::kFloat64)
    return guess_means(n, s.average, [&](int64_t i) { return at<double>(n.x, i); });
  if (n.dtype == Dtype::kFloat32)
    return guess_means(n, s.average, [&](int64_t i) { return double(at<float>(n.x, i)); });
  const Format format = format_of(n.dtype);
  guess_means(n, s.average, [&](int64_t i) {
    float value;
    format.load(static_cast<const uint16_t*>(n.x) + i, &value, 1);
    return double(value);
  });
}
bool guess_again(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormWork& work) {
  const double count = double(n.rows) * double(n.inner);
  bool any = false;
  for (int64_t c = 0; c < n.channels; ++c) {
    const double distance = sum_shares(n, work, 0, c) / count;
    const double variance = sum_shares(n, work, 1, c) / count - distance * distance;
    if (!is_far(distance, variance)) continue;
    s.average[c] += distance;
    any = true;
  }
  return any;
}
void statistics(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormWork& work,
                int64_t first, int64_t last) {
  each(
      n, first, last, false, [&](auto& worker) { worker.fill_centers(s); },
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
  each(
      n, first, last, true, [](auto& worker) { worker.fill_forward(); },
      [&](auto& worker, int64_t) { worker.normalise(f); });
}
void restore(const BatchNorm& n, const BatchNormRestore& r, int64_t first, int64_t last) {
  each(
      n, first, last, false, [](auto& worker) { worker.fill_restore(); },
      [&](auto& worker, int64_t) { worker.restore(r); });
}
void reduce(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work,
            int64_t first, int64_t last) {
  each(
      n, first, last, false, [](auto& worker) { worker.fill_reduce(); },
      [&](auto& worker, int64_t task) { worker.reduce(b, work.shares + 2 * task * n.channels); });
}
void settle(const BatchNorm& n, const BatchNormBackward& b, const BatchNormWork& work) {
  settle_all(n, b, work);
}
void grad_input(const BatchNorm& n, const BatchNormBackward& b, int64_t first, int64_t last) {
  each(
      n, first, last, true, [&](auto& worker) { worker.fill_backward(b); },
      [&](auto& worker, int64_t) { worker.grad_input(b); });
}

}  // namespace cpu
}  // namespace fusedtrain
