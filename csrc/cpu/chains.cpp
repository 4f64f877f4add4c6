// Gated products, scaled sums, and bias + activation + dropout, a tile at a time: the steps of a
// chain take turns on data that stay in the first-level cache.
#include <algorithm>
#include <vector>

#include "cut.h"
#include "kernels.h"

namespace fusedtrain {
namespace cpu {
namespace {

constexpr int64_t kTile = 1024;  // elements
// So many rows, and their sums in float are added to those in double.
constexpr int64_t kRowsOfSums = 64;

bool takes_output(int op) {
#define FT_TAKES(name, Formula, n, rounds, saved) saved == kOutput,
  static constexpr bool table[] = {FT_POINTWISE(FT_TAKES)};
#undef FT_TAKES
  return op >= 0 && table[op];
}

// How a dtype is read and written: in place, or by way of a buffer of floats.
template <class T_>
struct Wide {
  using T = T_;
  explicit Wide(Dtype) {}
  const T* read(const void* p, int64_t i, int64_t, T*) const {
    return static_cast<const T*>(p) + i;
  }
  T* room(void* p, int64_t i, T*) const { return static_cast<T*>(p) + i; }
  void write(const T*, void*, int64_t, int64_t) const {}
};
struct Narrow {
  using T = float;
  Format format;
  explicit Narrow(Dtype dtype) : format(format_of(dtype)) {}
  const T* read(const void* p, int64_t i, int64_t n, T* buffer) const {
    format.load(static_cast<const uint16_t*>(p) + i, buffer, n);
    return buffer;
  }
  T* room(void*, int64_t, T* buffer) const { return buffer; }
  void write(const T* from, void* p, int64_t i, int64_t n) const {
    format.store(from, static_cast<uint16_t*>(p) + i, n);
  }
};

const PointwiseKernels<float>& formulas_of(float) { return kernels().f32; }
const PointwiseKernels<double>& formulas_of(double) { return kernels().f64; }
const ChainKernels<float>& loops_of(float) { return kernels().chain_f32; }
const ChainKernels<double>& loops_of(double) { return kernels().chain_f64; }

template <class Run>
void by_dtype(Dtype dtype, const Run& run) {
  if (dtype == Dtype::kFloat32) return run(Wide<float>(dtype));
  if (dtype == Dtype::kFloat64) return run(Wide<double>(dtype));
  run(Narrow(dtype));
}

// --- gated products ---

int64_t rows_a_task(const Gated& call) { return call.n >= kTask ? 1 : kTask / call.n; }
int64_t pieces_of(const Gated& call) { return (call.n + kTask - 1) / kTask; }

// Calls f(row, start, n) for the pieces of rows in a range of tasks, and for the tiles of these.
template <class F>
void each_piece(const Gated& call, int64_t first, int64_t last, const F& f) {
  const int64_t pieces = pieces_of(call), each = rows_a_task(call);
  last = smaller(last * each, call.rows * pieces);
  for (int64_t piece = first * each; piece < last; ++piece) {
    const int64_t row = piece / pieces, start = piece % pieces * kTask;
    f(row, start, smaller(call.n - start, kTask));
  }
}
template <class F>
void each_tile(const Gated& call, int64_t first, int64_t last, const F& f) {
  each_piece(call, first, last, [&](int64_t row, int64_t start, int64_t length) {
    for (int64_t i = 0; i < length; i += kTile) f(row, start + i, smaller(kTile, length - i));
  });
}

// Where formula and product are one loop.
template <class S>
bool run_whole(const GatedForward& call, int64_t first, int64_t last, const GatedKernels<S>& k) {
  if (call.op < 0 || k.forward[call.op] == nullptr) return false;
  each_piece(call, first, last, [&](int64_t row, int64_t i, int64_t n) {
    k.forward[call.op](static_cast<const S*>(call.gate) + row * call.gate_stride + i,
                       static_cast<const S*>(call.value) + row * call.value_stride + i,
                       static_cast<S*>(call.y) + row * call.n + i, n);
  });
  return true;
}
template <class S>
bool run_whole(const GatedBackward& call, int64_t first, int64_t last, const GatedKernels<S>& k) {
  if (call.op < 0 || k.backward[call.op] == nullptr) return false;
  each_piece(call, first, last, [&](int64_t row, int64_t i, int64_t n) {
    k.backward[call.op](static_cast<const S*>(call.grad) + row * call.n + i,
                        static_cast<const S*>(call.gate) + row * call.gate_stride + i,
                        static_cast<const S*>(call.value) + row * call.value_stride + i,
                        static_cast<S*>(call.grad_gate) + row * call.grad_gate_stride + i,
                        static_cast<S*>(call.grad_value) + row * call.grad_value_stride + i, n);
  });
  return true;
}
template <class Call>
bool run_whole(const Call& call, int64_t first, int64_t last) {
  const Kernels& k = kernels();
  switch (call.dtype) {
    case Dtype::kFloat32:
      return run_whole(call, first, last, k.gated_f32);
    case Dtype::kFloat64:
      return run_whole(call, first, last, k.gated_f64);
    case Dtype::kFloat16:
      return run_whole(call, first, last, k.gated_f16);
    case Dtype::kBFloat16:
      return run_whole(call, first, last, k.gated_bf16);
  }
  return false;
}

template <class Data>
void run(const GatedForward& call, int64_t first, int64_t last, const Data& data) {
  using T = typename Data::T;
  double parameters[kMaxParameters];
  if (call.op >= 0) round_parameters(call.op, call.dtype, call.parameters, parameters);
  alignas(64) T gates[kTile], values[kTile], products[kTile];
  each_tile(call, first, last, [&](int64_t row, int64_t i, int64_t n) {
    const T* gate = data.read(call.gate, row * call.gate_stride + i, n, gates);
    const T* value = data.read(call.value, row * call.value_stride + i, n, values);
    T* y = data.room(call.y, row * call.n + i, products);
    if (call.op >= 0) {
      formulas_of(T()).forward[call.op](gate, gates, n, parameters);
      gate = gates;
    }
    loops_of(T()).multiply(gate, value, y, n);
    data.write(y, call.y, row * call.n + i, n);
  });
}

template <class Data>
void run(const GatedBackward& call, int64_t first, int64_t last, const Data& data) {
  using T = typename Data::T;
  double parameters[kMaxParameters];
  if (call.op >= 0) round_parameters(call.op, call.dtype, call.parameters, parameters);
  alignas(64) T gates[kTile], values[kTile], grads[kTile], opened[kTile], products[kTile],
      out[kTile];
  each_tile(call, first, last, [&](int64_t row, int64_t i, int64_t n) {
    const T* gate = data.read(call.gate, row * call.gate_stride + i, n, gates);
    const T* value = data.read(call.value, row * call.value_stride + i, n, values);
    const T* grad = data.read(call.grad, row * call.n + i, n, grads);
    const int64_t at_value = row * call.grad_value_stride + i;
    const int64_t at_gate = row * call.grad_gate_stride + i;
    const T* open = gate;
    if (call.op >= 0) {
      formulas_of(T()).forward[call.op](gate, opened, n, parameters);
      open = opened;
    }
    T* grad_value = data.room(call.grad_value, at_value, out);
    loops_of(T()).multiply(grad, open, grad_value, n);
    data.write(grad_value, call.grad_value, at_value, n);
    T* grad_gate = data.room(call.grad_gate, at_gate, out);
    if (call.op >= 0) {
      loops_of(T()).multiply(grad, value, products, n);
      const T* saved = takes_output(call.op) ? open : gate;
      formulas_of(T()).backward[call.op](products, saved, grad_gate, n, parameters);
    } else {
      loops_of(T()).multiply(grad, value, grad_gate, n);
    }
    data.write(grad_gate, call.grad_gate, at_gate, n);
  });
}

// --- tensors with channels ---

// Calls visit(i, n, coefficient, step, share) for the runs of a range of tasks.
template <class Visit>
void each_run(const Channels& shape, int64_t first, int64_t last, const Visit& visit,
              int64_t longest = kTile) {
  const Cut cut{shape.rows, shape.channels, shape.inner};
  const int64_t tasks = cut.tasks(), size = shape.rows * shape.channels * shape.inner;
  for (int64_t task = first; task < last; ++task) {
    const int64_t sample = task / tasks;
    cut.visit(task % tasks, longest, [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t s) {
      visit(sample * size + i, n, sample * shape.channels + c, step, sample * cut.shares() + s);
    });
  }
}

// Scaled sums. Numbers T are stored as S.
template <class S, class T>
struct Scaled {
  const ScaleKernels<S, T>& loops;
  void (*widen)(const S* in, T* out, int64_t n);

