// The optimizer step over a range of one tensor: converts data that are not of the type that the
// rules compute in, block by block, in buffers that stay in the first-level cache.
#pragma once

#include <math.h>
#include <string.h>

#include "../ops/optimizers.h"
#include "../state_codes.h"
#include "dispatch.h"

namespace fusedtrain {
namespace cpu {
namespace {

// Elements that are converted at a time: so few that all streams of a tensor advance together
// (AdamW on 25 M bfloat16 parameters, one thread: 28 ms with 256, 32 with 512, 41 with 1024, 31
// with 128).
constexpr int64_t kBlock = 256;
static_assert(kBlock % (formulas::kGroup * formulas::kSharedBy) == 0, "codes of a block");
// Elements at a time where none are converted: more, but new values are still near for averages and
// write-back.
constexpr int64_t kDirectBlock = 4096;

int64_t bytes_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}
char* byte_at(void* p, Dtype dtype, int64_t i) {
  return static_cast<char*>(p) + i * bytes_of(dtype);
}

constexpr Dtype own_dtype(float) { return Dtype::kFloat32; }
constexpr Dtype own_dtype(double) { return Dtype::kFloat64; }
template <class T>
const OptimizerKernels<T, T>& table(T) {
  return table_of(kernels().optimizer, T());
}

// n <= kBlock values of any dtype to T and back.
template <class T>
void load(const void* from, Dtype dtype, T* to, int64_t n) {
  float buffer[kBlock];
  switch (dtype) {
    case Dtype::kFloat64:
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(static_cast<const double*>(from)[i]);
      return;
    case Dtype::kFloat32:
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(static_cast<const float*>(from)[i]);
      return;
    default: {
      float* wide = sizeof(T) == sizeof(float) ? reinterpret_cast<float*>(to) : buffer;
      format_of(dtype).load(static_cast<const uint16_t*>(from), wide, n);
      if (sizeof(T) != sizeof(float))
        for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(wide[i]);
    }
  }
}
template <class T>
void store(const T* from, void* to, Dtype dtype, int64_t n) {
  float buffer[kBlock];
  switch (dtype) {
    case Dtype::kFloat64:
      for (int64_t i = 0; i < n; ++i) static_cast<double*>(to)[i] = static_cast<double>(from[i]);
      return;
    case Dtype::kFloat32:
      for (int64_t i = 0; i < n; ++i) static_cast<float*>(to)[i] = static_cast<float>(from[i]);
      return;
    default: {
      const float* wide = reinterpret_cast<const float*>(from);
      if (sizeof(T) != sizeof(float)) {
        for (int64_t i = 0; i < n; ++i) buffer[i] = static_cast<float>(from[i]);
        wide = buffer;
      }
      format_of(dtype).store(wide, static_cast<uint16_t*>(to), n);
    }
  }
}

// A block of one of a tensor's buffers as T: the memory itself where it is of that type.
template <class T>
struct Block {
  alignas(64) T buffer[kBlock];
  T* values;
  char* memory;
  Dtype dtype;

  bool direct() const { return values != buffer; }

