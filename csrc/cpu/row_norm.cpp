// Norms of rows: blocks or tiles of blocks, some to a task.
#include "../ops/row_norm.h"

#include <algorithm>
#include <vector>

#include "cut.h"
#include "formats.h"

namespace fusedtrain {
namespace cpu {
namespace {

constexpr int64_t kFlush = 64;           // blocks whose sums are added up in the type computed in
constexpr int64_t kMostTasks = 32;       // that each have a share of sums
constexpr int64_t kTileBytes = 1 << 18;  // of a tile, which stays in the second-level cache

// How a call is cut: units are blocks, or tiles where the elements of a block are not neighbours.
struct NormCut {
  int64_t width, pieces, units, units_a_task;

  explicit NormCut(const RowNorm& call) {
    const int64_t bytes = call.dtype == Dtype::kFloat64 ? 8 : call.dtype == Dtype::kFloat32 ? 4 : 2;
    width = kTileBytes / bytes / std::max<int64_t>(call.n, 1) / kNormStep * kNormStep;
    width = call.inner == 1 ? 1 : std::min(std::max<int64_t>(width, kNormStep), kNormWidth);
    pieces = (call.inner + width - 1) / width;
    units = call.rows * pieces;
    const int64_t least = kTask / std::max<int64_t>(call.n * width, 1);
    units_a_task = std::max({least, (units + kMostTasks - 1) / kMostTasks, int64_t(1)});
  }
  int64_t tasks() const { return (units + units_a_task - 1) / units_a_task; }

  // Calls f(row, place, width) for each tile of a task.
  template <class F>
  void each_tile(int64_t inner, int64_t task, const F& f) const {
    const int64_t last = smaller(units, (task + 1) * units_a_task);
    for (int64_t unit = task * units_a_task; unit < last; ++unit) {
      const int64_t place = unit % pieces * width;
      f(unit / pieces, place, smaller(width, inner - place));
    }
  }
};

// Weight or bias as numbers, with room for a step more.
template <class T>
std::vector<T> numbers_of(const RowNorm& call, const void* from, T otherwise) {
  std::vector<T> to(call.n + kNormStep, otherwise);
  if (from == nullptr) return to;
  if (call.wide_affine || call.dtype == Dtype::kFloat32 || call.dtype == Dtype::kFloat64)
    std::copy_n(static_cast<const T*>(from), call.n, to.data());
  else if constexpr (sizeof(T) == 4)
    format_of(call.dtype).load(static_cast<const uint16_t*>(from), to.data(), call.n);
  return to;
}

template <class T>
void add_up(const RowNorm& call, const std::vector<double>& shares, int64_t first, void* to) {
  if (to == nullptr) return;
  for (int64_t k = 0; k < call.n; ++k) {
    double sum = 0;
    for (size_t at = first + k; at < shares.size(); at += 2 * call.n) sum += shares[at];
    static_cast<T*>(to)[k] = T(sum);
  }
}

}  // namespace

void compute(const RowNormForward& call, Parallel parallel) {
  by_dtype(call.dtype, kernels().row_norm, [&](const auto& loops) {
    using T = typename std::decay_t<decltype(loops)>::Number;
    const auto weight = numbers_of<T>(call, call.weight, T(1));
    const auto bias = numbers_of<T>(call, call.bias, T(0));
    const NormCut cut(call);
    if (call.inner == 1) {
      const int64_t grain = std::max<int64_t>(kTask / std::max<int64_t>(call.n, 1), 1);
      return in_parts(parallel, cut.units, grain, [&](int64_t first, int64_t last) {
        loops.forward(call, weight.data(), bias.data(), first, last);
      });
    }
    in_parts(parallel, cut.tasks(), 1, [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task)
        cut.each_tile(call.inner, task, [&](int64_t row, int64_t place, int64_t width) {
          loops.forward_tile(call, weight.data(), bias.data(), row, place, width);
        });
    });
  });
}

void compute(const RowNormBackward& call, Parallel parallel) {
  by_dtype(call.dtype, kernels().row_norm, [&](const auto& loops) {
    using T = typename std::decay_t<decltype(loops)>::Number;
    const auto weight = numbers_of<T>(call, call.weight, T(1));
    const NormCut cut(call);
    const int64_t n = call.n;
    const bool sums = call.grad_weight != nullptr || call.grad_bias != nullptr;
    std::vector<double> shares(sums ? 2 * n * cut.tasks() : 0, 0.0);  // [tasks, 2, n]
    in_parts(parallel, cut.tasks(), 1, [&](int64_t first, int64_t last) {
      std::vector<T> near(sums && call.inner == 1 ? 2 * (n + kNormStep) : 0, T(0));
      T* const of_weight = near.empty() ? nullptr : near.data();
      T* const of_bias = near.empty() ? nullptr : near.data() + n + kNormStep;
      for (int64_t task = first; task < last; ++task) {
        double* share = sums ? shares.data() + 2 * n * task : nullptr;
        if (call.inner != 1) {
          cut.each_tile(call.inner, task, [&](int64_t row, int64_t place, int64_t width) {
            loops.backward_tile(call, weight.data(), share, row, place, width);
          });
          continue;
        }
        const int64_t end = smaller(cut.units, (task + 1) * cut.units_a_task);
        for (int64_t row = task * cut.units_a_task; row < end; row += kFlush) {
          loops.backward(call, weight.data(), of_weight, of_bias, row, smaller(end, row + kFlush));
          if (!sums) continue;
          for (int64_t k = 0; k < n; ++k) {
            share[k] += double(of_weight[k]);
            share[n + k] += double(of_bias[k]);
            of_weight[k] = of_bias[k] = T(0);
          }
        }
      }
    });
    if (!sums) return;
    add_up<T>(call, shares, 0, call.grad_weight);
    add_up<T>(call, shares, n, call.grad_bias);
  });
}

}  // namespace cpu
}  // namespace fusedtrain
