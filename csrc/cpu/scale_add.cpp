// Scaled sums, a tile at a time.
#include "../ops/scale_add.h"

#include <algorithm>

#include "channels.h"

namespace fusedtrain {
namespace cpu {
namespace {

// Scaled sums. Numbers T are stored as S.
template <class S, class T>
struct Scaled {
  const ScaleKernels<S, T>& loops;
  void (*widen)(const S* in, T* out, int64_t n);

  template <class Run>
  void each(const Channels& shape, const void* scale, int64_t first, int64_t last,
            const Run& run) const {
    alignas(64) T scales[kTile + kNormStep] = {};
    const S* given = static_cast<const S*>(scale);
    if (shape.inner != 1 || shape.channels == 1) {
      // One coefficient a run; to convert each alone takes 20 ns.
      int64_t begin = 0, end = 0;
      const int64_t all = shape.samples * shape.channels;
      const auto visit = [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t s) {
        if (c < begin || c >= end) {
          begin = c;
          end = smaller(c + kNormStep * 2, all);
          widen(given + begin, scales, end - begin);
        }
        run(i, n, scales + (c - begin), step, s, 1);
      };
      return each_run(shape, first, last, visit, kTask);
    }
    if (shape.channels > kTile / 2) {  // pieces of rows
      const auto visit = [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t s) {
        widen(given + c, scales, n);
        run(i, n, scales, step, s, n);
      };
      return each_run(shape, first, last, visit, kTile);
    }
    // Where channels are last and few, rows make runs of up to kTile elements, whose coefficients
    // are repeated: a loop over one short row is mostly its beginning and its end.
    const Cut cut{shape.rows, shape.channels, 1};
    const int64_t tasks = cut.tasks(), together = kTile / shape.channels;
    int64_t known = -1;
    for (int64_t task = first; task < last; ++task) {
      const int64_t sample = task / tasks, part = task % tasks;
      if (sample != known)
        for (int64_t k = 0; k < together; ++k)
          widen(given + sample * shape.channels, scales + k * shape.channels, shape.channels);
      known = sample;
      const int64_t stop = smaller(shape.rows, (part + 1) * cut.rows_a_task());
      for (int64_t row = part * cut.rows_a_task(); row < stop; row += together)
        run((sample * shape.rows + row) * shape.channels,
            smaller(together, stop - row) * shape.channels, scales, 1, task * shape.channels,
            shape.channels);
    }
  }

  void forward(const ScaleForward& call, int64_t first, int64_t last) const {
    const S* residual = static_cast<const S*>(call.residual);
    each(call.shape, call.scale, first, last,
         [&](int64_t i, int64_t n, const T* scales, int64_t step, int64_t, int64_t) {
           loops.forward(static_cast<const S*>(call.x) + i, scales, step,
                         residual == nullptr ? nullptr : residual + i, static_cast<S*>(call.y) + i,
                         n);
         });
  }

  void backward(const ScaleBackward& call, int64_t first, int64_t last) const {
    alignas(64) T sums[kTile + kNormStep];
    const S* x = static_cast<const S*>(call.x);
    S* gx = static_cast<S*>(call.grad_input);
    each(call.shape, call.scale, first, last,
         [&](int64_t i, int64_t n, const T* scales, int64_t step, int64_t share, int64_t count) {
           const int64_t used = step ? n + kNormStep : 1;
           if (x != nullptr) std::fill_n(sums, used, T(0));
           loops.backward(static_cast<const S*>(call.grad) + i, x == nullptr ? nullptr : x + i,
                          scales, step, gx == nullptr ? nullptr : gx + i, sums, n);
           if (x == nullptr) return;
           for (int64_t k = 0; k < (step ? n : 1); k += count)
             for (int64_t c = 0; c < count; ++c) call.shares[share + c] += double(sums[k + c]);
         });
  }
};

template <class T>
void copy_of(const T* in, T* out, int64_t n) {
  std::copy_n(in, n, out);
}

// Numbers as they are stored.
template <class T>
Scaled<T, T> scaled(Dtype, const ScaleKernels<T, T>& loops) {
  return {loops, copy_of<T>};
}
Scaled<uint16_t, float> scaled(Dtype dtype, const ScaleKernels<uint16_t, float>& loops) {
  return {loops, format_of(dtype).load};
}

}  // namespace

void compute(const ScaleForward& call, Parallel parallel) {
  by_dtype(call.dtype, kernels().scale, [&](const auto& loops) {
    const auto sum = scaled(call.dtype, loops);
    in_parts(parallel, tasks_of(call.shape), 2,
             [&](int64_t first, int64_t last) { sum.forward(call, first, last); });
  });
}
void compute(const ScaleBackward& call, Parallel parallel) {
  by_dtype(call.dtype, kernels().scale, [&](const auto& loops) {
    const auto sum = scaled(call.dtype, loops);
    run_with_sums(call, call.grad_scale, parallel, [&](const auto& c, int64_t first, int64_t last) {
      sum.backward(c, first, last);
    });
  });
}

}  // namespace cpu
}  // namespace fusedtrain
