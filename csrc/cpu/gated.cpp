// Gated products, a tile at a time.
#include "../ops/gated.h"
#include "cut.h"
#include "formats.h"

namespace fusedtrain {
namespace cpu {
namespace {

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
template <class S, class T>
bool run_whole(const GatedForward& call, int64_t first, int64_t last, const GatedKernels<S, T>& k) {
  if (call.op < 0 || k.forward[call.op] == nullptr) return false;
  each_piece(call, first, last, [&](int64_t row, int64_t i, int64_t n) {
    k.forward[call.op](static_cast<const S*>(call.gate) + row * call.gate_stride + i,
                       static_cast<const S*>(call.value) + row * call.value_stride + i,
                       static_cast<S*>(call.y) + row * call.n + i, n);
  });
  return true;
}
template <class S, class T>
bool run_whole(const GatedBackward& call, int64_t first, int64_t last,
               const GatedKernels<S, T>& k) {
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
  bool done = false;
  by_dtype(call.dtype, kernels().gated,
           [&](const auto& k) { done = run_whole(call, first, last, k); });
  return done;
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
      table_of(kernels().pointwise, T()).forward[call.op](gate, gates, n, parameters);
      gate = gates;
    }
    table_of(kernels().chain, T()).multiply(gate, value, y, n);
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
      table_of(kernels().pointwise, T()).forward[call.op](gate, opened, n, parameters);
      open = opened;
    }
    T* grad_value = data.room(call.grad_value, at_value, out);
    table_of(kernels().chain, T()).multiply(grad, open, grad_value, n);
    data.write(grad_value, call.grad_value, at_value, n);
    T* grad_gate = data.room(call.grad_gate, at_gate, out);
    if (call.op >= 0) {
      table_of(kernels().chain, T()).multiply(grad, value, products, n);
      const T* saved = takes_output(call.op) ? open : gate;
      table_of(kernels().pointwise, T())
          .backward[call.op](products, saved, grad_gate, n, parameters);
    } else {
      table_of(kernels().chain, T()).multiply(grad, value, grad_gate, n);
    }
    data.write(grad_gate, call.grad_gate, at_gate, n);
  });
}

template <class Call>
void run_all(const Call& call, Parallel parallel) {
  if (call.rows == 0 || call.n == 0) return;
  const int64_t each = rows_a_task(call);
  const int64_t tasks = (call.rows * pieces_of(call) + each - 1) / each;
  in_parts(parallel, tasks, 2, [&](int64_t first, int64_t last) {
    if (run_whole(call, first, last)) return;
    with_numbers(call.dtype, [&](const auto& data) { run(call, first, last, data); });
  });
}

}  // namespace

void compute(const GatedForward& call, Parallel parallel) { run_all(call, parallel); }
void compute(const GatedBackward& call, Parallel parallel) { run_all(call, parallel); }

}  // namespace cpu
}  // namespace fusedtrain
