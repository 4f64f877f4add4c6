// Runs a grid, block after block: every thread of a block is a fiber that goes until it must wait.
//
// Threads take turns in the order that emulator_order() chose: a kernel whose result depends on it
// lacks a barrier. Each memory access of a kernel reaches memory_access(), by way of the calls that
// -fsanitize=thread makes the compiler insert (the sanitizer itself is not linked).
#include <dlfcn.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "cuda_pipeline.h"
#include "memory.h"

namespace emulator {
namespace {

constexpr unsigned kMostThreads = 1024;
constexpr int kAll = 64;  // the source of a vote, which is no lane
constexpr size_t kStack = 64 << 10, kGuard = 4096;

enum class Waits { kNot, kBarrier, kWarp, kExited };

struct Fiber {
  jmp_buf context;
  char* stack = nullptr;  // with a guard page below
  bool usable = false;    // waits in fiber_main for its next block
  unsigned index = 0;
  uint3 thread{0, 0, 0};
  Waits waits = Waits::kNot;
  Moment now;
  // At a barrier, or in a warp operation:
  const char* site = "";
  int line = 0;
  unsigned mask = 0;
  uint64_t value = 0;
  int source = 0;
  Copies copies;  // on their way
};

enum class Order { kForward, kReverse, kShuffled };

struct Machine {
  Memory memory;
  std::vector<Fiber> fibers = std::vector<Fiber>(kMostThreads);
  jmp_buf scheduler;
  Fiber* running = nullptr;
  unsigned threads = 0;
  uint3 block{0, 0, 0};
  dim3 grid, block_size;
  void (*call)(void*) = nullptr;
  void* context = nullptr;
  size_t context_bytes = 0;
  std::string wrong;       // the first fault of this launch
  std::string last_error;  // what cudaGetErrorString tells
  cudaError_t pending = cudaSuccess;
  Order order = Order::kForward;
  int launches = 0;
  int64_t argument_bytes = 0;  // of all launches
};

Machine& machine() {
  static Machine* const m = new Machine;
  return *m;
}

// _setjmp and _longjmp, since swapcontext makes a system call each time (a third of all time).
//
// glibc's own _longjmp, not AddressSanitizer's (`make sanitize`): that one takes a jump for the end
// of every function on the stack, and would forget the bounds of their variables.
[[noreturn]] void jump(jmp_buf to) {
  using Jump = void (*)(jmp_buf, int);
  static const Jump longjmp_of_libc =
      reinterpret_cast<Jump>(dlsym(dlopen("libc.so.6", RTLD_LAZY), "_longjmp"));
  longjmp_of_libc(to, 1);
  abort();
}

void to_scheduler() {
  Machine& m = machine();
  if (_setjmp(m.running->context) == 0) jump(m.scheduler);
}

void to_fiber(Fiber& f) {
  Machine& m = machine();
  m.running = &f;
  if (_setjmp(m.scheduler) == 0) jump(f.context);
  m.running = nullptr;
}

// Ends the launch. Does not return: the fiber is left where it is.
[[noreturn]] void fault(const std::string& what) {
  Machine& m = machine();
  char where[120];
  const uint3 t = thread_index();
  snprintf(where, sizeof where, " [block (%u, %u, %u), thread (%u, %u, %u)]", m.block.x, m.block.y,
           m.block.z, t.x, t.y, t.z);
  m.wrong = what + where;
  for (;;) to_scheduler();
}

// A fiber serves one thread of each block, for ever.
void fiber_main() {
  Machine& m = machine();
  for (;;) {
    to_scheduler();
    m.call(m.context);
    m.running->waits = Waits::kExited;
    m.running->usable = true;
  }
}

void create(Fiber& f) {
  Machine& m = machine();
  if (f.stack == nullptr) {
    void* p =
        mmap(nullptr, kStack + kGuard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p, kGuard, PROT_NONE) != 0) abort();
    f.stack = static_cast<char*>(p) + kGuard;
  }
  mark(f.stack, kStack, true);  // the variables of a fault's functions have no bounds any more
  ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = f.stack;
  first.uc_stack.ss_size = kStack;
  first.uc_link = nullptr;
  makecontext(&first, &fiber_main, 0);
  m.running = &f;
  if (_setjmp(m.scheduler) == 0) setcontext(&first);
  m.running = nullptr;
}

void start(Fiber& f, unsigned index, uint32_t block) {
  if (!f.usable) create(f);  // new, or left in the middle of a fault
  f.usable = false;
  const dim3 size = machine().block_size;
  f.index = index;
  f.thread = {index % size.x, index / size.x % size.y, index / size.x / size.y};
  f.waits = Waits::kNot;
  f.copies = Copies();
  f.now = Moment();
  f.now.thread = 1 + index;
  f.now.block = block;
}

// Lets the threads go on that all of them have reached the same barrier.
bool release_barrier() {
  Machine& m = machine();
  const Fiber& first = m.fibers[0];
  for (unsigned i = 0; i < m.threads; ++i)
    if (m.fibers[i].waits != Waits::kBarrier) return false;
  for (unsigned i = 0; i < m.threads; ++i) {
    Fiber& f = m.fibers[i];
    if (f.line != first.line || strcmp(f.site, first.site) != 0) {
      m.wrong = "divergent barrier: threads of one block wait at __syncthreads() of lines " +
                std::to_string(first.line) + " and " + std::to_string(f.line);
      return true;
    }
  }
  for (unsigned i = 0; i < m.threads; ++i) {
    m.fibers[i].waits = Waits::kNot;
    ++m.fibers[i].now.barriers;
  }
  return true;
}

// Lets the lanes of a warp go on that have all come to the same operation with the same mask.
bool release_warp(unsigned first) {
  Machine& m = machine();
  bool released = false;
  for (unsigned i = first; i < std::min(first + 32, m.threads); ++i) {
    Fiber& f = m.fibers[i];
    if (f.waits != Waits::kWarp) continue;
    bool complete = true;
    for (unsigned lane = 0; lane < 32 && complete; ++lane) {
      if (!(f.mask >> lane & 1)) continue;
      const Fiber* other = first + lane < m.threads ? &m.fibers[first + lane] : nullptr;
      complete = other != nullptr && other->waits == Waits::kWarp && other->mask == f.mask &&
                 strcmp(other->site, f.site) == 0;
    }
    if (!complete) continue;
    const unsigned mask = f.mask;
    uint64_t given[32] = {}, votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1)
        votes |= uint64_t((given[lane] = m.fibers[first + lane].value) != 0) << lane;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if (!(mask >> lane & 1)) continue;
      Fiber& g = m.fibers[first + lane];
      g.value = g.source == kAll ? votes : given[g.source];
      g.waits = Waits::kNot;
      if (mask == 0xffffffffu) ++g.now.warp_syncs;
    }
    released = true;
  }
  return released;
}

