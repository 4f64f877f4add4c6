// Work of a thread on its tasks of batch norm, a tile at a time. Formulas that are not compiled
// into the loops of isa/batch_norm.h take turns with the norm; 16-bit data are then converted on
// the edges of the tile.
#pragma once

#include <string.h>

#include <type_traits>

#include "batch_norm_tiles.h"

namespace fusedtrain {
namespace cpu {
namespace {

// Works on the tasks of a thread in type T, stored as S.
template <class S, class T>
struct Worker {
  static constexpr bool kNarrow = sizeof(S) != sizeof(T);

  Task task;
  const BatchNorm& call;
  const BatchNormKernels<S, T>& stored;
  const BatchNormKernels<T, T>& numbers;
  const PointwiseKernels<T, T>& formulas;
  Format format;
  double parameters[kMaxParameters] = {};
  Array<T> mean, scale, bias, average, slope;
  Array<T> ones, factor_scale;
  Array<T> sums, slopes;  // of the last few runs
  Array<double> all_sums, all_slopes;
  int64_t runs = 0;    // that are in `sums`
  bool moved = false;  // whether some are in `all_sums`
  alignas(64) T x_buffer[2 * kTile], g_buffer[2 * kTile], saved_buffer[2 * kTile], work[2 * kTile];

  template <class Layouts>
  static const auto& of_layout(const Layouts& layouts, const Task& task) {
    return task.by_row ? layouts.by_row : layouts.by_column;
  }
  Worker(const BatchNorm& n, const BatchNormLayouts<S, T>& layouts)
      : task(n),
        call(n),
        stored(of_layout(layouts, task)),
        numbers(of_layout(table_of(kernels().norm, T()), task)),
        formulas(table_of(kernels().pointwise, T())) {
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

  static const T* vector(const void* p) { return static_cast<const T*>(p); }
  bool by_sample() const { return call.branch_scale != nullptr; }

  // Operands that the loops over a tile have in common.
  template <class Element>
  NormTile<Element, T> operands(const Tile& t) const {
    NormTile<Element, T> o = {};
    o.rows = t.rows;
    o.n = t.n;
    o.mean = &mean[t.column];
    o.scale = &scale[t.column];
    o.bias = &bias[t.column];
    o.factor = by_sample() ? vector(call.branch_scale)[t.sample] : T(1);
    o.parameters = parameters;
    return o;
  }

  // y = f(y), in place.
  void activate(Run<T> y, const Tile& t) const {
    for (int64_t row = 0; row < t.rows; ++row)
      formulas.forward[call.op](y.data + row * y.stride, y.data + row * y.stride, t.n, parameters);
  }

  void fill_forward() {
    for (Array<T>* a : {&mean, &scale, &bias}) a->allocate(task.columns);
    const T *means = vector(call.mean), *invstd = vector(call.invstd);
    const T *weight = vector(call.weight), *offset = vector(call.bias);
    task.fill(mean, [&](int64_t c) { return means[c]; });
    if (weight != nullptr)
      task.fill(scale, [&](int64_t c) { return invstd[c] * weight[c]; });
    else
      task.fill(scale, [&](int64_t c) { return invstd[c]; });
    if (offset != nullptr)
      task.fill(bias, [&](int64_t c) { return offset[c]; });
    else
      std::fill_n(&bias[0], task.columns, T(0));
  }

  // Shares of a task: two numbers for each of its channels.
  void clear_sums() {
    sums.assign(task.columns, T(0));
    slopes.assign(task.columns, T(0));
    runs = 0;
    moved = false;
  }
  void add_sums(int64_t begin, int64_t end) {
    if (!moved) {
      all_sums.assign(task.columns, 0.0);
      all_slopes.assign(task.columns, 0.0);
      moved = true;
    }
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
    if (!moved) {  // a small tensor
      task.total(sums, shares);
      task.total(slopes, shares + call.channels);
      return;
    }
    add_sums(0, task.columns);
    task.total(all_sums, shares);
    task.total(all_slopes, shares + call.channels);
  }

  void fill_centers(const BatchNormStatistics& s) {
    for (Array<T>* a : {&mean, &scale, &bias}) a->allocate(task.columns);
    task.fill(mean, [&](int64_t c) { return s.average[c]; });
  }
  void statistics(double* shares) {
    clear_sums();
    task.visit(kRowsOfStatistics, false, [&](const Tile& t) {
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
    task.visit(1, by_sample(), [&](const Tile& t) {
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
    task.visit(1, false, [&](const Tile& t) {
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
    const bool by_output = takes_output(call.op);
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
  void fill_reduce(const BatchNormBackward& b) {
    fill_forward();
    if (!at_once(b))
      ones.assign(task.columns, T(1));
    else if (by_sample())
      factor_scale.assign(task.columns, T(0));
  }
  const T* out_scale(const BatchNormBackward& b, const Tile& t, int64_t count) {
    if (!at_once(b)) return &ones[t.column];
    if (!by_sample()) return &scale[t.column];
    const T factor = vector(call.branch_scale)[t.sample];
    for (int64_t i = t.column; i < t.column + count; ++i) factor_scale[i] = factor * scale[i];
    return &factor_scale[t.column];
  }
  void reduce(const BatchNormBackward& b, double* shares) {
    const auto loop = call.op < 0 ? stored.reduce : stored.backward[call.op];
    void* const out = at_once(b) ? b.grad_input : b.grad_residual;
    clear_sums();
    task.visit(1, by_sample(), [&](const Tile& t) {
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
    average.allocate(task.columns);
    slope.allocate(task.columns);
    if (b.averages == nullptr) {
      std::fill_n(&average[0], task.columns, T(0));
      std::fill_n(&slope[0], task.columns, T(0));
      return;
    }
    const T *invstd = vector(call.invstd), *weight = vector(call.weight);
    const double *sum = b.averages, *slopes = b.averages + call.channels;
    task.fill(average, [&](int64_t c) { return sum[c] / b.count; });
    task.fill(slope, [&](int64_t c) {
      const T scale_of = weight == nullptr ? invstd[c] : invstd[c] * weight[c];
      return slopes[c] / b.count * (double(invstd[c]) * double(scale_of));
    });
  }
  void grad_input(const BatchNormBackward& b) {
    const bool corrected = b.averages != nullptr;
    const void* ready = call.op < 0 ? b.grad : b.ready;
    task.visit(1, by_sample(), [&](const Tile& t) {
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

}  // namespace
}  // namespace cpu
}  // namespace fusedtrain
