// Chooses the instruction set once, and finds the converters of a format.
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "dispatch.h"

#ifndef FT_LOWEST  // setup.py defines it, and FT_WITH_AVX2 and FT_WITH_AVX512 as they are built
#define FT_LOWEST isa_default
#endif

namespace fusedtrain {
namespace cpu {
namespace {

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
#ifdef FT_WITH_AVX512
  if (limit >= 2 && has_avx512) return tables::isa_avx512::all();
#endif
#ifdef FT_WITH_AVX2
  if (limit >= 1 && has_avx2) return tables::isa_avx2::all();
#endif
#endif
  return tables::FT_LOWEST::all();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

bool takes_output(int op) {
#define FT_TAKES(name, Formula, n, rounds, saved) saved == kOutput,
  static constexpr bool table[] = {FT_POINTWISE(FT_TAKES)};
#undef FT_TAKES
  return op >= 0 && table[op];
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
      const Format& format = format_of(dtype);
      uint16_t stored;
      format.store(&value, &stored, 1);
      format.load(&stored, &value, 1);
    }
    out[i] = value;
  }
}

const char* capability() { return kernels().name; }

bool fills_new_memory = false;  // with NaN, for tests

void prepare_output(void* data, int64_t bytes) {
  if (fills_new_memory && bytes > 0) memset(data, 0xff, static_cast<size_t>(bytes));
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
#endif
}

}  // namespace cpu
}  // namespace fusedtrain

// Tests see by NaN which elements of an output a kernel has not written.
extern "C" __attribute__((visibility("default"))) void fusedtrain_fill_new_memory(bool fills) {
  fusedtrain::cpu::fills_new_memory = fills;
}

extern "C" __attribute__((visibility("default"))) const char* fusedtrain_cpu_capability() {
  return fusedtrain::cpu::capability();
}
