#include "memory.h"

#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cuda_pipeline.h"

extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* data, size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* data, size_t bytes);
}

namespace emulator {
namespace {

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) {
  char line[400];
  va_list list;
  va_start(list, format);
  vsnprintf(line, sizeof line, format, list);
  va_end(list);
  return line;
}

// The segments of this library: kernels keep static shared memory and constants there.
struct Segment {
  uintptr_t begin, end;
  bool writable;
};

int add_segments(dl_phdr_info* info, size_t, void* found) {
  auto& segments = *static_cast<std::vector<Segment>*>(found);
  std::vector<Segment> of_this;
  bool ours = false;
  const uintptr_t here = reinterpret_cast<uintptr_t>(&add_segments);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    of_this.push_back({begin, begin + header.p_memsz, (header.p_flags & PF_W) != 0});
    if (here >= begin && here < begin + header.p_memsz) ours = true;
  }
  if (ours) segments = of_this;
  return ours;
}

const Segment* segment_of(uintptr_t address) {
  static const std::vector<Segment> segments = [] {
    std::vector<Segment> found;
    dl_iterate_phdr(&add_segments, &found);
    return found;
  }();
  for (const Segment& s : segments)
    if (address >= s.begin && address < s.end) return &s;
  return nullptr;
}

uint32_t warp_of(const Moment& m) {
  return m.thread >= kOneWarp ? m.thread - kOneWarp : (m.thread - 1) / 32;
}

// Whether what was done then is certain to be seen now.
bool ordered(const Moment& then, const Moment& now) {
  if (then.block != now.block) return false;
  if (then.thread == now.thread) return true;
  if (now.barriers > then.barriers) return true;
  if (then.thread == kManyThreads) return false;
  return warp_of(then) == warp_of(now) && now.warp_syncs > then.warp_syncs;
}

std::string race(const char* what, const char* kind, const Moment& then, const Moment& now) {
  if (then.thread >= kOneWarp)
    return text(
        "race: thread %u of block %u %s %s memory that other threads read, with nothing in "
        "between that orders them",
        now.thread - 1, now.block, what, kind);
  return text(
      "race: thread %u of block %u %s %s memory that thread %u of block %u used, with "
      "nothing in between that orders them",
      now.thread - 1, now.block, what, kind, then.thread - 1, then.block);
}

// Fault of an access. A cell is looked at for each byte of each access: no text is made
// before it is needed.
enum class Wrong { kNothing, kUnwritten, kWriter, kReader };

inline Wrong check_cell(Cell& cell, const Access& access, const Moment& now, uint32_t epoch,
                        bool forgets) {
  if (cell.epoch != epoch) {
    cell.epoch = epoch;
    cell.writer = cell.reader = Moment();
    cell.atomic = false;
    if (forgets) cell.written = false;
  }
  const bool both_atomic = access.atomic && cell.atomic;
  if (!access.write || access.atomic)
    if (!cell.written) return Wrong::kUnwritten;
  if (cell.writer.thread != 0 && !both_atomic && !ordered(cell.writer, now)) return Wrong::kWriter;
  if (access.write) {
    if (cell.reader.thread != 0 && !both_atomic && !ordered(cell.reader, now))
      return Wrong::kReader;
    cell.writer = now;
    cell.written = true;
    cell.atomic = access.atomic;
    cell.reader = Moment();
  } else if (cell.reader.thread == 0 || ordered(cell.reader, now)) {
    cell.reader = now;
  } else {
    const bool one_warp = cell.reader.block == now.block && cell.reader.thread != kManyThreads &&
                          warp_of(cell.reader) == warp_of(now);
    if (cell.reader.block != now.block) cell.reader.block = kManyThreads;
    if (now.barriers > cell.reader.barriers) cell.reader.barriers = now.barriers;
    if (now.warp_syncs > cell.reader.warp_syncs) cell.reader.warp_syncs = now.warp_syncs;
    cell.reader.thread = one_warp ? kOneWarp + warp_of(now) : kManyThreads;
  }
  return Wrong::kNothing;
}

std::string explained(Wrong wrong, const Cell& cell, const Access& access, const Moment& now,
                      const char* kind) {
  if (wrong == Wrong::kUnwritten) return text("reads %s memory that nothing has written", kind);
  if (wrong == Wrong::kReader) return race("writes", kind, cell.reader, now);
  return race(access.write ? "writes" : "reads", kind, cell.writer, now);
}

}  // namespace

std::string Shadow::check(size_t offset, const Access& access, const Moment& now, uint32_t epoch,
                          const char* kind) {
  for (size_t i = offset; i < offset + access.bytes; ++i) {
    const Wrong wrong = check_cell(cells_[i], access, now, epoch, forgets_);
    if (wrong != Wrong::kNothing) return explained(wrong, cells_[i], access, now, kind);
  }
  return "";
}

void Memory::add(const void* data, size_t bytes, bool writable) {
  if (bytes == 0) return;
  uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  // The halves of one tensor lie between each other: one buffer of both.
  for (const auto& [other, buffer] : buffers_) {
    const bool overlap = other != begin && other < begin + bytes && begin < other + buffer.bytes;
    if (!overlap || buffer.bytes != bytes || buffer.writable != writable) continue;
    const uintptr_t end = (other < begin ? begin : other) + bytes;
    begin = other < begin ? other : begin;
    data = reinterpret_cast<const void*>(begin);
    bytes = end - begin;
    break;
  }
  auto same = buffers_.find(begin);
  if (same != buffers_.end() && same->second.bytes == bytes) {
    if (!writable && !same->second.readable) {
      same->second.readable = true;
      same->second.shadow.resize(bytes, true);
    }
    same->second.writable |= writable;
    return;
  }
  // Buffers that lay there have been freed.
  for (auto it = buffers_.begin(); it != buffers_.end();)
    it = it->first < begin + bytes && begin < it->first + it->second.bytes ? buffers_.erase(it)
                                                                           : std::next(it);
  Buffer& buffer = buffers_[begin];
  buffer.bytes = bytes;
  buffer.readable = !writable;
  buffer.writable = writable;
  buffer.shadow.resize(bytes, !writable);
  if (writable) memset(const_cast<void*>(data), 0xff, bytes);
}