// Nothing can go on: who waits for whom?
std::string stuck() {
  Machine& m = machine();
  unsigned count[4] = {};
  const Fiber* in_warp = nullptr;
  for (unsigned i = 0; i < m.threads; ++i) {
    ++count[int(m.fibers[i].waits)];
    if (m.fibers[i].waits == Waits::kWarp && in_warp == nullptr) in_warp = &m.fibers[i];
  }
  char line[300];
  if (in_warp != nullptr) {
    snprintf(
        line, sizeof line,
        "%s: thread %u names the lanes %08x, not all of which come (of the block's %u threads, "
        "%u have exited, %u wait at a barrier)",
        in_warp->site, in_warp->index, in_warp->mask, m.threads, count[int(Waits::kExited)],
        count[int(Waits::kBarrier)]);
  } else {
    snprintf(line, sizeof line, "__syncthreads() reached by %u of %u threads; %u have exited",
             count[int(Waits::kBarrier)], m.threads, count[int(Waits::kExited)]);
  }
  return line;
}

void run_block(std::vector<unsigned>& turns, std::mt19937& random, size_t dynamic_bytes,
               uint32_t block) {
  Machine& m = machine();
  m.memory.new_block(dynamic_bytes);
  for (unsigned i = 0; i < m.threads; ++i) start(m.fibers[i], i, block);
  for (;;) {
    if (m.order == Order::kShuffled) std::shuffle(turns.begin(), turns.end(), random);
    bool progress = false, alive = false;
    for (unsigned i : turns) {
      Fiber& f = m.fibers[i];
      if (f.waits == Waits::kNot) {
        to_fiber(f);
        if (!m.wrong.empty()) return;
        progress = true;
      }
      alive |= f.waits != Waits::kExited;
    }
    if (!alive) return;
    for (unsigned first = 0; first < m.threads; first += 32) progress |= release_warp(first);
    progress |= release_barrier();
    if (!m.wrong.empty()) return;
    if (!progress) {
      m.wrong = stuck();
      return;
    }
  }
}

