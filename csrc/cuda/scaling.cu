// Kernels beside the optimizer step: the update of the loss scale, and gradients to zero.
#include "../optimizer_step.h"
#include "launch.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

__global__ void update_scale_kernel(ScaleUpdate update) { formulas::next_scale(update); }

constexpr int kZeroThreads = 256;
// Bytes of a block: 8 stores of 16 bytes a thread. ResNet-50's gradients make 3200 blocks.
constexpr int64_t kZeroBytes = 8 * 16 * kZeroThreads;

// Ranges of one launch; more ranges are more launches.
template <int kBytes>
struct ZeroTable {
  static constexpr int kRanges =
      (kBytes - sizeof(int64_t)) / (sizeof(char*) + sizeof(int64_t) + sizeof(uint32_t));
  char* data[kRanges];
  int64_t bytes[kRanges];
  uint32_t first_block[kRanges];
  int count;
};
using FewRanges = ZeroTable<kSmallArgumentBytes>;  // 204: ResNet-50's gradients are 161
using ManyRanges = ZeroTable<kArgumentBytes>;      // 1637
static_assert(sizeof(FewRanges) <= kSmallArgumentBytes && sizeof(ManyRanges) <= kArgumentBytes, "");

template <class Table>
__global__ void __launch_bounds__(kZeroThreads) zero_kernel(const Table __grid_constant__ table) {
  int low = 0, high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_block[middle] <= blockIdx.x)
      low = middle;
    else
      high = middle;
  }
  const int64_t start = int64_t(blockIdx.x - table.first_block[low]) * kZeroBytes;
  const int64_t left = table.bytes[low] - start;
  const int bytes = left < kZeroBytes ? int(left) : int(kZeroBytes);
  char* const data = table.data[low] + start;
  // Up to the first multiple of 16, in steps of 16, and what is left.
  const int before = int((16 - reinterpret_cast<uintptr_t>(data) % 16) % 16);
  const int head = before < bytes ? before : bytes;
  const int body = (bytes - head) / 16 * 16;
  const int thread = threadIdx.x;
  for (int i = thread; i < head; i += kZeroThreads) data[i] = 0;
  for (int i = head + 16 * thread; i < head + body; i += 16 * kZeroThreads)
    *reinterpret_cast<uint4*>(data + i) = make_uint4(0, 0, 0, 0);
  for (int i = head + body + thread; i < bytes; i += kZeroThreads) data[i] = 0;
}

template <class Table>
void zero_by(const ZeroRange* ranges, int64_t count, void* stream) {
  Table table;
  table.count = 0;
  int64_t blocks = 0;
  const auto flush = [&] {
    if (blocks > 0) launch(&zero_kernel<Table>, blocks, kZeroThreads, stream, 0, table);
    table.count = 0;
    blocks = 0;
  };
  // A grid has 2^31 - 1 blocks at most: 64 TiB.
  for (int64_t i = 0; i < count; ++i) {
    if (ranges[i].bytes == 0) continue;
    table.data[table.count] = static_cast<char*>(ranges[i].data);
    table.bytes[table.count] = ranges[i].bytes;
    table.first_block[table.count++] = static_cast<uint32_t>(blocks);
    blocks += ceil_div(ranges[i].bytes, kZeroBytes);
    if (table.count == Table::kRanges) flush();
  }
  flush();
}

}  // namespace

void update_scale(const ScaleUpdate& update, void* stream) {
  launch(update_scale_kernel, 1, 1, stream, 0, update);
}

void zero(const ZeroRange* ranges, int64_t count, void* stream) {
  if (count <= FewRanges::kRanges)
    zero_by<FewRanges>(ranges, count, stream);
  else
    zero_by<ManyRanges>(ranges, count, stream);
}

}  // namespace cuda
}  // namespace fusedtrain