  // Where channels are last and few, rows make runs of up to kTile elements, whose coefficients are
  // repeated: a loop over one short row is mostly its beginning and its end.
  static bool whole_rows(const Channels& shape) {
    return shape.inner == 1 && shape.channels > 1 && shape.channels <= kTile / 2;
  }

  template <class Run>
  void each(const Channels& shape, const void* scale, int64_t first, int64_t last,
            const Run& run) const {
    alignas(64) T scales[kTile + kNormStep] = {};
    const S* given = static_cast<const S*>(scale);
    if (!whole_rows(shape)) {
      const auto visit = [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t s) {
        widen(given + c, scales, step ? n : 1);
        run(i, n, scales, step, s, step ? n : 1);
      };
      // One coefficient: nothing to hold in a buffer.
      const bool by_channel = shape.inner == 1 && shape.channels > 1;
      each_run(shape, first, last, visit, by_channel ? kTile : kTask);
      return;
    }
    const Cut cut{shape.rows, shape.channels, 1};
    const int64_t tasks = cut.tasks(), together = kTile / shape.channels;
    int64_t known = -1;
    for (int64_t task = first; task < last; ++task) {
      const int64_t sample = task / tasks, part = task % tasks;
      if (sample != known)
        for (int64_t k = 0; k < together; ++k)
          widen(given + sample * shape.channels, scales + k * shape.channels, shape.channels);
      known = sample;
      const int64_t stop = smaller(shape.rows, (part + 1) * cut.rows_a_task());
      for (int64_t row = part * cut.rows_a_task(); row < stop; row += together)
        run((sample * shape.rows + row) * shape.channels,
            smaller(together, stop - row) * shape.channels, scales, 1, task * shape.channels,
            shape.channels);
    }
  }

