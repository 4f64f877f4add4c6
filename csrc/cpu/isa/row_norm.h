// Loops of the norms of rows (cpu/row_norm.cpp): a block at a time where its elements are
// neighbours, else a tile of neighbouring blocks at a time.
//
// Each loop goes over its block or tile again, in the cache, rather than guess: the variance is
// that of distances from the mean, so a large mean costs no digits.
#pragma once

#include "../../ops/row_norm.h"
#include "kernels.h"
#include "steps.h"

FT_BEGIN_NAMESPACE

using cpu::kNormChunk;
using cpu::kNormWidth;

// The total over n elements of what f(i, part, lanes) adds to the lanes of a step: chunks in the
// type computed in, their totals in double. kTwo: `second` is that of the lanes a step further on.
template <class T, bool kTwo, class F>
FT_METHOD double sum_of(int64_t n, double& second, const F& f) {
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kNormChunk) {
    alignas(64) T lanes[kTwo ? 2 * kStep : kStep] = {};
    each_step(smaller(kNormChunk, n - begin),
              [&](int64_t i, auto part)
                  __attribute__((always_inline)) { f(begin + i, part, lanes); });
    sum += double(total(lanes));
    if (kTwo) second += double(total(lanes + kStep));
  }
  return sum;
}

// sum = x + residual, rounded as it is stored.
template <class Format, class S>
FT_METHOD void add_rows(const S* x, const S* residual, S* sum, int64_t n) {
  each_step(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
    const In<Format> in(x + i, part), other(residual + i, part);
    Out<Format> out(sum + i, part);
#pragma GCC ivdep
    for (int lane = 0; lane < kStep; ++lane) out.lane[lane] = in.lane[lane] + other.lane[lane];
    out.finish(sum + i, part);
  });
}

// Whether a gradient of the sum is added.
struct Added {
  static constexpr bool kIs = true;
};
struct Alone {
  static constexpr bool kIs = false;
};

// The reciprocal deviation, from the sums of n distances from a mean and of their squares.
template <class T>
FT_METHOD T rstd_of(double distances, double squares, int64_t n, double eps) {
  const double off = distances / double(n), variance = squares / double(n) - off * off;
  return T(1.0 / __builtin_sqrt((variance < 0 ? 0 : variance) + eps));
}

// Blocks [first, last) of neighbouring elements. `weight` and `bias` have room for a step more.
template <class Format, bool kCentered, class T>
FT_METHOD void norm_blocks(const RowNormForward& call, const T* weight, const T* bias,
                           int64_t first, int64_t last) {
  using S = typename Format::Stored;
  const int64_t n = call.n;
  for (int64_t row = first; row < last; ++row) {
    const S* x = static_cast<const S*>(call.x) + row * n;
    S* y = static_cast<S*>(call.y) + row * n;
    if (call.residual != nullptr) {
      S* sum = static_cast<S*>(call.sum) + row * n;
      add_rows<Format>(x, static_cast<const S*>(call.residual) + row * n, sum, n);
      x = sum;
    }
    T mean = T(0);
    if constexpr (kCentered) {
      double none = 0;
      const auto add = [&](int64_t i, auto part, T* lanes) __attribute__((always_inline)) {
        const In<Format> in(x + i, part);
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane) lanes[lane] += in.lane[lane];
      };
      mean = T(sum_of<T, false>(n, none, add) / double(n));
    }
    double distances = 0;
    const auto add_squares = [&](int64_t i, auto part, T* lanes) __attribute__((always_inline)) {
      const In<Format> in(x + i, part);
      if constexpr (kCentered) {
        alignas(64) T distance[kStep];
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane)
          distance[lane] = lane < part.n ? in.lane[lane] - mean : T(0);
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane) {
          lanes[lane] += distance[lane] * distance[lane];
          lanes[kStep + lane] += distance[lane];
        }
      } else {
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane) lanes[lane] += in.lane[lane] * in.lane[lane];
      }
    };
    const double squares = sum_of<T, kCentered>(n, distances, add_squares);
    const T rstd = rstd_of<T>(distances, squares, n, call.eps);
    const T off = T(distances / double(n));
    if constexpr (kCentered) static_cast<T*>(call.mean)[row] = mean + off;
    static_cast<T*>(call.rstd)[row] = rstd;
    each_step(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
      const In<Format> in(x + i, part);
      Out<Format> out(y + i, part);
#pragma GCC ivdep
      for (int lane = 0; lane < kStep; ++lane) {
        const T distance = kCentered ? in.lane[lane] - mean - off : in.lane[lane];
        const T norm = distance * rstd * weight[i + lane];
        out.lane[lane] = kCentered ? norm + bias[i + lane] : norm;
      }
      out.finish(y + i, part);
    });
  }
}
template <class Format, class T>
void norm_forward_blocks(const RowNormForward& call, const T* weight, const T* bias, int64_t first,
                         int64_t last) {
  if (call.centered)
    norm_blocks<Format, true>(call, weight, bias, first, last);
  else
    norm_blocks<Format, false>(call, weight, bias, first, last);
}

