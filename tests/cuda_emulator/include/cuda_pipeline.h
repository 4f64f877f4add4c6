// Asynchronous copies: what they fill is written by the wait, so that a read before it is a fault.
#pragma once

#include <vector>

#include "cuda_runtime.h"

namespace emulator {

struct Copy {
  uint4* to;
  const uint4* from;
};
// Asynchronous copies of a thread (../memory.cpp).
class Copies {
 public:
  void add(Copy copy);
  void commit();
  bool next(Copy& copy);  // takes one that is committed

 private:
  std::vector<Copy> copies_;
  size_t committed_ = 0;  // of them, the first
};
Copies& copies();

}  // namespace emulator

// 16 bytes, the size that goes past the registers.
__forceinline__ void __pipeline_memcpy_async(void* to, const void* from, size_t) {
  emulator::copies().add({static_cast<uint4*>(to), static_cast<const uint4*>(from)});
}
__forceinline__ void __pipeline_commit() { emulator::copies().commit(); }
// For all copies, whatever the number.
__forceinline__ void __pipeline_wait_prior(size_t) {
  for (emulator::Copy copy; emulator::copies().next(copy);) *copy.to = *copy.from;
}
