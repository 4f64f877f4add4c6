// Loops of images.cpp: bytes to normalised numbers, and bytes from planes to pixels and back.
#pragma once

#include "kernels.h"
#include "steps.h"

FT_BEGIN_NAMESPACE

// Widened by hand: GCC makes vectors of half the width of it, and the converters of 16-bit numbers
// then wait for two stores at each load (bfloat16: 0.40 ns an element so, 0.15 by hand).
struct Byte {
  using Number = float;
  using Stored = uint8_t;

  template <int kCount>
  static FT_METHOD void load(const uint8_t* in, float* out) {
#if defined(__AVX512F__)
    for (int i = 0; i < kCount; i += 16) {
      const __m128i bytes = _mm_loadu_si128((const __m128i*)(in + i));
      _mm512_storeu_ps(out + i, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)));
    }
#elif defined(__AVX2__)
    for (int i = 0; i < kCount; i += 8) {
      const __m128i bytes = _mm_loadl_epi64((const __m128i*)(in + i));
      _mm256_storeu_ps(out + i, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)));
    }
#else
    for (int i = 0; i < kCount; ++i) out[i] = in[i];
#endif
  }
};

template <class Format, class S>
void normalize_run(const uint8_t* x, S* y, int64_t n, const float* upper, const float* lower,
                   const float* shift, int64_t step) {
  const auto run = [&](auto upper_of, auto lower_of, auto shift_of) __attribute__((always_inline)) {
    each_step(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
      const In<Byte> from(x + i, part);
      Out<Format> out(y + i, part);
      const auto a = upper_of(i), b = lower_of(i), c = shift_of(i);
#pragma GCC ivdep
      for (int lane = 0; lane < kStep; ++lane) {
        const float value = from.lane[lane];
        out.lane[lane] = value * a[lane] + (value * b[lane] + c[lane]);
      }
      out.finish(y + i, part);
    });
  };
  const auto same = [](const float* p) __attribute__((always_inline)) {
    return [value = Same<float>{*p}](int64_t) __attribute__((always_inline)) { return value; };
  };
  const auto each = [](const float* p) __attribute__((always_inline)) {
    return [p](int64_t i) __attribute__((always_inline)) { return p + i; };
  };
  if (step == 0)
    run(same(upper), same(lower), same(shift));
  else
    run(each(upper), each(lower), each(shift));
}

// With the number of channels known GCC makes shuffles of it (0.04 ns a byte of 3 channels, AVX2).
template <int kChannels>
FT_METHOD void join_known(const uint8_t* __restrict__ planes, int64_t stride,
                          uint8_t* __restrict__ pixels, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    for (int c = 0; c < kChannels; ++c) pixels[kChannels * i + c] = planes[c * stride + i];
}
template <int kChannels>
FT_METHOD void split_known(const uint8_t* __restrict__ pixels, uint8_t* __restrict__ planes,
                           int64_t stride, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    for (int c = 0; c < kChannels; ++c) planes[c * stride + i] = pixels[kChannels * i + c];
}

void join_channels(const uint8_t* planes, int64_t stride, int64_t channels, uint8_t* pixels,
                   int64_t n) {
  if (channels == 3) return join_known<3>(planes, stride, pixels, n);
  if (channels == 4) return join_known<4>(planes, stride, pixels, n);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < channels; ++c) pixels[channels * i + c] = planes[c * stride + i];
}
void split_channels(const uint8_t* pixels, int64_t channels, uint8_t* planes, int64_t stride,
                    int64_t n) {
  if (channels == 3) return split_known<3>(pixels, planes, stride, n);
  if (channels == 4) return split_known<4>(pixels, planes, stride, n);
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t i = 0; i < n; ++i) planes[c * stride + i] = pixels[channels * i + c];
}

FT_END_NAMESPACE
