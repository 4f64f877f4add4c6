// Sums of products of a depthwise convolution, over data that are laid out with borders of zeros.
//
// The forward and the gradient of the input are both correlations: output (r, c) is the sum over
// the taps of weight times laid[r row_step + c + offset]. Where the stride is s, columns (and for
// the gradient rows) that are s apart are laid out as neighbours, so that all loads are of
// neighbours.
#pragma once

#include "steps.h"

FT_BEGIN_NAMESPACE

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct IntegerOf {
  using I = int32_t;
};
template <>
struct IntegerOf<double> {
  using I = int64_t;
};

template <class T>
struct VectorOf {
  typedef T Register __attribute__((vector_size(kVectorBytes)));
  typedef T Anywhere __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
  static constexpr int kLanes = kVectorBytes / sizeof(T);

  static FT_METHOD Register load(const T* p) { return *(const Anywhere*)p; }
  static FT_METHOD void store(Register v, T* p) { *(Anywhere*)p = v; }
  static FT_METHOD Register all(T value) { return value - Register{}; }
  static FT_METHOD void store_first(Register v, T* p, int64_t n) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
      _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), (__m512)v);
    else
      _mm512_mask_storeu_pd(p, __mmask8((1u << n) - 1), (__m512d)v);
#else
    // A masked store is some 20 operations on AMD.
    const T* from = (const T*)&v;
    if (kLanes > 4 && n & 4) __builtin_memcpy(p, from, 4 * sizeof(T)), p += 4, from += 4;
    if (n & 2) __builtin_memcpy(p, from, 2 * sizeof(T)), p += 2, from += 2;
    if (n & 1) *p = *from;
#endif
  }
  // The first n lanes, and zeros.
  typedef typename IntegerOf<T>::I Mask __attribute__((vector_size(kVectorBytes)));
  static FT_METHOD Mask first(int64_t n) {
    typedef typename IntegerOf<T>::I I;
    alignas(64) static constexpr I kCount[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                 8, 9, 10, 11, 12, 13, 14, 15};
    return *(const Mask*)kCount < (I(n) - Mask{});
  }
  static FT_METHOD Register load_first(const T* p, int64_t n, Mask mask) {
#if defined(__AVX512F__)
    (void)mask;
    if constexpr (sizeof(T) == 4)
      return (Register)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
    else
      return (Register)_mm512_maskz_loadu_pd(__mmask8((1u << n) - 1), p);
#elif defined(__AVX2__)
    (void)n;
    if constexpr (sizeof(T) == 4)
      return (Register)_mm256_maskload_ps(p, (__m256i)mask);
    else
      return (Register)_mm256_maskload_pd(p, (__m256i)mask);
#else
    (void)mask;
    Register v = {};
    for (int lane = 0; lane < kLanes; ++lane)
      if (lane < n) v[lane] = p[lane];
    return v;
#endif
  }
  static FT_METHOD Register load_where(const T* p, Mask mask) {
    return (Register)((Mask)load(p) & mask);
  }
};

// A correlation of a plane. Taps of one column of the kernel lie `tap_step` apart in the laid data.
template <class T>
struct Correlation {
  const T* laid;
  int64_t row_step, tap_step;
  const int64_t* offsets;  // of each column of taps
  const T* weights;        // [columns of taps][kernel_rows]
  int64_t tap_columns, kernel_rows;
  T start;                // the bias
  int64_t rows, columns;  // of outputs
  T* out;
  int64_t out_step;  // between rows of outputs
};

// kRows x kVectors registers of outputs. kTaps 0: any number of rows of the kernel, each tap with
// loads of its own; else a load serves all rows of outputs that see it, which are kStride of
// `tap_step` apart.
template <class T, int kTaps, int kStride, int kRows, int kVectors>
FT_METHOD void correlate_block(const Correlation<T>& c, const T* laid, T* out, int64_t columns) {
  using V = VectorOf<T>;
  typename V::Register sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[r][v] = V::all(c.start);
  const T* w = c.weights;
  for (int64_t t = 0; t < c.tap_columns; ++t) {
    const T* from = laid + c.offsets[t];
    if constexpr (kTaps > 0) {
      constexpr int kSeen = (kRows - 1) * kStride + kTaps;
      typename V::Register weights[kTaps];
#pragma GCC unroll 16
      for (int k = 0; k < kTaps; ++k) weights[k] = V::all(w[k]);
#pragma GCC unroll 16
      for (int j = 0; j < kSeen; ++j, from += c.tap_step) {
        typename V::Register x[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) x[v] = V::load(from + v * V::kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const int k = j - r * kStride;
          if (k >= 0 && k < kTaps)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) sums[r][v] += weights[k] * x[v];
        }
      }
      w += kTaps;
    } else {
      for (int64_t k = 0; k < c.kernel_rows; ++k, from += c.tap_step) {
        const typename V::Register weight = V::all(*w++);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v)
            sums[r][v] += weight * V::load(from + r * c.row_step + v * V::kLanes);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      T* const to = out + r * c.out_step + v * V::kLanes;
      if (columns >= (v + 1) * V::kLanes)
        V::store(sums[r][v], to);
      else
        V::store_first(sums[r][v], to, columns - v * V::kLanes);
    }
  }
}

template <class T, int kTaps, int kStride, int kRows>
FT_METHOD void correlate_rows(const Correlation<T>& c, int64_t row) {
  constexpr int kLanes = VectorOf<T>::kLanes;
  const T* laid = c.laid + row * c.row_step;
  T* out = c.out + row * c.out_step;
  int64_t column = 0;
  for (; column + kLanes < c.columns; column += 2 * kLanes)
    correlate_block<T, kTaps, kStride, kRows, 2>(c, laid + column, out + column,
                                                 c.columns - column);
  if (column < c.columns)
    correlate_block<T, kTaps, kStride, kRows, 1>(c, laid + column, out + column,
                                                 c.columns - column);
}

