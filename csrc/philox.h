// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random
// words as a function of a seed and a position.
//
// Word i of the stream of a seed (two 64-bit numbers) is word i % 4 of the block whose key is the
// first number and whose counter is i / 4 (low half) and the second number (high half).
//
// A word serves two elements of a tensor: element 8 b + k of its memory has number k of block b,
// for k < 4 word k, else word k - 4 with its halves exchanged. An element is dropped where its
// number is below 2^32 p: its probability is exact to 2^-32. The two elements of a word depend on
// one another only where a half of the word equals that of the threshold: the probability that
// both are dropped is at most 2^-17 off its square (all thresholds were counted), a correlation of
// at most 2^-15. 28 billion pairs would show it at five standard deviations.
#pragma once

#include <stdint.h>

#include "host_device.h"

FT_BEGIN_NAMESPACE

struct Philox {
  static constexpr uint64_t kFirst = 0xD2511F53u, kSecond = 0xCD9E8D57u;
  static constexpr uint32_t kStep0 = 0x9E3779B9u, kStep1 = 0xBB67AE85u;

  uint32_t word[4];

  FT_METHOD Philox(uint64_t key, uint64_t block, uint64_t high)
      : word{uint32_t(block), uint32_t(block >> 32), uint32_t(high), uint32_t(high >> 32)} {
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    // Ten times, spelt out: a formula knows no loop, and compilers vectorise it so.
    turn(k0, k1), turn(k0, k1), turn(k0, k1), turn(k0, k1), turn(k0, k1);
    turn(k0, k1), turn(k0, k1), turn(k0, k1), turn(k0, k1), turn(k0, k1);
  }

  FT_METHOD void turn(uint32_t& k0, uint32_t& k1) {
    const uint64_t a = product(kFirst, word[0]), b = product(kSecond, word[2]);
    const uint32_t w1 = word[1], w3 = word[3];
    word[0] = uint32_t(b >> 32) ^ w1 ^ k0;
    word[1] = uint32_t(b);
    word[2] = uint32_t(a >> 32) ^ w3 ^ k1;
    word[3] = uint32_t(a);
    k0 += kStep0;
    k1 += kStep1;
  }

  // The word with its halves exchanged if by is 16, itself if by is 0.
  FT_METHOD static uint32_t rotated(uint32_t word, uint32_t by) {
    return word << by | word >> (-by & 31);
  }

  FT_METHOD static uint64_t product(uint64_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && defined(__NVCC__)
    // One instruction. nvcc makes two of a * b: it adds 0 to the high half.
    uint64_t result;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(result) : "r"(uint32_t(a)), "r"(b));
    return result;
#else
    return a * b;
#endif
  }
};

FT_END_NAMESPACE