  void forward(const ScaleForward& call, int64_t first, int64_t last) const {
    const S* residual = static_cast<const S*>(call.residual);
    each(call.shape, call.scale, first, last,
         [&](int64_t i, int64_t n, const T* scales, int64_t step, int64_t, int64_t) {
           loops.forward(static_cast<const S*>(call.x) + i, scales, step,
                         residual == nullptr ? nullptr : residual + i, static_cast<S*>(call.y) + i,
                         n);
         });
  }

  void backward(const ScaleBackward& call, int64_t first, int64_t last) const {
    alignas(64) T sums[kTile + kNormStep];
    const S* x = static_cast<const S*>(call.x);
    S* gx = static_cast<S*>(call.grad_input);
    each(call.shape, call.scale, first, last,
         [&](int64_t i, int64_t n, const T* scales, int64_t step, int64_t share, int64_t count) {
           const int64_t used = step ? n + kNormStep : 1;
           if (x != nullptr) std::fill_n(sums, used, T(0));
           loops.backward(static_cast<const S*>(call.grad) + i, x == nullptr ? nullptr : x + i,
                          scales, step, gx == nullptr ? nullptr : gx + i, sums, n);
           if (x == nullptr) return;
           for (int64_t k = 0; k < (step ? n : 1); k += count)
             for (int64_t c = 0; c < count; ++c) call.shares[share + c] += double(sums[k + c]);
         });
  }
};

template <class T>
void copy_of(const T* in, T* out, int64_t n) {
  std::copy_n(in, n, out);
}

template <class Run>
void with_scaled(Dtype dtype, const Run& run) {
  const Kernels& k = kernels();
  switch (dtype) {
    case Dtype::kFloat32:
      return run(Scaled<float, float>{k.scale_f32, copy_of<float>});
    case Dtype::kFloat64:
      return run(Scaled<double, double>{k.scale_f64, copy_of<double>});
    case Dtype::kFloat16:
      return run(Scaled<uint16_t, float>{k.scale_f16, k.from_half});
    case Dtype::kBFloat16:
      return run(Scaled<uint16_t, float>{k.scale_bf16, k.from_bfloat16});
  }
}

// The words for elements [i, i + n); null where nothing is dropped.
const uint32_t* words_for(const BiasAct& call, int64_t i, int64_t n, uint32_t* buffer) {
  if (call.seed == nullptr) return nullptr;
  const int64_t block = i / 4;
  kernels().philox_words(call.seed, block, (i + n + 3) / 4 - block, buffer);
  return buffer + (i - 4 * block);
}

template <class T>
ChainFinish<T> finish_of(const BiasAct& call) {
  return {T(call.gain), T(call.clamp), T(call.seed == nullptr ? 1.0 : call.keep), call.threshold};
}

// Calls visit(i, n, coefficient, step) for the runs of a range of tasks, as each_run, and
// done(n, share) where the sums of n channels are to go to the shares. Where channels are last, it
// goes through all rows of a piece of the channels before the next: its sums stay in the cache.
template <class Visit, class Done>
void each_column(const Channels& shape, int64_t first, int64_t last, const Visit& visit,
                 const Done& done) {
  const Cut cut{shape.rows, shape.channels, shape.inner};
  if (!cut.by_channel()) {
    each_run(shape, first, last, [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t share) {
      visit(i, n, c, step);
      done(1, share);
    });
    return;
  }
  for (int64_t task = first; task < last; ++task) {
    const int64_t stop = smaller(shape.rows, (task + 1) * cut.rows_a_task());
    for (int64_t c = 0; c < shape.channels; c += kTile) {
      const int64_t n = smaller(kTile, shape.channels - c);
      for (int64_t row = task * cut.rows_a_task(); row < stop; row += kRowsOfSums) {
        for (int64_t r = row; r < smaller(stop, row + kRowsOfSums); ++r)
          visit(r * shape.channels + c, n, c, 1);
        done(n, task * shape.channels + c);
      }
    }
  }
}

// A bias of the dtype as numbers; read again only where other channels follow.
template <class Data>
class Bias {
 public:
  using T = typename Data::T;
  Bias(const BiasAct& call, const Data& data) : call_(call), data_(data) {}
  const T* read(int64_t c, int64_t n) {
    if (c != first_ || n > count_) found_ = data_.read(call_.bias, c, n, buffer_);
    first_ = c;
    count_ = n;
    return found_;
  }