// Four rows at a time. The last four begin earlier where rows are left over: what is computed twice
// has the same bits.
template <class T, int kTaps, int kStride>
void correlate_known(const Correlation<T>& c) {
  constexpr int kRows = 4;
  if (c.rows < kRows) {
    for (int64_t row = 0; row < c.rows; ++row) correlate_rows<T, kTaps, kStride, 1>(c, row);
    return;
  }
  for (int64_t row = 0; row < c.rows; row += kRows)
    correlate_rows<T, kTaps, kStride, kRows>(c, smaller(row, c.rows - kRows));
}

template <class T>
void correlate(const Correlation<T>& c) {
  if (c.row_step == c.tap_step) {
    switch (c.kernel_rows) {
      case 2:
        return correlate_known<T, 2, 1>(c);
      case 3:
        return correlate_known<T, 3, 1>(c);
      case 4:
        return correlate_known<T, 4, 1>(c);
      case 5:
        return correlate_known<T, 5, 1>(c);
      case 7:
        return correlate_known<T, 7, 1>(c);
      case 9:
        return correlate_known<T, 9, 1>(c);
    }
  } else if (c.row_step == 2 * c.tap_step) {
    switch (c.kernel_rows) {
      case 3:
        return correlate_known<T, 3, 2>(c);
      case 5:
        return correlate_known<T, 5, 2>(c);
      case 7:
        return correlate_known<T, 7, 2>(c);
    }
  }
  correlate_known<T, 0, 0>(c);
}

// Sums of products of gradients and inputs, one for each tap and lane.
template <class T>
struct Products {
  const T* x;
  int64_t row_step, tap_step, x_step;  // between rows of gradients, of the kernel, registers
  const int64_t* offsets;              // of each column of the kernel
  int64_t kernel_rows, kernel_columns;
  const T* grad;
  int64_t grad_row, grad_step;
  int64_t rows, steps, rest;  // registers in a row of gradients, and lanes of one more
};

// kRows x kColumns of the taps. A register of gradients serves all of them.
template <class T, int kColumns, int kRows>
FT_METHOD void add_products_of(const Products<T>& p, int64_t row, int64_t column, T* sums) {
  using V = VectorOf<T>;
  typename V::Register total[kRows][kColumns];
  const int64_t sums_row = p.kernel_columns * V::kLanes;
  sums += row * sums_row + column * V::kLanes;
  const int64_t* const offsets = p.offsets + column;
#pragma GCC unroll 16
  for (int k = 0; k < kRows; ++k)
#pragma GCC unroll 16
    for (int q = 0; q < kColumns; ++q) total[k][q] = V::load(sums + k * sums_row + q * V::kLanes);
  const T *x = p.x + row * p.tap_step, *grad = p.grad;
  const auto mask = V::first(p.rest);
  for (int64_t r = 0; r < p.rows; ++r, x += p.row_step, grad += p.grad_row) {
    const T *from = x, *g = grad;
    for (int64_t i = 0; i < p.steps; ++i, from += p.x_step, g += p.grad_step) {
      const auto value = V::load(g);
#pragma GCC unroll 16
      for (int k = 0; k < kRows; ++k)
#pragma GCC unroll 16
        for (int q = 0; q < kColumns; ++q)
          total[k][q] += value * V::load(from + k * p.tap_step + offsets[q]);
    }
    if (p.rest == 0) continue;
    const auto value = V::load_first(g, p.rest, mask);
#pragma GCC unroll 16
    for (int k = 0; k < kRows; ++k)
#pragma GCC unroll 16
      for (int q = 0; q < kColumns; ++q)
        total[k][q] += value * V::load_where(from + k * p.tap_step + offsets[q], mask);
  }
#pragma GCC unroll 16
  for (int k = 0; k < kRows; ++k)
#pragma GCC unroll 16
    for (int q = 0; q < kColumns; ++q) V::store(total[k][q], sums + k * sums_row + q * V::kLanes);
}

// As many rows of the kernel at a time as registers hold sums of.
template <class T, int kColumns>
void add_products_of(const Products<T>& p, int64_t column, T* sums) {
  constexpr int kFit = (kVectorBytes == 64 ? 27 : 12) / kColumns;
  constexpr int kMost = kColumns == 1 ? 4 : kColumns;  // kernels are mostly square
  constexpr int kRows = kFit < kMost ? kFit : kMost;
  int64_t row = 0;
  for (; row + kRows <= p.kernel_rows; row += kRows)
    add_products_of<T, kColumns, kRows>(p, row, column, sums);
  for (; row < p.kernel_rows; ++row) add_products_of<T, kColumns, 1>(p, row, column, sums);
}

// sums: [kernel_rows][kernel_columns][lanes].
template <class T>
void add_products(const Products<T>& p, T* sums) {
  for (int64_t column = 0; column < p.kernel_columns;) {
    const int64_t left = p.kernel_columns - column;
    switch (left) {
      case 9:
        return add_products_of<T, 9>(p, column, sums);
      case 7:
        return add_products_of<T, 7>(p, column, sums);
      case 4:
        return add_products_of<T, 4>(p, column, sums);
      case 3:
        return add_products_of<T, 3>(p, column, sums);
      case 2:
        return add_products_of<T, 2>(p, column, sums);
      case 1:
        return add_products_of<T, 1>(p, column, sums);
    }
    add_products_of<T, 5>(p, column, sums);
    column += 5;
  }
}

FT_END_NAMESPACE
