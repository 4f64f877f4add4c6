// Max pooling of runs of outputs whose windows lie the same way.
#pragma once

#include "../../bits.h"
#include "../../ops/pool.h"
#include "steps.h"

FT_BEGIN_NAMESPACE

// Outputs that wait to be packed: whole blocks of codes, whose places and maxima stay in the
// first-level cache.
constexpr int64_t kPoolRun = 8 * kBitBlock;

// Places are as wide as the numbers, so that one comparison selects both.
template <class T>
struct PlaceOf {
  using P = int32_t;
};
template <>
struct PlaceOf<double> {
  using P = int64_t;
};

// kStride 0: any. The first of equal numbers stays, the last NaN: as in torch.
template <int kStride, class T, class P>
FT_INLINE void take(const T* x, int64_t stride, T* best, P* place, P code, int64_t n) {
  if (kStride > 0) stride = kStride;
#pragma GCC ivdep
  for (int64_t k = 0; k < n; ++k) {
    const T value = x[k * stride], before = best[k];
    const bool wins = (value > before) | (value != value);
    best[k] = wins ? value : before;
    place[k] = wins ? code : place[k];
  }
}

template <int kBits, class P>
FT_INLINE void pack_places(const P* place, uint8_t* codes) {
  constexpr int kParts = 8 / kBits, kBytes = kBitBlock / kParts;
#pragma GCC ivdep
  for (int i = 0; i < kBytes; ++i) {
    P byte = 0;
    for (int k = 0; k < kParts; ++k) byte |= place[i + k * kBytes] << (k * kBits);
    codes[i] = uint8_t(byte);
  }
}

template <class P>
FT_INLINE void pack_places(int bits, const P* place, uint8_t* codes) {
  if (bits == 1) return pack_places<1>(place, codes);
  if (bits == 2) return pack_places<2>(place, codes);
  if (bits == 4) return pack_places<4>(place, codes);
  pack_places<8>(place, codes);
}

template <class P>
FT_INLINE void unpack_places(int bits, const uint8_t* codes, int64_t first, int64_t n, P* place) {
  const int64_t part = block_bytes(bits);
  const P mask = (P(1) << bits) - 1;
  while (n > 0) {
    const Spot spot = spot_of(first, bits);
    const uint8_t* from = codes + spot.byte;
    const int64_t count = smaller(part - spot.byte % part, n);
#pragma GCC ivdep
    for (int64_t k = 0; k < count; ++k) place[k] = (P(from[k]) >> spot.shift) & mask;
    first += count, place += count, n -= count;
  }
}

// sums[k] += grad[k] where the window's maximum is at `code`.
template <class T, class P>
FT_INLINE void add_where(const P* place, const T* grad, P code, T* sums, int64_t n) {
#pragma GCC ivdep
  for (int64_t k = 0; k < n; ++k) sums[k] += place[k] == code ? grad[k] : T(0);
}

FT_END_NAMESPACE
