// Activations whose derivative is kept in few bits: ranges of whole blocks of codes.
#include "../bits.h"
#include "../few_bit.h"
#include "../ops/few_bit.h"
#include "dispatch.h"

namespace fusedtrain {
namespace cpu {
namespace {

template <class S, class T>
void run(const FewBitForward& call, int64_t i, int64_t n, const FewBitKernels<S, T>& k) {
  k.forward[call.op](at<S>(call.x, i), at<S>(call.y, i), call.codes + packed_bytes(i, call.bits), n,
                     call.bits, Slopes<T>(*slope_table(call.op), call.bits));
}

template <class S, class T>
void run(const FewBitBackward& call, int64_t i, int64_t n, const FewBitKernels<S, T>& k) {
  k.backward(at<S>(call.grad, i), call.codes + packed_bytes(i, call.bits),
             at<S>(call.grad_input, i), n, call.bits, Slopes<T>(*slope_table(call.op), call.bits));
}

template <class Call>
void run_all(const Call& call, int64_t n, Parallel parallel) {
  by_dtype(call.dtype, kernels().few_bit, [&](const auto& k) {
    in_parts(parallel, bit_blocks(n), kGrain / kBitBlock, [&](int64_t first, int64_t last) {
      const int64_t begin = first * kBitBlock;
      run(call, begin, smaller(last * kBitBlock, n) - begin, k);
    });
  });
}

}  // namespace

void compute(const FewBitForward& call, int64_t n, Parallel parallel) {
  run_all(call, n, parallel);
}
void compute(const FewBitBackward& call, int64_t n, Parallel parallel) {
  run_all(call, n, parallel);
}

}  // namespace cpu
}  // namespace fusedtrain