 private:
  const BiasAct& call_;
  const Data& data_;
  int64_t first_ = -1, count_ = 0;
  const T* found_ = nullptr;
  alignas(64) T buffer_[kTile];
};

template <class Data>
void run(const BiasActForward& call, int64_t first, int64_t last, const Data& data) {
  using T = typename Data::T;
  double parameters[kMaxParameters];
  if (call.op >= 0) round_parameters(call.op, call.dtype, call.parameters, parameters);
  const ChainFinish<T> finish = finish_of<T>(call);
  // The formula is the last step.
  const bool plain = call.op >= 0 && call.gain == 1 && call.clamp < 0 && call.seed == nullptr;
  alignas(64) T xs[kTile], zs[kTile], ys[kTile];
  alignas(64) uint32_t words[kTile + 8];
  Bias<Data> bias(call, data);
  const auto visit = [&](int64_t i, int64_t n, int64_t c, int64_t step) {
    const T* z = data.read(call.x, i, n, xs);
    T* y = data.room(call.y, i, ys);
    if (call.bias != nullptr) {
      loops_of(T()).bias_add(z, bias.read(c, step ? n : 1), step, zs, n);
      z = zs;
    }
    if (call.op >= 0) {
      formulas_of(T()).forward[call.op](z, plain ? y : zs, n, parameters);
      z = zs;
    }
    if (!plain) loops_of(T()).finish(z, y, n, finish, words_for(call, i, n, words));
    data.write(y, call.y, i, n);
  };
  each_column(call.shape, first, last, visit, [](int64_t, int64_t) {});
}

template <class Data>
void run(const BiasActBackward& call, int64_t first, int64_t last, const Data& data) {
  using T = typename Data::T;
  double parameters[kMaxParameters];
  if (call.op >= 0) round_parameters(call.op, call.dtype, call.parameters, parameters);
  const ChainFinish<T> finish = finish_of<T>(call);
  const bool by_output = takes_output(call.op);
  // Of y, or of f(z).
  const T limit = call.clamp < 0 ? T(-1)
                  : by_output    ? finish.clamp * finish.keep
                                 : T(call.clamp / (call.gain < 0 ? -call.gain : call.gain));
  const ChainFinish<T> undo = {T(1) / (finish.gain * finish.keep), T(-1), T(1), 0};
  const bool plain = call.op >= 0 && call.gain == 1 && call.clamp < 0 && call.seed == nullptr;
  alignas(64) T grads[kTile], saveds[kTile], zs[kTile], edges[kTile], outs[kTile];
  alignas(64) T sums[kTile] = {};
  alignas(64) uint32_t words[kTile + 8];
  Bias<Data> bias(call, data);
  const auto visit = [&](int64_t i, int64_t n, int64_t c, int64_t step) {
    const T* saved = data.read(call.saved, i, n, saveds);
    const T *z = saved, *edge = saved, *g = data.read(call.grad, i, n, grads);
    if (by_output) {
      if (undo.gain != T(1)) {  // f(z), where y is not 0 for having been dropped
        loops_of(T()).finish(saved, zs, n, undo, nullptr);
        z = zs;
      }
    } else {
      if (call.bias != nullptr) {
        loops_of(T()).bias_add(saved, bias.read(c, step ? n : 1), step, zs, n);
        z = edge = zs;
      }
      if (limit >= T(0) && call.op >= 0) {
        formulas_of(T()).forward[call.op](z, edges, n, parameters);
        edge = edges;
      }
    }
    T* gx = data.room(call.grad_input, i, outs);
    if (!plain) {
      loops_of(T()).finish_backward(g, edge, limit, gx, n, finish, words_for(call, i, n, words));
      g = gx;
    }
    if (call.op >= 0) formulas_of(T()).backward[call.op](g, z, gx, n, parameters);
    if (call.grad_bias != nullptr) loops_of(T()).bias_sum(gx, step, sums, n);
    data.write(gx, call.grad_input, i, n);
  };
  each_column(call.shape, first, last, visit, [&](int64_t n, int64_t share) {
    if (call.grad_bias == nullptr) return;
    for (int64_t k = 0; k < n; ++k) call.shares[share + k] += double(sums[k]);
    std::fill_n(sums, n, T(0));
  });
}

}  // namespace

int64_t gated_tasks(const Gated& call) {
  if (call.rows == 0 || call.n == 0) return 0;
  const int64_t each = rows_a_task(call);
  return (call.rows * pieces_of(call) + each - 1) / each;
}
int64_t chain_tasks(const Channels& shape) {
  return shape.samples * Cut{shape.rows, shape.channels, shape.inner}.tasks();
}
int64_t chain_shares(const Channels& shape) {
  return shape.samples * Cut{shape.rows, shape.channels, shape.inner}.shares();
}

// In the order of the shares: the same bits for any number of threads.
void add_chain_shares(const Channels& shape, Dtype dtype, const double* shares, void* sums) {
  const Cut cut{shape.rows, shape.channels, shape.inner};
  const int64_t count = cut.shares();
  std::vector<double> totals(shape.channels);
  for (int64_t sample = 0; sample < shape.samples; ++sample, shares += count) {
    std::fill(totals.begin(), totals.end(), 0.0);
    for (int64_t i = 0; i < count; ++i) totals[cut.channel_of_share(i)] += shares[i];
    for (int64_t c = 0; c < shape.channels; ++c) {
      const int64_t at = sample * shape.channels + c;
      if (dtype == Dtype::kFloat64)
        static_cast<double*>(sums)[at] = totals[c];
      else
        static_cast<float*>(sums)[at] = float(totals[c]);
    }
  }
}

#define FT_CHAIN(name, Call)                                                                 \
  void name(const Call& call, int64_t first_task, int64_t last_task) {                       \
    by_dtype(call.dtype, [&](const auto& data) { run(call, first_task, last_task, data); }); \
  }
#define FT_GATED(Call)                                                                       \
  void gated(const Call& call, int64_t first_task, int64_t last_task) {                      \
    if (run_whole(call, first_task, last_task)) return;                                      \
    by_dtype(call.dtype, [&](const auto& data) { run(call, first_task, last_task, data); }); \
  }
FT_GATED(GatedForward)
FT_GATED(GatedBackward)
#undef FT_GATED
FT_CHAIN(bias_act, BiasActForward)
FT_CHAIN(bias_act, BiasActBackward)
#undef FT_CHAIN
void scale_add(const ScaleForward& call, int64_t first_task, int64_t last_task) {
  with_scaled(call.dtype, [&](const auto& s) { s.forward(call, first_task, last_task); });
}
void scale_add(const ScaleBackward& call, int64_t first_task, int64_t last_task) {
  with_scaled(call.dtype, [&](const auto& s) { s.backward(call, first_task, last_task); });
}

}  // namespace cpu
}  // namespace fusedtrain
