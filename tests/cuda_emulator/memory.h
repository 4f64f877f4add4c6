// Memory that a kernel may touch, and who touched it last.
#pragma once

#include <stdint.h>

#include <map>
#include <string>
#include <vector>

namespace emulator {

// A thread at a moment: what must be known to tell whether another one is ordered before it.
struct Moment {
  uint32_t thread = 0;  // within the launch, from 1; of several readers kOneWarp and their warp's
                        // number, or kManyThreads
  uint32_t block = 0;
  uint32_t barriers = 0;  // that the thread has passed
  uint32_t warp_syncs = 0;
};
constexpr uint32_t kOneWarp = 0x80000000u, kManyThreads = 0xffffffffu;

// One byte.
struct Cell {
  uint32_t epoch = 0;    // the launch, or the block, that the moments belong to
  bool written = false;  // ever
  bool atomic = false;   // the writer was an atomic operation
  Moment writer, reader;
};

struct Access {
  uintptr_t address;
  size_t bytes;
  bool write, atomic;
  bool aligned;  // to its own size, as the hardware demands
};

// Cells of one piece of memory. One that forgets is shared memory: nothing has written it when an
// epoch, which is a block, begins.
class Shadow {
 public:
  explicit Shadow(bool forgets = false) : forgets_(forgets) {}
  size_t bytes() const { return cells_.size(); }
  void resize(size_t bytes, bool written) {
    cells_.assign(bytes, Cell());
    for (Cell& c : cells_) c.written = written;
  }
  // Fault of an access at this offset, or nothing.
  std::string check(size_t offset, const Access& access, const Moment& now, uint32_t epoch,
                    const char* kind);

 private:
  std::vector<Cell> cells_;
  bool forgets_;
};

struct Buffer {
  size_t bytes;
  bool readable, writable;
  Shadow shadow;
  int64_t moved[4] = {};  // bytes loaded, bytes stored, loads, stores
};

// Tells AddressSanitizer, where it is loaded (`make sanitize`), which memory may be touched.
void mark(const void* data, size_t bytes, bool accessible);

class Memory {
 public:
  void clear() { buffers_.clear(); }
  void add(const void* data, size_t bytes, bool writable);
  // A launch or a block begins.
  void new_launch() { ++launch_; }
  void new_block(size_t dynamic_bytes);
  unsigned char* dynamic_shared() { return dynamic_; }
  // Fault of an access of a kernel, or nothing.
  std::string check(const Access& access, const Moment& now);
  // Buffer::moved of all buffers of that size at least, added up.
  void traffic(size_t least, int64_t (&moved)[4]) const;
  // One of Buffer::moved, of the buffer that begins there, or (null) of all of them.
  int64_t moved(const void* data, int which) const;

  static constexpr size_t kDynamicUsual = 48 << 10;  // that need no cudaFuncSetAttribute
  static constexpr size_t kDynamicMost = 99 << 10;   // as sm_120 has it

 private:
  std::map<uintptr_t, Buffer> buffers_;        // by address
  std::map<uintptr_t, Shadow> static_shared_;  // by the address of a segment
  alignas(1024) unsigned char dynamic_[kDynamicMost];
  size_t dynamic_bytes_ = 0;
  Shadow dynamic_shadow_{true};
  uint32_t launch_ = 0, block_ = 0;
};

}  // namespace emulator
