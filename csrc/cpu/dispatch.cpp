// Chooses the instruction set once, cuts the work, finds the kernel of the dtype.
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "cut.h"
#include "../bits.h"
#include "kernels.h"

namespace fusedtrain {
namespace cpu {
namespace {

constexpr int64_t kBlock =
    1024;  // of floats: three buffers are 12 KiB, within any first-level cache

int rank(const char* name) {
  if (name == nullptr || *name == '\0') return 2;
  if (strcmp(name, "default") == 0 || strcmp(name, "DEFAULT") == 0) return 0;
  if (strcmp(name, "avx2") == 0 || strcmp(name, "AVX2") == 0) return 1;
  return 2;
}

const Kernels& choose() {
#if defined(__x86_64__)
  // ATEN_CPU_CAPABILITY bounds torch's own kernels; who sets it means ours too.
  const int forced = rank(getenv("FUSEDTRAIN_CPU_CAPABILITY"));
  const int bound = rank(getenv("ATEN_CPU_CAPABILITY"));
  const int limit = forced < bound ? forced : bound;
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (limit >= 2 && has_avx512) return kernels_avx512();
  if (limit >= 1 && has_avx2) return kernels_avx2();
#endif
  return kernels_default();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

Format format_of(Dtype dtype) {
  const Kernels& k = kernels();
  if (dtype == Dtype::kFloat16) return {k.from_half, k.to_half};
  return {k.from_bfloat16, k.to_bfloat16};
}

namespace {

bool rounds_parameters(int op) {
#define FT_ROUNDS(name, Formula, n, rounds, saved) rounds,
  static constexpr bool table[] = {FT_POINTWISE(FT_ROUNDS)};
#undef FT_ROUNDS
  return table[op];
}

}  // namespace

void round_parameters(int op, Dtype dtype, const double* in, double* out) {
  for (int i = 0; i < kMaxParameters; ++i) {
    out[i] = in[i];
    if (!rounds_parameters(op) || dtype == Dtype::kFloat64) continue;
    float value = static_cast<float>(in[i]);
    if (dtype != Dtype::kFloat32) {
      const Format format = format_of(dtype);
      uint16_t stored;
      format.store(&value, &stored, 1);
      format.load(&stored, &value, 1);
    }
    out[i] = value;
  }
}

namespace {

template <class T>
T* at(void* p, int64_t i) {
  return static_cast<T*>(p) + i;
}
template <class T>
const T* at(const void* p, int64_t i) {
  return static_cast<const T*>(p) + i;
}

}  // namespace

const char* capability() { return kernels().name; }

void prepare_output(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  // Smaller ones mostly come from the heap, already mapped: at 4 MiB the call cost more than it
  // gave.
  constexpr int64_t kSmallest = 8 << 20;
  if (bytes < kSmallest) return;
  static const bool wanted = [] {
    const char* setting = getenv("FUSEDTRAIN_HUGE_PAGES");
    return setting == nullptr || strcmp(setting, "0") != 0;
  }();
  if (!wanted) return;
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kPage - 1);
  // Advice: where the system refuses it, nothing changes.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

namespace {

template <class T>
void run(const PointwiseForward& call, int64_t i, int64_t n, const double* parameters,
         const PointwiseKernels<T>& k) {
  k.forward[call.op](at<T>(call.x, i), at<T>(call.y, i), n, parameters);
}

template <class T>
void run(const PointwiseBackward& call, int64_t i, int64_t n, const double* parameters,
         const PointwiseKernels<T>& k) {
  k.backward[call.op](at<T>(call.grad, i), at<T>(call.saved, i), at<T>(call.grad_input, i), n,
                      parameters);
}

template <class Call>
void run_pointwise(const Call& call, int64_t begin, int64_t end) {
  const Kernels& k = kernels();
  double parameters[kMaxParameters];
  round_parameters(call.op, call.dtype, call.parameters, parameters);
  const int64_t n = end - begin;
  switch (call.dtype) {
    case Dtype::kFloat32:
      return run(call, begin, n, parameters, k.f32);
    case Dtype::kFloat64:
      return run(call, begin, n, parameters, k.f64);
    case Dtype::kFloat16:
      return run(call, begin, n, parameters, k.f16);
    case Dtype::kBFloat16:
      return run(call, begin, n, parameters, k.bf16);
  }
}

}  // namespace

void pointwise(const PointwiseForward& call, int64_t begin, int64_t end) {
  run_pointwise(call, begin, end);
}
void pointwise(const PointwiseBackward& call, int64_t begin, int64_t end) {
  run_pointwise(call, begin, end);
}

namespace {

template <class S, class T>
void run(const FewBitForward& call, int64_t i, int64_t n, const FewBitKernels<S, T>& k) {
  k.forward[call.op](at<S>(call.x, i), at<S>(call.y, i), call.codes + packed_bytes(i, call.bits), n,
                     call.bits, Slopes<T>(*slope_table(call.op), call.bits));
}

template <class S, class T>
void run(const FewBitBackward& call, int64_t i, int64_t n, const FewBitKernels<S, T>& k) {
  k.backward(at<S>(call.grad, i), call.codes + packed_bytes(i, call.bits),
             at<S>(call.grad_input, i), n, call.bits, Slopes<T>(*slope_table(call.op), call.bits));
}

template <class Call>
void run_few_bit(const Call& call, int64_t begin, int64_t end) {
  const Kernels& k = kernels();
  const int64_t n = end - begin;
  switch (call.dtype) {
    case Dtype::kFloat32:
      return run(call, begin, n, k.few_bit_f32);
    case Dtype::kFloat64:
      return run(call, begin, n, k.few_bit_f64);
    case Dtype::kFloat16:
      return run(call, begin, n, k.few_bit_f16);
    case Dtype::kBFloat16:
      return run(call, begin, n, k.few_bit_bf16);
  }
}

}  // namespace

void few_bit(const FewBitForward& call, int64_t begin, int64_t end) {
  run_few_bit(call, begin, end);
}
void few_bit(const FewBitBackward& call, int64_t begin, int64_t end) {
  run_few_bit(call, begin, end);
}

namespace {

template <class T>
void run(const ChannelwiseForward& call, int64_t task, const ChannelwiseKernels<T>& k) {
  const Cut cut{call.rows, call.channels, call.inner};
  cut.visit(task, kTask, [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t) {
    k.forward[call.op](at<T>(call.x, i), at<T>(call.y, i), n, at<T>(call.parameters[0], c),
                       at<T>(call.parameters[1], c), step);
  });
}

void run_16bit(const ChannelwiseForward& call, int64_t task) {
  const Format format = format_of(call.dtype);
  const Cut cut{call.rows, call.channels, call.inner};
  alignas(64) float x[kBlock], a[kBlock], b[kBlock];
  cut.visit(task, kBlock, [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t) {
    format.load(at<uint16_t>(call.x, i), x, n);
    format.load(at<uint16_t>(call.parameters[0], c), a, step ? n : 1);
    format.load(at<uint16_t>(call.parameters[1], c), b, step ? n : 1);
    kernels().channel_f32.forward[call.op](x, x, n, a, b, step);
    format.store(x, at<uint16_t>(call.y, i), n);
  });
}

template <class T>
void run(const ChannelwiseBackward& call, int64_t task, const ChannelwiseKernels<T>& k) {
  const Cut cut{call.rows, call.channels, call.inner};
  const int64_t stride = cut.shares();
  cut.visit(task, kTask, [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t share) {
    k.backward[call.op](at<T>(call.grad, i), at<T>(call.x, i), at<T>(call.grad_input, i), n,
                        at<T>(call.parameters[0], c), at<T>(call.parameters[1], c), step,
                        call.shares + share, stride);
  });
}

void run_16bit(const ChannelwiseBackward& call, int64_t task) {
  const Format format = format_of(call.dtype);
  const Cut cut{call.rows, call.channels, call.inner};
  const int64_t stride = cut.shares();
  alignas(64) float g[kBlock], x[kBlock], a[kBlock], b[kBlock];
  cut.visit(task, kBlock, [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t share) {
    format.load(at<uint16_t>(call.grad, i), g, n);
    format.load(at<uint16_t>(call.x, i), x, n);
    format.load(at<uint16_t>(call.parameters[0], c), a, step ? n : 1);
    format.load(at<uint16_t>(call.parameters[1], c), b, step ? n : 1);
    kernels().channel_f32.backward[call.op](g, x, g, n, a, b, step, call.shares + share, stride);
    format.store(g, at<uint16_t>(call.grad_input, i), n);
  });
}

template <class Call>
void run_tasks(const Call& call, int64_t first, int64_t last) {
  for (int64_t task = first; task < last; ++task) {
    if (call.dtype == Dtype::kFloat32)
      run(call, task, kernels().channel_f32);
    else if (call.dtype == Dtype::kFloat64)
      run(call, task, kernels().channel_f64);
    else
      run_16bit(call, task);
  }
}

}  // namespace

int64_t channelwise_tasks(int64_t rows, int64_t channels, int64_t inner) {
  return Cut{rows, channels, inner}.tasks();
}
void channelwise(const ChannelwiseForward& call, int64_t first_task, int64_t last_task) {
  run_tasks(call, first_task, last_task);
}
void channelwise(const ChannelwiseBackward& call, int64_t first_task, int64_t last_task) {
  run_tasks(call, first_task, last_task);
}

int64_t channelwise_shares(int64_t rows, int64_t channels, int64_t inner) {
  return kMaxParameters * Cut{rows, channels, inner}.shares();
}

// In the order of the shares: the same bits for any number of threads.
void add_shares(const ChannelwiseBackward& call, int which, double* gradient) {
  const Cut cut{call.rows, call.channels, call.inner};
  const double* shares = call.shares + which * cut.shares();
  for (int64_t c = 0; c < call.channels; ++c) gradient[c] = 0;
  for (int64_t i = 0; i < cut.shares(); ++i) gradient[cut.channel_of_share(i)] += shares[i];
}

}  // namespace cpu
}  // namespace fusedtrain

extern "C" __attribute__((visibility("default"))) const char* fusedtrain_cpu_capability() {
  return fusedtrain::cpu::capability();
}
