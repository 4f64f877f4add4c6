// The same as optimizer_update.cu where a state of the call is in codes. A launch may have tensors
// without codes, too.
#include "optimizer_update.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

const Kernels<CodedSwept>& kernels_of(int rule, int states) {
#define FT_KERNELS(name, Rule, least, most)                 \
  {instance<CodedSwept, formulas::Rule, 1, least, most>(),  \
   instance<CodedSwept, formulas::Rule, 2, least, most>(),  \
   instance<CodedSwept, formulas::Rule, 3, least, most>()},
  static constexpr Kernels<CodedSwept> kKernels[][kMaxStates] = {FT_RULES(FT_KERNELS)};
#undef FT_KERNELS
  return kKernels[rule][states - 1];
}

}  // namespace

void launch_coded_update(const CodedSwept& sweep, int states, int64_t blocks, void* stream) {
  launch(kernels_of(sweep.rule, states).update, blocks, kSweepThreads, stream, 0, sweep);
}
void launch_coded_trial(const CodedSwept& sweep, int states, int64_t blocks, void* stream) {
  launch(kernels_of(sweep.rule, states).trial, blocks, kSweepThreads, stream, 0, sweep);
}

}  // namespace cuda
}  // namespace fusedtrain
