// How batch norm goes over a tensor: tasks that threads may share, tiles of them that stay in the
// cache, and arrays with a value for each column of a tile.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "../ops/batch_norm.h"
#include "dispatch.h"

namespace fusedtrain {
namespace cpu {
namespace {

constexpr int64_t kTile = 1024;  // elements, at most twice as many: 4 KiB of each tensor
// Where channels are last and few, rows make runs of up to so many elements. They are read as
// memory lies, one stream of each tensor, and their sums stay in the cache: 8 x 512 x 28 x 28 took
// twice as long with four rows at once.
constexpr int64_t kRun = 512;
// Longer rows that the statistics, which read one tensor, take at once: their sums meet in
// registers (Zen 4, 2048 channels: 0.19 and 0.58 ns an element). Passes that read two tensors and
// write a third take one row: BN+SiLU's backward of 32 x 672 x 14 x 14 took 3.4 to 4.8 ns an
// element with eight and takes 2.0 (an AMD EPYC with AVX2; two and four rows are slower, too).
constexpr int64_t kRowsOfStatistics = 8;
// So many runs, and their sums in float are added to those in double.
constexpr int64_t kRunsOfSums = 16;
// Small planes are no runs of their own: a sample is one run, and each of its elements has a
// column. A run costs 50 ns besides its elements, a column 3 ns a task: the fewer the samples, the
// smaller the plane. BN+SiLU forward of 32 x 1152 x 2 x 2 in bfloat16 took 10.9 ns an element and
// takes 2.5, of 32 x 480 x 4 x 4 3.2 and 1.7, of 32 x 480 x 7 x 7 1.9 and 1.6, of 10 x 10 1.6 both
// ways.
constexpr int64_t kSmallPlane = 49;
constexpr int64_t kMostColumns = 1 << 15;
constexpr int64_t kRowsOfColumns = 8;       // of small planes, for each task
constexpr int64_t kPiece = 1 << 16;         // of a long plane, which several tasks may share
constexpr int64_t kTaskElements = 1 << 14;  // at least, and 64 a channel
constexpr int64_t kMostTasks = 64;

// `rows` runs of n elements from `offset` on, `stride` apart. By column, the first element of a run
// meets the value at `column`; by row, the first run does. `sample` is that of all elements, where
// samples are told apart.
struct Tile {
  int64_t offset, rows, stride, n, column, sample;
};

// An array with room for a last step that begins a cache line: a vector register that is stored
// across two lines takes twice as long (the sums of rows of 512 channels: 0.39 ns an element
// instead of 0.19).
template <class T>
class Array {
 public:
  // Leaves the values undefined, but for zeros in the room at the end.
  void allocate(int64_t size) {
    size_t space = (size + kNormStep) * sizeof(T) + kLine;
    memory_.reset(new char[space]);
    void* begin = memory_.get();
    data_ = static_cast<T*>(std::align(kLine, 1, begin, space));
    std::fill_n(data_ + size, kNormStep, T(0));
  }
  void assign(int64_t size, T value) {
    allocate(size);
    std::fill_n(data_, size, value);
  }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  static constexpr size_t kLine = 64;
  std::unique_ptr<char[]> memory_;
  T* data_ = nullptr;
};

// The elements of one task. Where channels are last or planes small, some rows; else some planes
// (of one sample and channel), or pieces of them, in the order of memory: going through all samples
// of one channel and then of the next finds them in a cache the second time, and still took 1.6x
// longer (32 x 96 x 56 x 56, float32), since each plane begins with misses of the translation
// buffer.
struct Task {
  const BatchNorm& call;
  bool by_row;
  int64_t first, last;  // rows, or pieces
  int64_t pieces;       // of a plane
  int64_t columns_a_channel;
  int64_t columns_a_row;
  int64_t columns;  // of some rows, where a tile has them
  bool whole_rows;  // a tile is some of them, which follow each other in memory

  explicit Task(const BatchNorm& n)
      : call(n), by_row(n.inner > 1 && !is_small(n)), pieces((n.inner + kPiece - 1) / kPiece) {
    columns_a_channel = by_row ? 1 : n.inner;
    columns = columns_a_row = n.channels * columns_a_channel;
    whole_rows = !by_row && columns <= kRun;
    // The longest run without a rest, or the longest; of a small tensor all.
    const int64_t longest = smaller(kRun, n.rows * columns_a_row);
    for (int64_t k = columns_a_row; whole_rows && k <= longest; k += columns_a_row)
      if (k % kNormStep == 0 || columns % kNormStep != 0) columns = k;
    first = 0;
    last = all();
  }
  static bool is_small(const BatchNorm& n) {
    const int64_t largest = smaller(kSmallPlane, 12 + 12 * n.rows);
    return n.inner <= largest && n.channels * n.inner <= kMostColumns;
  }
  void take(int64_t task) {
    const int64_t count = tasks();
    first = all() * task / count;
    last = all() * (task + 1) / count;
  }
  int64_t all() const { return by_row ? call.rows * call.channels * pieces : call.rows; }
  int64_t tasks() const {  // of all elements
    const int64_t small = kRowsOfColumns * columns_a_row;
    const int64_t least = columns_a_channel > 1 ? small : 64 * call.channels;
    const int64_t each = least > kTaskElements ? least : kTaskElements;
    int64_t count = call.rows * call.channels * call.inner / each;
    if (count > kMostTasks) count = kMostTasks;
    if (count > all()) count = all();
    return count < 1 ? 1 : count;
  }

