// Asynchronous copies: what they fill is written by the wait, so that a read before it is a fault.
#pragma once

#include "cuda_runtime.h"

namespace emulator {

struct Copy {
  uint4* to;
  const uint4* from;
};
void add_copy(Copy copy);
void commit_copies();
bool next_copy(Copy& copy);  // of the thread's committed ones

}  // namespace emulator

// 16 bytes, the size that goes past the registers.
__forceinline__ void __pipeline_memcpy_async(void* to, const void* from, size_t) {
  emulator::add_copy({static_cast<uint4*>(to), static_cast<const uint4*>(from)});
}
__forceinline__ void __pipeline_commit() { emulator::commit_copies(); }
// For all copies, whatever the number.
__forceinline__ void __pipeline_wait_prior(size_t) {
  for (emulator::Copy copy; emulator::next_copy(copy);) *copy.to = *copy.from;
}