// weight_sums[] += grad norm, bias_sums[] += grad over the blocks (null: not needed); both have
// room for a step more.
template <class Format, bool kCentered, bool kSums, class T>
FT_METHOD void norm_gradients(const RowNormBackward& call, const T* weight, T* weight_sums,
                              T* bias_sums, int64_t first, int64_t last) {
  using S = typename Format::Stored;
  const int64_t n = call.n;
  for (int64_t row = first; row < last; ++row) {
    const S *g = static_cast<const S*>(call.grad) + row * n,
            *x = static_cast<const S*>(call.x) + row * n;
    const T rstd = static_cast<const T*>(call.rstd)[row];
    const T mean = kCentered ? static_cast<const T*>(call.mean)[row] : T(0);
    double terms = 0, products = 0;
    for (int64_t begin = 0; begin < n; begin += kNormChunk) {
      alignas(64) T term[kStep] = {}, product[kStep] = {};
      each_step(smaller(kNormChunk, n - begin), [&](int64_t step,
                                                    auto part) __attribute__((always_inline)) {
        const int64_t i = begin + step;
        const In<Format> grad(g + i, part), in(x + i, part);
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane) {
          const T norm = (in.lane[lane] - mean) * rstd, scaled = grad.lane[lane] * weight[i + lane];
          const T of_weight = grad.lane[lane] * norm;
          if (kCentered) term[lane] += scaled;
          product[lane] += of_weight * weight[i + lane];
          if (kSums) weight_sums[i + lane] += of_weight;
          if (kSums && kCentered) bias_sums[i + lane] += grad.lane[lane];
        }
      });
      terms += double(total(term));
      products += double(total(product));
    }
    const T of_mean = T(terms / double(n)), of_norm = T(products / double(n));
    const S* more = static_cast<const S*>(call.grad_sum);
    S* out_row = static_cast<S*>(call.grad_input) + row * n;
    const auto write = [&](auto added) __attribute__((always_inline)) {
      each_step(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
        const In<Format> grad(g + i, part), in(x + i, part);
        const In<Format> other(decltype(added)::kIs ? more + row * n + i : g + i, part);
        Out<Format> out(out_row + i, part);
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane) {
          const T norm = (in.lane[lane] - mean) * rstd, scaled = grad.lane[lane] * weight[i + lane];
          const T d =
              (kCentered ? scaled - of_mean - norm * of_norm : scaled - norm * of_norm) * rstd;
          out.lane[lane] = decltype(added)::kIs ? d + other.lane[lane] : d;
        }
        out.finish(out_row + i, part);
      });
    };
    if (more != nullptr)
      write(Added());
    else
      write(Alone());
  }
}
template <class Format, class T>
void norm_backward_blocks(const RowNormBackward& call, const T* weight, T* weight_sums,
                          T* bias_sums, int64_t first, int64_t last) {
  const bool sums = weight_sums != nullptr;
  if (call.centered && sums)
    norm_gradients<Format, true, true>(call, weight, weight_sums, bias_sums, first, last);
  else if (call.centered)
    norm_gradients<Format, true, false>(call, weight, weight_sums, bias_sums, first, last);
  else if (sums)
    norm_gradients<Format, false, true>(call, weight, weight_sums, bias_sums, first, last);
  else
    norm_gradients<Format, false, false>(call, weight, weight_sums, bias_sums, first, last);
}