cudaError_t fail(cudaError_t error, const std::string& what) {
  machine().last_error = what;
  machine().pending = error;
  return error;
}

void memory_access(const void* address, size_t bytes, bool write, bool aligned) {
  Machine& m = machine();
  if (m.running == nullptr) return;  // host code
  const char* p = static_cast<const char*>(address);
  const char* stack = m.running->stack;
  if (p >= stack && p + bytes <= stack + kStack) return;
  const char* arguments = static_cast<const char*>(m.context);
  if (p >= arguments && p + bytes <= arguments + m.context_bytes) {
    if (write) fault("writes to an argument of the kernel");
    return;
  }
  const std::string wrong = m.memory.check(
      {reinterpret_cast<uintptr_t>(address), bytes, write, false, aligned}, m.running->now);
  if (!wrong.empty()) fault(wrong);
}

template <class T>
T atomic_operation(T* p, T value, Atomic what) {
#ifndef FT_NO_HOOKS  // without the calls for the plain accesses, nothing has ever been written
  Machine& m = machine();
  const std::string wrong =
      m.memory.check({reinterpret_cast<uintptr_t>(p), sizeof(T), true, true, true}, m.running->now);
  if (!wrong.empty()) fault(wrong);
#endif
  const T before = *p;
  *p = what == Atomic::kAdd ? before + value
                            : (what == Atomic::kMax ? std::max(before, value) : value);
  return before;
}

}  // namespace

uint3 thread_index() {
  const Fiber* const f = machine().running;
  return f == nullptr ? uint3{0, 0, 0} : f->thread;
}
uint3 block_index() { return machine().block; }
dim3 block_dim() { return machine().block_size; }
dim3 grid_dim() { return machine().grid; }
void* dynamic_shared() { return machine().memory.dynamic_shared(); }
int lane() { return int(machine().running->index % 32); }

void barrier(const char* file, int line) {
  Fiber& f = *machine().running;
  f.waits = Waits::kBarrier;
  f.site = file;
  f.line = line;
  to_scheduler();
}

uint64_t exchange(unsigned mask, uint64_t value, int source, const char* name) {
  Fiber& f = *machine().running;
  if (!(mask >> (f.index % 32) & 1)) fault(std::string(name) + ": the lane is not in its own mask");
  if (source != kAll && !(mask >> source & 1))
    fault(std::string(name) + ": lane " + std::to_string(f.index % 32) + " reads lane " +
          std::to_string(source) + ", which is not in the mask");
  f.waits = Waits::kWarp;
  f.site = name;
  f.mask = mask;
  f.value = value;
  f.source = source;
  to_scheduler();
  return f.value;
}

unsigned ballot(unsigned mask, bool predicate, const char* name) {
  return unsigned(exchange(mask, predicate, kAll, name));
}

float atomic(float* p, float value, Atomic what) { return atomic_operation(p, value, what); }
double atomic(double* p, double value, Atomic what) { return atomic_operation(p, value, what); }
int atomic(int* p, int value, Atomic what) { return atomic_operation(p, value, what); }
unsigned atomic(unsigned* p, unsigned value, Atomic what) {
  return atomic_operation(p, value, what);
}

Copies& copies() { return machine().running->copies; }

