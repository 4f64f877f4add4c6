// How codes of 1, 2, 3, 4 or 8 bits are packed: in blocks of 256 elements, vertically, so that a
// loop over bytes needs no shuffles. fusedtrain/reference/bits.py is the same in torch.
//
// A block has 8 steps of 32 elements and `bits` runs of 32 bytes. Byte i of run r holds, from the
// lowest bits up, the codes of element i of steps r, r + bits, r + 2 bits, ... Of 3 bits the lower
// two are packed so, as codes of 2 bits, and the third ones in the run after them, as codes of 1
// bit. The last block is filled up with code 0.
#pragma once

#include <stdint.h>

#include "host_device.h"

namespace fusedtrain {

constexpr int kBitBlock = 256, kBitStep = 32, kBitSteps = kBitBlock / kBitStep;

FT_METHOD constexpr int64_t bit_blocks(int64_t n) { return (n + kBitBlock - 1) / kBitBlock; }
FT_METHOD constexpr int block_bytes(int bits) { return kBitStep * bits; }
FT_METHOD constexpr int64_t packed_bytes(int64_t n, int bits) {
  return bit_blocks(n) * block_bytes(bits);
}

// The bits that are packed together: all but the third of 3.
FT_METHOD constexpr int low_bits(int bits) { return bits == 3 ? 2 : bits; }
// Where the code of a step is: its run, and how far up in the bytes.
FT_METHOD constexpr int run_of(int step, int bits) { return step % low_bits(bits); }
FT_METHOD constexpr int shift_of(int step, int bits) {
  return step / low_bits(bits) * low_bits(bits);
}

// Where code i is, of 1, 2, 4 or 8 bits.
struct Spot {
  int64_t byte;
  int shift;
};
FT_METHOD constexpr Spot spot_of(int64_t i, int bits) {
  const int part = block_bytes(bits), rest = int(i % kBitBlock);
  return {i / kBitBlock * part + rest % part, rest / part * bits};
}

}  // namespace fusedtrain