// Statistics of a tile's blocks, with room for a step more.
template <class T>
struct TileStatistics {
  alignas(64) T mean[kNormWidth + kStep] = {}, rstd[kNormWidth + kStep] = {};
};

// totals[] and seconds[] += what f(k, i, part, lanes, others) adds over the n elements of each of
// `width` blocks.
template <class T, class F>
FT_METHOD void column_sums(int64_t n, int64_t width, double* totals, double* seconds, const F& f) {
  for (int64_t begin = 0; begin < n; begin += kNormChunk / kStep) {
    TileStatistics<T> sums;
    const int64_t end = smaller(n, begin + kNormChunk / kStep);
    for (int64_t k = begin; k < end; ++k)
      each_step(width, [&](int64_t i, auto part) __attribute__((always_inline)) {
        f(k, i, part, sums.mean + i, sums.rstd + i);
      });
    for (int64_t i = 0; i < width; ++i) {
      totals[i] += double(sums.mean[i]);
      seconds[i] += double(sums.rstd[i]);
    }
  }
}

// A tile: `width` blocks of a row, from `place` of its inner places on.
template <class Format, bool kCentered, class T>
FT_METHOD void norm_tile(const RowNormForward& call, const T* weight, const T* bias, int64_t row,
                         int64_t place, int64_t width) {
  using S = typename Format::Stored;
  const int64_t n = call.n, inner = call.inner, start = row * n * inner + place;
  const S* x = static_cast<const S*>(call.x) + start;
  S* y = static_cast<S*>(call.y) + start;
  if (call.residual != nullptr) {
    S* sum = static_cast<S*>(call.sum) + start;
    const S* residual = static_cast<const S*>(call.residual) + start;
    for (int64_t k = 0; k < n; ++k)
      add_rows<Format>(x + k * inner, residual + k * inner, sum + k * inner, width);
    x = sum;
  }
  TileStatistics<T> t;
  double squares[kNormWidth] = {}, distances[kNormWidth] = {};
  if constexpr (kCentered) {
    double totals[kNormWidth] = {};
    column_sums<T>(n, width, totals, squares,
                   [&](int64_t k, int64_t i, auto part, T* lanes, T*)
                       __attribute__((always_inline)) {
                         const In<Format> in(x + k * inner + i, part);
#pragma GCC ivdep
                         for (int lane = 0; lane < kStep; ++lane) lanes[lane] += in.lane[lane];
                       });
    for (int64_t i = 0; i < width; ++i) t.mean[i] = T(totals[i] / double(n));
  }
  column_sums<T>(n, width, distances, squares,
                 [&](int64_t k, int64_t i, auto part, T* lanes, T* others)
                     __attribute__((always_inline)) {
                       const In<Format> in(x + k * inner + i, part);
#pragma GCC ivdep
                       for (int lane = 0; lane < kStep; ++lane) {
                         const T distance = in.lane[lane] - t.mean[i + lane];
                         if (kCentered) lanes[lane] += distance;
                         others[lane] += distance * distance;
                       }
                     });
  TileStatistics<T> off;
  for (int64_t i = 0; i < width; ++i) {
    const int64_t block = row * inner + place + i;
    t.rstd[i] = rstd_of<T>(distances[i], squares[i], n, call.eps);
    static_cast<T*>(call.rstd)[block] = t.rstd[i];
    off.mean[i] = T(distances[i] / double(n));
    if constexpr (kCentered) static_cast<T*>(call.mean)[block] = t.mean[i] + off.mean[i];
  }
  for (int64_t k = 0; k < n; ++k) {
    const T scale = weight[k], shift = bias[k];
    each_step(width, [&](int64_t i, auto part) __attribute__((always_inline)) {
      const In<Format> in(x + k * inner + i, part);
      Out<Format> out(y + k * inner + i, part);
#pragma GCC ivdep
      for (int lane = 0; lane < kStep; ++lane)
        out.lane[lane] =
            (in.lane[lane] - t.mean[i + lane] - off.mean[i + lane]) * t.rstd[i + lane] * scale +
            shift;
      out.finish(y + k * inner + i, part);
    });
  }
}
template <class Format, class T>
void norm_forward_tile(const RowNormForward& call, const T* weight, const T* bias, int64_t row,
                       int64_t place, int64_t width) {
  if (call.centered)
    norm_tile<Format, true>(call, weight, bias, row, place, width);
  else
    norm_tile<Format, false>(call, weight, bias, row, place, width);
}

