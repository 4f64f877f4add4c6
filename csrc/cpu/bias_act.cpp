// Bias, activation and dropout, a tile at a time.
#include "../ops/bias_act.h"

#include <algorithm>

#include "channels.h"

namespace fusedtrain {
namespace cpu {
namespace {

// So many rows, and their sums in float are added to those in double.
constexpr int64_t kRowsOfSums = 64;

// The numbers that elements [i, i + n) are dropped by; null where nothing is dropped.
const uint32_t* numbers_for(const BiasAct& call, int64_t i, int64_t n, uint32_t* buffer) {
  if (call.seed == nullptr) return nullptr;
  const int64_t step = i / kPhiloxStep, end = (i + n + kPhiloxStep - 1) / kPhiloxStep;
  kernels().philox_numbers(call.seed, step, end - step, buffer);
  return buffer + (i - step * kPhiloxStep);
}
// A run may begin and end within a step.
constexpr int64_t kRoom = kTile + kPhiloxStep;

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
  // The formula is the last step, but for the residual.
  const bool plain = call.op >= 0 && call.gain == 1 && call.clamp < 0 && call.seed == nullptr;
  alignas(64) T xs[kTile], zs[kTile], ys[kTile], residuals[kTile];
  alignas(64) uint32_t numbers[kRoom];
  Bias<Data> bias(call, data);
  const auto visit = [&](int64_t i, int64_t n, int64_t c, int64_t step) {
    const T* z = data.read(call.x, i, n, xs);
    T* y = data.room(call.y, i, ys);
    if (call.bias != nullptr) {
      table_of(kernels().chain, T()).bias_add(z, bias.read(c, step ? n : 1), step, zs, n);
      z = zs;
    }
    if (call.op >= 0) {
      table_of(kernels().pointwise, T()).forward[call.op](z, plain ? y : zs, n, parameters);
      z = zs;
    }
    if (!plain)
      table_of(kernels().chain, T()).finish(z, y, n, finish, numbers_for(call, i, n, numbers));
    if (call.residual != nullptr) {
      const T* residual = data.read(call.residual, i, n, residuals);
      table_of(kernels().chain, T()).bias_add(y, residual, 1, y, n);
    }
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
  // Bound of y, or of f(z).
  const T limit = call.clamp < 0 ? T(-1)
                  : by_output    ? finish.clamp * finish.keep
                                 : T(call.clamp / (call.gain < 0 ? -call.gain : call.gain));
  const ChainFinish<T> undo = {T(1) / (finish.gain * finish.keep), T(-1), T(1), 0};
  const bool plain = call.op >= 0 && call.gain == 1 && call.clamp < 0 && call.seed == nullptr;
  const bool constant = call.op < 0 && call.clamp < 0;  // the derivative, but for the mask
  alignas(64) T grads[kTile], saveds[kTile], zs[kTile], edges[kTile], outs[kTile];
  alignas(64) T sums[kTile] = {};
  alignas(64) uint32_t numbers[kRoom];
  Bias<Data> bias(call, data);
  const auto visit = [&](int64_t i, int64_t n, int64_t c, int64_t step) {
    const T* g = data.read(call.grad, i, n, grads);
    const T* saved = constant ? g : data.read(call.saved, i, n, saveds);
    const T *z = saved, *edge = saved;
    if (by_output) {
      if (undo.gain != T(1)) {  // f(z), where y is not 0 for having been dropped
        table_of(kernels().chain, T()).finish(saved, zs, n, undo, nullptr);
        z = zs;
      }
    } else if (!constant) {
      if (call.bias != nullptr) {
        table_of(kernels().chain, T()).bias_add(saved, bias.read(c, step ? n : 1), step, zs, n);
        z = edge = zs;
      }
      if (limit >= T(0) && call.op >= 0) {
        table_of(kernels().pointwise, T()).forward[call.op](z, edges, n, parameters);
        edge = edges;
      }
    }
    T* gx = data.room(call.grad_input, i, outs);
    if (!plain) {
      table_of(kernels().chain, T())
          .finish_backward(g, edge, limit, gx, n, finish, numbers_for(call, i, n, numbers));
      g = gx;
    }
    if (call.op >= 0) table_of(kernels().pointwise, T()).backward[call.op](g, z, gx, n, parameters);
    if (call.grad_bias != nullptr) table_of(kernels().chain, T()).bias_sum(gx, step, sums, n);
    data.write(gx, call.grad_input, i, n);
  };
  each_column(call.shape, first, last, visit, [&](int64_t n, int64_t share) {
    if (call.grad_bias == nullptr) return;
    for (int64_t k = 0; k < n; ++k) call.shares[share + k] += double(sums[k]);
    std::fill_n(sums, n, T(0));
  });
}

}  // namespace

void compute(const BiasActForward& call, Parallel parallel) {
  with_numbers(call.dtype, [&](const auto& data) {
    in_parts(parallel, tasks_of(call.shape), 2,
             [&](int64_t first, int64_t last) { run(call, first, last, data); });
  });
}
void compute(const BiasActBackward& call, Parallel parallel) {
  with_numbers(call.dtype, [&](const auto& data) {
    run_with_sums(call, call.grad_bias, parallel,
                  [&](const auto& c, int64_t first, int64_t last) { run(c, first, last, data); });
  });
}

}  // namespace cpu
}  // namespace fusedtrain