cudaError_t run(const cudaLaunchConfig_t& config, const void* kernel, void (*call)(void*),
                void* context, size_t bytes) {
  Machine& m = machine();
  const dim3 g = config.gridDim, b = config.blockDim;
  const uint64_t threads = uint64_t(b.x) * b.y * b.z, blocks = uint64_t(g.x) * g.y * g.z;
  if (threads == 0 || threads > kMostThreads || b.z > 64 || blocks == 0 || g.x > 0x7fffffffu ||
      g.y > 65535 || g.z > 65535 || config.dynamicSmemBytes > shared_of(kernel))
    return fail(cudaErrorInvalidConfiguration, "invalid configuration argument");
  m.threads = unsigned(threads);
  m.grid = g;
  m.block_size = b;
  m.call = call;
  m.context = context;
  m.context_bytes = bytes;
  m.wrong.clear();
  m.memory.new_launch();
  ++m.launches;
  m.argument_bytes += int64_t(bytes);

  std::mt19937 random(20260101);
  std::vector<unsigned> turns(m.threads);
  std::vector<uint64_t> sequence(blocks);
  for (unsigned i = 0; i < m.threads; ++i) turns[i] = i;
  for (uint64_t i = 0; i < blocks; ++i) sequence[i] = i;
  if (m.order == Order::kReverse) {
    std::reverse(turns.begin(), turns.end());
    std::reverse(sequence.begin(), sequence.end());
  } else if (m.order == Order::kShuffled) {
    std::shuffle(sequence.begin(), sequence.end(), random);
  }
  for (uint64_t i : sequence) {
    m.block = {unsigned(i % g.x), unsigned(i / g.x % g.y), unsigned(i / g.x / g.y)};
    run_block(turns, random, config.dynamicSmemBytes, uint32_t(i));
    if (!m.wrong.empty()) return fail(cudaErrorLaunchFailure, m.wrong);
  }
  return cudaSuccess;
}

}  // namespace emulator

using emulator::machine;

cudaError_t cudaGetLastError() {
  const cudaError_t error = machine().pending;
  machine().pending = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : machine().last_error.c_str();
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  memset(p, value, bytes);
  return cudaSuccess;
}

// For the tests, by ctypes.
#define FT_EXPORT extern "C" __attribute__((visibility("default")))
FT_EXPORT void emulator_buffer(const void* data, int64_t bytes, int writes) {
  machine().memory.add(data, size_t(bytes), writes != 0);
}
FT_EXPORT void emulator_reset() { machine().memory.clear(); }
FT_EXPORT int emulator_launches() { return machine().launches; }
FT_EXPORT void emulator_traffic(uint64_t least, int64_t* moved) {
  machine().memory.traffic(least, *reinterpret_cast<int64_t (*)[4]>(moved));
}
FT_EXPORT int64_t emulator_argument_bytes() { return machine().argument_bytes; }
FT_EXPORT int64_t emulator_moved(const void* data, int which) {
  return machine().memory.moved(data, which);
}
FT_EXPORT void emulator_order(int order) { machine().order = emulator::Order(order); }

// Functions that -fsanitize=thread calls.
#define FT_ACCESS(bytes)                                                                          \
  extern "C" void __tsan_read##bytes(void* p) { emulator::memory_access(p, bytes, false, true); } \
  extern "C" void __tsan_write##bytes(void* p) { emulator::memory_access(p, bytes, true, true); } \
  extern "C" void __tsan_unaligned_read##bytes(void* p) {                                         \
    emulator::memory_access(p, bytes, false, false);                                              \
  }                                                                                               \
  extern "C" void __tsan_unaligned_write##bytes(void* p) {                                        \
    emulator::memory_access(p, bytes, true, false);                                               \
  }
FT_ACCESS(1)
FT_ACCESS(2)
FT_ACCESS(4)
FT_ACCESS(8)
FT_ACCESS(16)
extern "C" void __tsan_read_range(void* p, size_t bytes) {
  emulator::memory_access(p, bytes, false, false);
}
extern "C" void __tsan_write_range(void* p, size_t bytes) {
  emulator::memory_access(p, bytes, true, false);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" int __tsan_atomic32_load(const int* p, int) { return *p; }
extern "C" void __tsan_atomic32_store(int* p, int value, int) { *p = value; }
extern "C" int64_t __tsan_atomic64_load(const int64_t* p, int) { return *p; }
extern "C" int64_t __tsan_atomic64_fetch_add(int64_t* p, int64_t value, int) {
  return (*p += value) - value;
}
extern "C" char __tsan_atomic8_load(const char* p, int) { return *p; }