// sums[k] += that of grad norm over the tile's blocks, sums[n + k] += that of grad (null: not
// needed).
template <class Format, class T>
void norm_backward_tile(const RowNormBackward& call, const T* weight, double* sums, int64_t row,
                        int64_t place, int64_t width) {
  using S = typename Format::Stored;
  const int64_t n = call.n, inner = call.inner, start = row * n * inner + place;
  const S *g = static_cast<const S*>(call.grad) + start, *x = static_cast<const S*>(call.x) + start;
  const S* more = static_cast<const S*>(call.grad_sum);
  S* to = static_cast<S*>(call.grad_input) + start;
  TileStatistics<T> t, average;  // averages of the gradient (mean), and of its products (rstd)
  for (int64_t i = 0; i < width; ++i) {
    if (call.centered) t.mean[i] = static_cast<const T*>(call.mean)[row * inner + place + i];
    t.rstd[i] = static_cast<const T*>(call.rstd)[row * inner + place + i];
  }
  double terms[kNormWidth] = {}, products[kNormWidth] = {};
  for (int64_t begin = 0; begin < n; begin += kNormChunk / kStep) {
    TileStatistics<T> chunk;
    const int64_t end = smaller(n, begin + kNormChunk / kStep);
    for (int64_t k = begin; k < end; ++k) {
      const T scale = weight[k];
      alignas(64) T of_weight[kStep] = {}, of_bias[kStep] = {};
      each_step(width, [&](int64_t i, auto part) __attribute__((always_inline)) {
        const In<Format> grad(g + k * inner + i, part), in(x + k * inner + i, part);
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane) {
          const T d = grad.lane[lane];
          const T product = d * (in.lane[lane] - t.mean[i + lane]) * t.rstd[i + lane];
          of_weight[lane] += product;
          of_bias[lane] += d;
          chunk.mean[i + lane] += d * scale;
          chunk.rstd[i + lane] += product * scale;
        }
      });
      if (sums != nullptr) {
        sums[k] += double(total(of_weight));
        sums[n + k] += double(total(of_bias));
      }
    }
    for (int64_t i = 0; i < width; ++i) {
      terms[i] += double(chunk.mean[i]);
      products[i] += double(chunk.rstd[i]);
    }
  }
  for (int64_t i = 0; i < width; ++i) {
    if (call.centered) average.mean[i] = T(terms[i] / double(n));
    average.rstd[i] = T(products[i] / double(n));
  }
  const auto write = [&](auto added) __attribute__((always_inline)) {
    constexpr bool kAdds = decltype(added)::kIs;
    for (int64_t k = 0; k < n; ++k) {
      const T scale = weight[k];
      each_step(width, [&](int64_t i, auto part) __attribute__((always_inline)) {
        const int64_t at = k * inner + i;
        const In<Format> grad(g + at, part), in(x + at, part);
        const In<Format> other(kAdds ? more + start + at : g + at, part);
        Out<Format> out(to + at, part);
#pragma GCC ivdep
        for (int lane = 0; lane < kStep; ++lane) {
          const T norm = (in.lane[lane] - t.mean[i + lane]) * t.rstd[i + lane];
          const T d =
              (grad.lane[lane] * scale - average.mean[i + lane] - norm * average.rstd[i + lane]) *
              t.rstd[i + lane];
          out.lane[lane] = kAdds ? d + other.lane[lane] : d;
        }
        out.finish(to + at, part);
      });
    }
  };
  if (more != nullptr)
    write(Added());
  else
    write(Alone());
}

FT_END_NAMESPACE