  // `copied`: in the buffer in any case.
  void open(void* data, Dtype type, int64_t i, int64_t n, bool copied = false) {
    dtype = type;
    memory = byte_at(data, type, i);
    values = type == own_dtype(T()) && !copied ? reinterpret_cast<T*>(memory) : buffer;
    if (!direct()) load(memory, type, buffer, n);
  }
  void open_empty(int64_t n) {  // reads as 0, keeps nothing
    values = buffer;
    memory = nullptr;
    memset(buffer, 0, n * sizeof(T));
  }
  void close(int64_t n) {
    if (!direct() && memory != nullptr) store(buffer, memory, dtype, n);
  }
};

bool in_double(const OptimizerTensor& t) { return t.param_dtype == Dtype::kFloat64; }

using OptimizerKernels16 = OptimizerKernels<uint16_t, float>;
const OptimizerKernels16& table_16bit(Dtype dtype) {
  return dtype == Dtype::kFloat16 ? kernels().optimizer.f16 : kernels().optimizer.bf16;
}

// The weights that rules compute with: the master, where others have written to the parameter that,
// or parameter and correction joined.
template <class T>
void open_weights(Block<T>& p, const OptimizerTensor& t, int64_t i, int64_t n) {
  if (t.correction_bits != 0) {  // T is float
    const int bytes = t.correction_bits / 8;
    p.open_empty(0);
    table_16bit(t.param_dtype)
        .join[bytes - 1](static_cast<const uint16_t*>(t.param) + i,
                         static_cast<const char*>(t.master) + bytes * i,
                         reinterpret_cast<float*>(p.values), n);
  } else if (t.master != nullptr) {
    p.open(t.master, Dtype::kFloat32, i, n);
    if (t.follows && table_16bit(t.param_dtype)
                         .follow(static_cast<const uint16_t*>(t.param) + i,
                                 reinterpret_cast<const float*>(p.values),
                                 reinterpret_cast<float*>(p.buffer), n))
      p.values = p.buffer;
  } else {
    p.open(t.param, t.param_dtype, i, n);
  }
}

// Writes them where they came from, and the parameter of a master.
template <class T>
void close_weights(Block<T>& p, const OptimizerTensor& t, int64_t i, int64_t n, double key) {
  const float* const weights = reinterpret_cast<const float*>(p.values);  // where there is a key
  if (t.correction_bits != 0) {
    const int bytes = t.correction_bits / 8;
    table_16bit(t.param_dtype)
        .split[bytes - 1](weights, static_cast<uint16_t*>(t.param) + i,
                          static_cast<char*>(t.master) + bytes * i, n, i,
                          static_cast<int64_t>(key));
  } else if (key >= 0) {  // only bfloat16 parameters have one
    kernels().to_bfloat16_stochastic(
        weights, reinterpret_cast<uint16_t*>(byte_at(t.param, t.param_dtype, i)), n, i,
        static_cast<uint32_t>(key));
  } else {
    p.close(n);
    if (t.master != nullptr) store(p.values, byte_at(t.param, t.param_dtype, i), t.param_dtype, n);
  }
}

// States that a tensor has in floats, in codes, or not at all.
template <class T>
void open_state(Block<T>& b, const OptimizerTensor& t, int k, int64_t i, int64_t n) {
  if (t.state[k] == nullptr) return b.open_empty(n);
  if (t.scales[k] == nullptr) return b.open(t.state[k], t.state_dtype[k], i, n);
  b.open_empty(0);  // T is float, and a block begins with a group
  kernels().state_codes.load[t.squares[k]](static_cast<const char*>(t.state[k]) + i,
                                           t.scales[k] + i / formulas::kGroup,
                                           reinterpret_cast<float*>(b.values), n);
}
template <class T>
void close_state(Block<T>& b, const OptimizerTensor& t, int k, int64_t i, int64_t n, double key) {
  if (t.scales[k] == nullptr) return b.close(n);
  const int64_t group = i / formulas::kGroup;
  kernels().state_codes.store[t.squares[k]](
      reinterpret_cast<const float*>(b.values), static_cast<char*>(t.state[k]) + i,
      t.scales[k] + group, n, static_cast<uint32_t>(group), k, static_cast<uint32_t>(key));
}

double unscale(const OptimizerCall& call) {
  // To float at once, as torch's GradScaler rounds it.
  return call.scale == nullptr ? 1.0 : static_cast<float>(1.0 / double(*call.scale));
}

// Calls f(i, n) for the blocks of a chunk.
template <class F>
void by_block(int64_t begin, int64_t end, bool direct, const F& f) {
  const int64_t length = direct ? kDirectBlock : kBlock;
  for (int64_t i = begin; i < end; i += length) f(i, smaller(length, end - i));
}

bool is_direct(const OptimizerTensor& t) {
  const Dtype own = in_double(t) ? Dtype::kFloat64 : Dtype::kFloat32;
  return t.grad_dtype == own &&
         (t.param_dtype == own || (t.master != nullptr && t.correction_bits == 0 && !t.follows));
}

// Whether all that an update works on is of the type that it computes in.
bool is_direct(const OptimizerCall& call, const OptimizerTensor& t, const Coefficients& k) {
  const Dtype own = in_double(t) ? Dtype::kFloat64 : Dtype::kFloat32;
  bool direct = is_direct(t) && t.master == nullptr && call.options->unit_factor == 0;
  for (int s = 0; s < call.states; ++s)
    direct &= t.state[s] != nullptr && t.scales[s] == nullptr && t.state_dtype[s] == own;
  return direct && (k.average == 0 || t.average_dtype == own);
}

template <class T>
void measure_range(const OptimizerCall& call, const OptimizerTensor& t, int64_t begin, int64_t end,
                   double* sums) {
  const T factor = static_cast<T>(unscale(call));
  Block<T> g, p;
  by_block(begin, end, is_direct(t), [&](int64_t i, int64_t n) {
    g.open(t.grad, t.grad_dtype, i, n);
    table(T()).measure(g.values, factor, n, sums);
    if (static_cast<int>(call.options->measures) & kMeasureParameters) {
      double parameter[2] = {};
      open_weights(p, t, i, n);
      table(T()).measure(p.values, T(1), n, parameter);
      sums[2] += parameter[1];
    }
  });
}

template <class T>
void unscale_range(const OptimizerCall& call, const OptimizerTensor& t, int64_t begin,
                   int64_t end) {
  const T factor = static_cast<T>(unscale(call));
  Block<T> g;
  by_block(begin, end, is_direct(t), [&](int64_t i, int64_t n) {
    g.open(t.grad, t.grad_dtype, i, n);
    table(T()).multiply(g.values, factor, n);
    g.close(n);
  });
}

void measure_one(const OptimizerCall& call, const OptimizerTensor& t, int64_t begin, int64_t end,
                 double* sums) {
  if (in_double(t))
    measure_range<double>(call, t, begin, end, sums);
  else
    measure_range<float>(call, t, begin, end, sums);
}

// Gradients of the block become clipped ones, unit by unit.
template <class T>
void clip_units(const OptimizerTensor& t, const double* factors, T* g, int64_t i, int64_t n) {
  for (int64_t k = 0; k < n;) {
    const int64_t in_unit = (i + k) % t.inner, unit = (i + k) / t.inner % t.units;
    const int64_t m = smaller(n - k, t.inner - in_unit);
    table(T()).multiply(g + k, static_cast<T>(factors[unit]), m);
    k += m;
  }
}

// Asks for elements of what is read to be in the first-level cache soon.
void fetch(const void* data, int64_t bytes_each, int64_t i, int64_t n) {
  if (data == nullptr) return;
  const char* const from = static_cast<const char*>(data) + i * bytes_each;
  for (int64_t byte = 0; byte < n * bytes_each; byte += 64) __builtin_prefetch(from + byte);
}

// The same for a block that a step will read. Streams of codes have four lines a block, too few for
// the processor to run ahead (AdamW with 8-bit states, 25 M parameters, one core of an Intel Xeon:
// 39.0 ms without, 37.6 with; two blocks ahead or for writing 38.4 and 45).
void fetch(const OptimizerCall& call, const OptimizerTensor& t, int64_t i, int64_t n) {
  fetch(t.param, bytes_of(t.param_dtype), i, n);
  fetch(t.grad, bytes_of(t.grad_dtype), i, n);
  if (t.correction_bits != 0) fetch(t.master, t.correction_bits / 8, i, n);
  for (int k = 0; k < call.states; ++k)
    if (t.scales[k] != nullptr) fetch(t.state[k], 1, i, n);
}

// The buffers of one tensor that a step reads, block by block.
template <class T>
struct Buffers {
  Block<T> param, grad, state[kMaxStates], average;
  T* states[kMaxStates];

