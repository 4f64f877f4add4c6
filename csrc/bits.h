// Small numbers ("codes") packed into bytes, the same on every backend and in
// fusedtrain/reference/bits.py.
//
// 256 consecutive codes are a block of 256 * bits / 8 bytes; the last one is filled up with zeros.
// With 1, 2, 4 or 8 bits a block is cut into 8 / bits parts, and byte i of it holds code i of each
// part, that of the first one in its lowest bits: loops over bytes vectorise without shuffles. With
// 3 bits a block is one of the 2 low bits (64 bytes), then one of the third (32 bytes).
#pragma once

#include <stdint.h>

#include "host_device.h"

FT_BEGIN_NAMESPACE

constexpr int kCodeBlock = 256;

FT_INLINE constexpr int block_bytes(int bits) { return kCodeBlock / 8 * bits; }

FT_INLINE constexpr int64_t bytes_of(int64_t n, int bits) {
  return (n + kCodeBlock - 1) / kCodeBlock * block_bytes(bits);
}

// Where code i is, of 1, 2, 4 or 8 bits.
struct Spot {
  int64_t byte;
  int shift;
};
FT_INLINE constexpr Spot spot_of(int64_t i, int bits) {
  const int part = block_bytes(bits), rest = int(i % kCodeBlock);
  return {i / kCodeBlock * part + rest % part, rest / part * bits};
}

FT_END_NAMESPACE
