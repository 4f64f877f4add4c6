// Activations of one formula: ranges of elements by the kernel of their dtype.
#include "../ops/pointwise.h"
#include "dispatch.h"

namespace fusedtrain {
namespace cpu {
namespace {

template <class S, class T>
void run(const PointwiseForward& call, int64_t i, int64_t n, const double* parameters,
         const PointwiseKernels<S, T>& k) {
  k.forward[call.op](at<S>(call.x, i), at<S>(call.y, i), n, parameters);
}

template <class S, class T>
void run(const PointwiseBackward& call, int64_t i, int64_t n, const double* parameters,
         const PointwiseKernels<S, T>& k) {
  k.backward[call.op](at<S>(call.grad, i), at<S>(call.saved, i), at<S>(call.grad_input, i), n,
                      parameters);
}

template <class Call>
void run_all(const Call& call, int64_t n, Parallel parallel) {
  double parameters[kMaxParameters];
  round_parameters(call.op, call.dtype, call.parameters, parameters);
  by_dtype(call.dtype, kernels().pointwise, [&](const auto& k) {
    in_parts(parallel, n, kGrain,
             [&](int64_t first, int64_t last) { run(call, first, last - first, parameters, k); });
  });
}

}  // namespace

void compute(const PointwiseForward& call, int64_t n, Parallel parallel) {
  run_all(call, n, parallel);
}
void compute(const PointwiseBackward& call, int64_t n, Parallel parallel) {
  run_all(call, n, parallel);
}

}  // namespace cpu
}  // namespace fusedtrain
