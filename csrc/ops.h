// Entry points of a backend: what to compute, pointers, sizes. Plain C++, no torch.
//
// The data of one call are dense: element i of every pointer belongs to element i of the others.
// Input and output may be the same buffer. Zero elements are allowed.
#pragma once

#include <stdint.h>

namespace fusedtrain {

enum class Dtype : int { kFloat32, kFloat64, kFloat16, kBFloat16 };
constexpr int kMaxParameters = 2;

// y[i] = f(x[i]). op counts the lines of FT_POINTWISE.
struct PointwiseForward {
  int op;
  Dtype dtype;
  const void* x;
  void* y;
  double parameters[kMaxParameters];
};

// grad_input[i] = grad[i] f'(saved[i]).
struct PointwiseBackward {
  int op;
  Dtype dtype;
  const void* grad;
  const void* saved;
  void* grad_input;
  double parameters[kMaxParameters];
};

// A tensor as rows x channels x inner, in memory order. parameters[k] points at one value a
// channel, of the tensor's dtype.
struct ChannelwiseForward {
  int op;  // counts the lines of FT_CHANNELWISE
  Dtype dtype;
  int64_t rows, channels, inner;
  const void* x;
  void* y;
  const void* parameters[kMaxParameters];
};

// Also sums the gradients of the parameters, in shares that add_shares() adds up.
struct ChannelwiseBackward {
  int op;
  Dtype dtype;
  int64_t rows, channels, inner;
  const void* grad;
  const void* x;
  void* grad_input;
  const void* parameters[kMaxParameters];
  int parameter_count;
  double* shares;  // of the gradients of the parameters; channelwise_shares() tells how many
};

namespace cpu {

// Elements [begin, end) on the calling thread.
void pointwise(const PointwiseForward& call, int64_t begin, int64_t end);
void pointwise(const PointwiseBackward& call, int64_t begin, int64_t end);

// The work is cut into tasks that do not depend on the number of threads, so the sums do not
// either.
int64_t channelwise_tasks(int64_t rows, int64_t channels, int64_t inner);
void channelwise(const ChannelwiseForward& call, int64_t first_task, int64_t last_task);
void channelwise(const ChannelwiseBackward& call, int64_t first_task, int64_t last_task);
// Doubles that the shares of all tasks take, zeros at first: at most about the bytes of the input,
// mostly far fewer.
int64_t channelwise_shares(int64_t rows, int64_t channels, int64_t inner);
// The gradient of parameter `which`, one value a channel.
void add_shares(const ChannelwiseBackward& call, int which, double* gradient);

// Tells the system that a fresh output is about to be written whole, so that it may map it in huge
// pages (docs/decisions/0002-huge-pages.md). FUSEDTRAIN_HUGE_PAGES=0 turns this off.
void prepare_output(void* data, int64_t bytes);

// "default", "avx2" or "avx512": what this process uses.
const char* capability();

}  // namespace cpu

// On the current device, in order on a cudaStream_t. A launch that fails throws std::runtime_error.
namespace cuda {

// The device that kernels are launched on from here, in this thread.
void set_device(int device);

void pointwise(const PointwiseForward& call, int64_t n, void* stream);
void pointwise(const PointwiseBackward& call, int64_t n, void* stream);

void channelwise(const ChannelwiseForward& call, void* stream);
void channelwise(const ChannelwiseBackward& call, void* stream);
// Doubles that the shares take; none of them need be set.
int64_t channelwise_shares(const ChannelwiseBackward& call);
// The gradient of parameter `which`, one value of the call's dtype a channel.
void add_shares(const ChannelwiseBackward& call, int which, void* gradient, void* stream);

}  // namespace cuda
}  // namespace fusedtrain