  void open(const OptimizerCall& call, const OptimizerTensor& t, const double* unit_factors,
            int64_t i, int64_t n) {
    open_weights(param, t, i, n);
    grad.open(t.grad, t.grad_dtype, i, n, unit_factors != nullptr);
    if (unit_factors != nullptr) clip_units(t, unit_factors, grad.values, i, n);
    for (int k = 0; k < call.states; ++k) {
      open_state(state[k], t, k, i, n);
      states[k] = state[k].values;
    }
  }
};

// The kernel of a tensor that is of one 16-bit format and asks for nothing but its update, or null.
// (AdamW on 25 M parameters, one thread: bfloat16 24 ms, converted in buffers 28; float16 16, 26.)
OptimizerKernels16::Update update_16bit(const OptimizerCall& call, const OptimizerTensor& t,
                                        const Coefficients& k) {
  const Dtype dtype = t.param_dtype;
  bool plain = (dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16) && t.grad_dtype == dtype &&
               t.master == nullptr && k.average == 0 && k.key < 0 &&
               call.options->unit_factor == 0 && call.options->write_back != 1;
  for (int s = 0; s < call.states; ++s) plain &= t.state[s] != nullptr && t.state_dtype[s] == dtype;
  if (!plain) return nullptr;
  return table_16bit(dtype).update[call.rule][call.states];
}

template <class T>
void update_range(const OptimizerCall& call, const OptimizerTensor& t, const Coefficients& k,
                  const double* unit_factors, int64_t begin, int64_t end) {
  const auto rule = table(T()).update[call.rule][call.states];
  const int write_back = static_cast<int>(call.options->write_back);
  const bool coded = t.scales[0] != nullptr || t.scales[1] != nullptr || t.scales[2] != nullptr;
  Buffers<T> b;
  by_block(begin, end, is_direct(call, t, k), [&](int64_t i, int64_t n) {
    if (coded) fetch(call, t, i + n, smaller(n, end - i - n));
    b.open(call, t, unit_factors, i, n);
    rule(k, b.param.values, b.grad.values, b.states, n);
    for (int s = 0; s < call.states; ++s) close_state(b.state[s], t, s, i, n, k.state_key);
    if (k.average != 0) {
      b.average.open(t.average, t.average_dtype, i, n);
      table(T()).average(b.average.values, b.param.values, static_cast<T>(k.average), n);
      b.average.close(n);
    }
    close_weights(b.param, t, i, n, k.key);
    if (write_back == 1) {
      table(T()).multiply(b.grad.values, static_cast<T>(fabs(k.gradient)), n);
      b.grad.close(n);
    } else if (write_back == 2) {
      memset(byte_at(t.grad, t.grad_dtype, i), 0, n * bytes_of(t.grad_dtype));
    }
  });
}

void update_range_16bit(const OptimizerCall& call, const OptimizerTensor& t, const Coefficients& k,
                        OptimizerKernels16::Update kernel, int64_t begin, int64_t end) {
  const auto from = [&](void* data) { return static_cast<uint16_t*>(data) + begin; };
  uint16_t* states[kMaxStates];
  for (int s = 0; s < call.states; ++s) states[s] = from(t.state[s]);
  kernel(k, from(t.param), from(t.grad), states, end - begin);
  if (call.options->write_back == 2) memset(from(t.grad), 0, 2 * (end - begin));
}

template <class T>
void try_range(const OptimizerCall& call, const OptimizerTensor& t, const Coefficients& k,
               const double* unit_factors, int64_t begin, int64_t end, double* sums) {
  const auto rule = table(T()).trial[call.rule][call.states];
  Buffers<T> b;
  by_block(begin, end, is_direct(call, t, k), [&](int64_t i, int64_t n) {
    b.open(call, t, unit_factors, i, n);
    rule(k, b.param.values, b.grad.values, b.states, n, sums);
  });
}

}  // namespace
}  // namespace cpu
}  // namespace fusedtrain
