// Arithmetic that is as inexact as the hardware's may be: -prec-div=false and -prec-sqrt=false
// (setup.py) allow 2 ULP of error, and so do expf and exp2f.
//
// A result is moved by -2 to 2 ULP, by a hash of its bits: the same numbers in every order of the
// threads and in every run. Zeros, denormals, infinities and NaN stay.
//
// __init__.py has a call of emulator_inexact_N follow each division and square root of floats that
// the compiler makes of the kernels' code, for its register xmmN (x86-64 alone; elsewhere the
// hardware's exact ones stay).
#include <math.h>
#include <stdint.h>
#include <string.h>

extern "C" {
uint32_t emulator_arithmetic_seed = 0x2545f491u;
}

namespace {

constexpr uint32_t kLeast = 0x00800010, kMost = 0x7f7ffff0;  // magnitudes that are moved

float inexact(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude < kLeast || magnitude > kMost) return x;
  const uint32_t hash = (bits ^ emulator_arithmetic_seed) * 0x9e3779b1u;
  bits += uint32_t(uint64_t(hash) * 5 >> 32) - 2;
  memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace

float emulated_expf(float x) { return inexact(expf(x)); }
float emulated_exp2f(float x) { return inexact(exp2f(x)); }
float emulated_reciprocal(float x) {
  const float r = 1.0f / x;
  return fabsf(r) < 0x1p-126f ? copysignf(0.0f, r) : inexact(r);
}
// Operations that kernels ask for by name are exact.
float emulated_quotient(float a, float b) { return a / b; }
float emulated_root(float x) { return sqrtf(x); }

#ifdef __x86_64__
// inexact() of a register: all others, and the flags, are kept.
#define FT_INEXACT(n)                                         \
  asm(".text\n"                                               \
      ".hidden emulator_inexact_" #n                          \
      "\n"                                                    \
      ".globl emulator_inexact_" #n                           \
      "\n"                                                    \
      "emulator_inexact_" #n                                  \
      ":\n"                                                   \
      "  pushfq\n  push %rax\n  push %rcx\n  push %rdx\n"     \
      "  movd %xmm" #n                                        \
      ", %eax\n"                                              \
      "  mov %eax, %ecx\n"                                    \
      "  and $0x7fffffff, %ecx\n"                             \
      "  sub $0x00800010, %ecx\n"                             \
      "  cmp $0x7effffe0, %ecx\n"                             \
      "  ja 1f\n"                                             \
      "  mov emulator_arithmetic_seed@GOTPCREL(%rip), %rdx\n" \
      "  mov (%rdx), %edx\n"                                  \
      "  xor %eax, %edx\n"                                    \
      "  imul $0x9e3779b1, %edx, %edx\n"                      \
      "  lea (%rdx, %rdx, 4), %rdx\n"                         \
      "  shr $32, %rdx\n"                                     \
      "  lea -2(%rax, %rdx), %eax\n"                          \
      "  movd %eax, %xmm" #n                                  \
      "\n"                                                    \
      "1:\n"                                                  \
      "  pop %rdx\n  pop %rcx\n  pop %rax\n  popfq\n  ret\n")
FT_INEXACT(0);
FT_INEXACT(1);
FT_INEXACT(2);
FT_INEXACT(3);
FT_INEXACT(4);
FT_INEXACT(5);
FT_INEXACT(6);
FT_INEXACT(7);
FT_INEXACT(8);
FT_INEXACT(9);
FT_INEXACT(10);
FT_INEXACT(11);
FT_INEXACT(12);
FT_INEXACT(13);
FT_INEXACT(14);
FT_INEXACT(15);
#endif

// For the tests: 1 where the compiler's divisions are moved.
extern "C" __attribute__((visibility("default"))) int emulator_is_inexact() {
#ifdef __x86_64__
  return 1;
#else
  return 0;
#endif
}