void Copies::add(Copy copy) { copies_.push_back(copy); }
void Copies::commit() { committed_ = copies_.size(); }
bool Copies::next(Copy& copy) {
  if (committed_ == 0) return false;
  copy = copies_[--committed_];
  copies_.erase(copies_.begin() + int64_t(committed_));
  return true;
}

int64_t Memory::moved(const void* data, int which) const {
  int64_t sum = 0;
  for (const auto& [address, buffer] : buffers_)
    if (data == nullptr || address == reinterpret_cast<uintptr_t>(data)) sum += buffer.moved[which];
  return sum;
}

void mark(const void* data, size_t bytes, bool accessible) {
  const auto tell = accessible ? __asan_unpoison_memory_region : __asan_poison_memory_region;
  if (tell != nullptr) tell(data, bytes);
}

void Memory::new_block(size_t dynamic_bytes) {
  ++block_;
  dynamic_bytes_ = dynamic_bytes;
  mark(dynamic_, kDynamicMost, false);
  mark(dynamic_, dynamic_bytes, true);
  memset(dynamic_, 0xff, dynamic_bytes);
  if (dynamic_shadow_.bytes() < dynamic_bytes) dynamic_shadow_.resize(dynamic_bytes, false);
}

std::string Memory::check(const Access& access, const Moment& now) {
  const uintptr_t begin = access.address, end = begin + access.bytes;
  const char* verb = access.write ? "writes" : "reads";
  if (access.aligned && begin % access.bytes != 0)
    return text("misaligned: %s %zu bytes at an address that is %zu more than a multiple of them",
                verb, access.bytes, size_t(begin % access.bytes));

  const uintptr_t dynamic = reinterpret_cast<uintptr_t>(dynamic_);
  if (begin >= dynamic && begin < dynamic + kDynamicMost) {
    if (end > dynamic + dynamic_bytes_)
      return text("out of bounds: %s %zu bytes at offset %zu of %zu bytes of dynamic shared memory",
                  verb, access.bytes, size_t(begin - dynamic), dynamic_bytes_);
    return dynamic_shadow_.check(begin - dynamic, access, now, block_, "shared");
  }

  auto after = buffers_.upper_bound(begin);
  if (after != buffers_.begin()) {
    auto& [address, buffer] = *std::prev(after);
    if (begin < address + buffer.bytes) {
      if (end > address + buffer.bytes)
        return text("out of bounds: %s %zu bytes at offset %zu of a buffer of %zu", verb,
                    access.bytes, size_t(begin - address), buffer.bytes);
      if (access.write && !buffer.writable) return text("writes to an input");
      buffer.moved[access.write] += int64_t(access.bytes);
      ++buffer.moved[2 + access.write];
      return buffer.shadow.check(begin - address, access, now, launch_, "global");
    }
  }

  if (const Segment* segment = segment_of(begin)) {
    if (!segment->writable) return access.write ? text("writes to a constant") : "";
    if (end > segment->end) return text("out of bounds: %s past the end of a segment", verb);
    const auto [place, is_new] = static_shared_.try_emplace(segment->begin, true);
    Shadow& shadow = place->second;
    if (is_new) shadow.resize(segment->end - segment->begin, false);
    return shadow.check(begin - segment->begin, access, now, block_, "shared");
  }

  size_t before = SIZE_MAX, behind = SIZE_MAX;
  if (after != buffers_.end()) before = after->first - begin;
  if (after != buffers_.begin())
    behind = begin - std::prev(after)->first - std::prev(after)->second.bytes;
  const std::string nearest =
      buffers_.empty() ? "none was given"
      : behind < before
          ? text("%zu bytes past the end of one of %zu", behind, std::prev(after)->second.bytes)
          : text("%zu bytes before the start of one of %zu", before, after->second.bytes);
  return text("out of bounds: %s %zu bytes outside of every buffer: %s", verb, access.bytes,
              nearest.c_str());
}

void Memory::traffic(size_t least, int64_t (&moved)[4]) const {
  for (int which = 0; which < 4; ++which) {
    moved[which] = 0;
    for (const auto& [address, buffer] : buffers_)
      if (buffer.bytes >= least) moved[which] += buffer.moved[which];
  }
}

size_t& shared_of(const void* kernel) {
  static std::map<const void*, size_t> bytes;
  return bytes.try_emplace(kernel, Memory::kDynamicUsual).first->second;
}

}  // namespace emulator

// Device 0 has the shared memory of sm_120; blocks of device 1 may not ask for more.
static int device_now = 0;
extern "C" __attribute__((visibility("default"))) void emulator_device(int device) {
  device_now = device;
}
cudaError_t cudaGetDevice(int* device) {
  *device = device_now;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const size_t shared = device == 0 ? emulator::Memory::kDynamicMost : 1 << 10;
  *value = attribute == cudaDevAttrMultiProcessorCount ? 2 : int(shared);
  return cudaSuccess;
}