  // totals[c] = the sum of the columns of channel c.
  template <class T>
  void total(const Array<T>& values, double* totals) const {
    const T* from = &values[0];
    std::fill_n(totals, call.channels, 0.0);
    for (int64_t k = 0; k < columns; k += columns_a_row, from += columns_a_row) {
      if (columns_a_channel == 1)
        for (int64_t c = 0; c < call.channels; ++c) totals[c] += double(from[c]);
      else
        for (int64_t c = 0; c < call.channels; ++c)
          totals[c] += total_of(from + c * columns_a_channel);
    }
  }
  // In four chains: an addition waits for the one before.
  template <class T>
  double total_of(const T* values) const {
    double chains[4] = {};
    int64_t i = 0;
    for (; i + 4 <= columns_a_channel; i += 4)
      for (int k = 0; k < 4; ++k) chains[k] += double(values[i + k]);
    for (; i < columns_a_channel; ++i) chains[0] += double(values[i]);
    return (chains[0] + chains[1]) + (chains[2] + chains[3]);
  }
  // Sets the columns of all channels to f(channel). The loop over channels with one column each is
  // the compiler's to vectorise.
  template <class T, class F>
  void fill(const Array<T>& values, const F& f) const {
    T* to = &values[0];
    if (columns_a_channel == 1)
      for (int64_t c = 0; c < call.channels; ++c) to[c] = static_cast<T>(f(c));
    else
      for (int64_t c = 0; c < call.channels; ++c)
        std::fill_n(to + c * columns_a_channel, columns_a_channel, static_cast<T>(f(c)));
    for (int64_t k = columns_a_row; k < columns; k += columns_a_row)
      std::copy_n(to, columns_a_row, to + k);
  }

  // Everything goes as memory does; of rows with more than kRun elements `rows_of_tile` at once.
  template <class F>
  void visit(int64_t rows_of_tile, bool by_sample, const F& f) const {
    if (by_row) return visit_planes(f);
    if (!by_sample) return visit_rows(first, last, 0, rows_of_tile, f);
    for (int64_t row = first; row < last;) {
      const int64_t sample = row / call.rows_a_sample;
      const int64_t end = smaller(last, (sample + 1) * call.rows_a_sample);
      visit_rows(row, end, sample, rows_of_tile, f);
      row = end;
    }
  }

  template <class F>
  void visit_rows(int64_t begin, int64_t end, int64_t sample, int64_t rows_of_tile,
                  const F& f) const {
    if (whole_rows) return visit_whole_rows(begin * columns_a_row, end * columns_a_row, sample, f);
    const int64_t width = kTile / rows_of_tile;
    for (int64_t row = begin; row < end; row += rows_of_tile) {
      const int64_t rows = smaller(rows_of_tile, end - row);
      for (int64_t column = 0; column < columns;) {
        // A last run of up to twice the width, rather than one of a few elements.
        const int64_t left = columns - column, n = left < 2 * width ? left : width;
        f(Tile{row * columns + column, rows, columns, n, column, sample});
        column += n;
      }
    }
  }

  template <class F>
  void visit_whole_rows(int64_t i, int64_t end, int64_t sample, const F& f) const {
    while (i < end) {
      const int64_t n = smaller(columns, end - i);
      f(Tile{i, 1, n, n, 0, sample});
      i += n;
    }
  }

  template <class F>
  void visit_planes(const F& f) const {
    const int64_t inner = call.inner;
    for (int64_t i = first; i < last;) {
      const int64_t plane = i / pieces, row = plane / call.channels;
      const int64_t channel = plane % call.channels, sample = row / call.rows_a_sample;
      if (inner <= kTile) {  // one or several planes of a sample (pieces is 1)
        const int64_t most = smaller(kTile / inner, call.channels - channel);
        const int64_t planes = smaller(most, last - i);
        f(Tile{plane * inner, planes, inner, inner, channel, sample});
        i += planes;
        continue;
      }
      const int64_t start = i % pieces * kPiece, end = smaller(inner, start + kPiece);
      for (int64_t k = start; k < end; k += kTile) {
        const int64_t n = smaller(kTile, end - k);
        f(Tile{plane * inner + k, 1, n, n, channel, sample});
      }
      ++i;
    }
  }
};

}  // namespace
}  // namespace cpu
}  // namespace fusedtrain
