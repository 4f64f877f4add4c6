// torch::stable tensors -> cpu entry points of ops/*.h. Schemas are defined in fusedtrain/ops.
#include "../ops/batch_norm.h"
#include "../ops/optimizers.h"
#include "checks.h"

namespace fusedtrain {
namespace {

// The threads of torch.
constexpr Parallel kThreads = {
    [](int64_t n, int64_t grain, const void* state, Parallel::Part part) {
      torch::stable::parallel_for(0, n, grain,
                                  [&](int64_t first, int64_t last) { part(state, first, last); });
    }};

struct Backend {
  static constexpr int64_t kSmall =
      2048;  // bytes of the host's memory that may take a tensor's place

  // Backward's first pass leaves the gradient of an activation's input to the second one: SiLU's of
  // 4 x 64 x 128 x 128 in float32 takes 9.3 ms, and 14.5 computed twice (an AMD EPYC with AVX2).
  static constexpr bool kStoresGradient = true;

  explicit Backend(const Tensor&) {}

  static bool on_device(const Tensor& t) { return t.is_cpu(); }
  static Tensor prepared(Tensor output) {
    cpu::prepare_output(output.mutable_data_ptr(), output.numel() * output.element_size());
    return output;
  }

  template <class... Call>
  void run(const Call&... call) const {
    compute(call..., kThreads);
  }

  void statistics(const BatchNorm& n, const BatchNormStatistics& s) const {
    cpu::statistics(n, s, kThreads);
  }
  void train(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f) const {
    cpu::statistics(n, s, kThreads);
    cpu::normalise(n, f, kThreads);
  }
  void evaluate(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f) const {
    cpu::evaluate(n, s, f, kThreads);
  }
  void normalise(const BatchNorm& n, const BatchNormForward& f) const {
    cpu::normalise(n, f, kThreads);
  }
  void restore(const BatchNorm& n, const BatchNormRestore& r) const {
    cpu::restore(n, r, kThreads);
  }
  void reduce(const BatchNorm& n, const BatchNormBackward& b) const { cpu::reduce(n, b, kThreads); }
  void grad_input(const BatchNorm& n, const BatchNormBackward& b) const {
    cpu::grad_input(n, b, kThreads);
  }
  void backward(const BatchNorm& n, const BatchNormBackward& b) const {
    cpu::backward(n, b, kThreads);
  }

  void measure(const OptimizerCall& call) const { cpu::measure(call, kThreads); }
  void try_update(const OptimizerCall& call) const { cpu::try_update(call, kThreads); }
  void step(const OptimizerCall& call, bool measures, bool tries) const {
    cpu::optimizer_step(call, measures, tries, kThreads);
  }
  void update_scale(const ScaleUpdate& update) const { cpu::update_scale(update); }
  void zero(const ZeroRange* ranges, int64_t count) const { cpu::zero(ranges, count, kThreads); }
};

}  // namespace
}  // namespace fusedtrain

#define FT_LIBRARY fusedtrain
#define FT_KEY CPU
#include "families.h"
