// Functions with one planted fault each, built as the kernels are: `make sanitize` first sees that
// the sanitizers report every one of them. tools/sanitize.py says what each report must contain.
//
// The argument is 16 floats, 16-byte aligned, or a number that the compiler cannot know.
#include <stdint.h>

#define FT_FAULT(name)                                                               \
  extern "C" __attribute__((visibility("default"))) double name(float* x, int64_t n)

namespace {

struct alignas(16) Four {
  float of[4];
};

float table[4] = {1, 2, 3, 4};
float behind_the_table[4] = {1, 2, 3, 4};

// The end of a loop is one too far, as in a kernel.
double sum(const float* x, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += x[i];
  return total;
}

}  // namespace

FT_FAULT(nothing) { return sum(x, n); }
FT_FAULT(read_past_the_end) { return sum(x, n + 1); }
FT_FAULT(read_before_the_start) { return x[n - 17]; }
FT_FAULT(write_past_the_end) {
  for (int64_t i = 0; i <= n; ++i) x[i] = 1;
  return 0;
}
FT_FAULT(read_past_a_local_array) {
  volatile float local[8] = {};
  volatile float* p = local;
  return p[n / 2] + x[0];
}
FT_FAULT(read_past_a_table) {
  const volatile float* p = table;
  behind_the_table[0] = x[0];
  return p[n / 4];
}
FT_FAULT(index_past_an_array) { return table[n] + x[0]; }
FT_FAULT(misaligned) {
  const Four* p = reinterpret_cast<const Four*>(x + 1 + n % 2);
  return p->of[0];
}
FT_FAULT(signed_overflow) { return static_cast<int32_t>(n) * 0x10000000 + x[0]; }
FT_FAULT(shift_by_too_much) { return (1 << (n * 2)) + x[0]; }
FT_FAULT(float_that_no_integer_holds) {
  return static_cast<int32_t>(1e20f * static_cast<float>(n));
}
FT_FAULT(pointer_overflow) { return x + (INT64_MIN / 4 + n) == nullptr ? 1 : 0; }
