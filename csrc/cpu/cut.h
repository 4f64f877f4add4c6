// How a tensor with channels is cut into tasks that threads may share.
#pragma once

#include <stdint.h>

#include "dispatch.h"

namespace fusedtrain {
namespace cpu {
namespace {

constexpr int64_t kTask = 16384;  // elements of one task

// Cuts rows x channels x inner into tasks and visits a task's runs: n consecutive elements whose
// channels are either all `channel` (step 0) or count up from it (step 1). 16-bit runs are cut to
// fit the buffers. `share` is where the run's sums go: with step 0 a slot of its own piece, with
// step 1 the task's slot of that channel.
struct Cut {
  int64_t rows, channels, inner;

  bool by_channel() const { return inner == 1 && channels > 1; }
  bool empty() const { return rows == 0 || channels == 0 || inner == 0; }
  // Few tasks of channels, since each has a slot for every channel.
  int64_t rows_a_task() const {
    const int64_t least = channels >= kTask ? 1 : kTask / channels;
    const int64_t spread = (rows + 31) / 32;
    return least > spread ? least : spread;
  }
  // Else: pieces of one (row, channel), several to a task where they are short.
  int64_t pieces() const { return (inner + kTask - 1) / kTask; }
  int64_t pieces_a_task() const { return inner >= kTask ? 1 : kTask / inner; }
  int64_t all_pieces() const { return rows * channels * pieces(); }

  int64_t tasks() const {
    if (empty()) return 0;
    if (by_channel()) return (rows + rows_a_task() - 1) / rows_a_task();
    return (all_pieces() + pieces_a_task() - 1) / pieces_a_task();
  }
  int64_t shares() const {  // of one parameter
    if (empty()) return 0;
    return by_channel() ? tasks() * channels : all_pieces();
  }
  int64_t channel_of_share(int64_t share) const {
    return by_channel() ? share % channels : share / pieces() % channels;
  }

  template <class Visit>
  void visit(int64_t task, int64_t longest, const Visit& visit) const {
    if (by_channel()) {
      const int64_t last = smaller(rows, (task + 1) * rows_a_task());
      for (int64_t row = task * rows_a_task(); row < last; ++row)
        for (int64_t c = 0; c < channels; c += longest)
          visit(row * channels + c, smaller(longest, channels - c), c, 1, task * channels + c);
      return;
    }
    const int64_t last = smaller(all_pieces(), (task + 1) * pieces_a_task());
    for (int64_t piece = task * pieces_a_task(); piece < last; ++piece) {
      const int64_t row_channel = piece / pieces(), start = piece % pieces() * kTask;
      const int64_t stop = smaller(inner, start + kTask);
      for (int64_t i = start; i < stop; i += longest)
        visit(row_channel * inner + i, smaller(longest, stop - i), row_channel % channels, 0,
              piece);
    }
  }
};

}  // namespace
}  // namespace cpu
}  // namespace fusedtrain
