// Activations with a parameter for each channel: tasks, and the conversion of 16-bit data.
#include "../ops/channelwise.h"

#include <vector>

#include "cut.h"
#include "dispatch.h"

namespace fusedtrain {
namespace cpu {
namespace {

constexpr int64_t kBlock =
    1024;  // of floats: three buffers are 12 KiB, within any first-level cache

template <class T>
void run(const ChannelwiseForward& call, int64_t task, const ChannelwiseKernels<T>& k) {
  const Cut cut{call.rows, call.channels, call.inner};
  cut.visit(task, kTask, [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t) {
    k.forward[call.op](at<T>(call.x, i), at<T>(call.y, i), n, at<T>(call.parameters[0], c),
                       at<T>(call.parameters[1], c), step);
  });
}

void run_16bit(const ChannelwiseForward& call, int64_t task) {
  const Format format = format_of(call.dtype);
  const Cut cut{call.rows, call.channels, call.inner};
  alignas(64) float x[kBlock], a[kBlock], b[kBlock];
  cut.visit(task, kBlock, [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t) {
    format.load(at<uint16_t>(call.x, i), x, n);
    format.load(at<uint16_t>(call.parameters[0], c), a, step ? n : 1);
    format.load(at<uint16_t>(call.parameters[1], c), b, step ? n : 1);
    kernels().channelwise.f32.forward[call.op](x, x, n, a, b, step);
    format.store(x, at<uint16_t>(call.y, i), n);
  });
}

template <class T>
void run(const ChannelwiseBackward& call, int64_t task, const ChannelwiseKernels<T>& k) {
  const Cut cut{call.rows, call.channels, call.inner};
  const int64_t stride = cut.shares();
  cut.visit(task, kTask, [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t share) {
    k.backward[call.op](at<T>(call.grad, i), at<T>(call.x, i), at<T>(call.grad_input, i), n,
                        at<T>(call.parameters[0], c), at<T>(call.parameters[1], c), step,
                        call.shares + share, stride);
  });
}

void run_16bit(const ChannelwiseBackward& call, int64_t task) {
  const Format format = format_of(call.dtype);
  const Cut cut{call.rows, call.channels, call.inner};
  const int64_t stride = cut.shares();
  alignas(64) float g[kBlock], x[kBlock], a[kBlock], b[kBlock];
  cut.visit(task, kBlock, [&](int64_t i, int64_t n, int64_t c, int64_t step, int64_t share) {
    format.load(at<uint16_t>(call.grad, i), g, n);
    format.load(at<uint16_t>(call.x, i), x, n);
    format.load(at<uint16_t>(call.parameters[0], c), a, step ? n : 1);
    format.load(at<uint16_t>(call.parameters[1], c), b, step ? n : 1);
    kernels().channelwise.f32.backward[call.op](g, x, g, n, a, b, step, call.shares + share,
                                                stride);
    format.store(g, at<uint16_t>(call.grad_input, i), n);
  });
}

template <class Call>
void run_tasks(const Call& call, Parallel parallel) {
  const Cut cut{call.rows, call.channels, call.inner};
  in_parts(parallel, cut.tasks(), 2, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      if (call.dtype == Dtype::kFloat32)
        run(call, task, kernels().channelwise.f32);
      else if (call.dtype == Dtype::kFloat64)
        run(call, task, kernels().channelwise.f64);
      else
        run_16bit(call, task);
    }
  });
}

// The gradient of parameter `which`, in the order of the shares: the same bits for any number of
// threads.
void add_shares(const ChannelwiseBackward& call, int which) {
  const Cut cut{call.rows, call.channels, call.inner};
  const double* shares = call.shares + which * cut.shares();
  std::vector<double> sums(call.channels, 0.0);
  for (int64_t i = 0; i < cut.shares(); ++i) sums[cut.channel_of_share(i)] += shares[i];
  void* const to = call.grad_parameters[which];
  for (int64_t c = 0; c < call.channels; ++c) {
    const float value = static_cast<float>(sums[c]);
    if (call.dtype == Dtype::kFloat64)
      *at<double>(to, c) = sums[c];
    else if (call.dtype == Dtype::kFloat32)
      *at<float>(to, c) = value;
    else
      format_of(call.dtype).store(&value, at<uint16_t>(to, c), 1);
  }
}

}  // namespace

void compute(const ChannelwiseForward& call, Parallel parallel) { run_tasks(call, parallel); }

void compute(const ChannelwiseBackward& call, Parallel parallel) {
  const Cut cut{call.rows, call.channels, call.inner};
  // At most about the bytes of the input, mostly far fewer.
  std::vector<double> shares(call.parameter_count * cut.shares(), 0.0);
  ChannelwiseBackward summed = call;
  summed.shares = shares.data();
  run_tasks(summed, parallel);
  for (int k = 0; k < call.parameter_count; ++k) add_shares(summed, k);
}

}  // namespace cpu
}  // namespace fusedtrain
