// torch::stable tensors -> cuda entry points of ops/*.h, on the tensors' device and its current
// stream. The tests compile this file with -DFT_EMULATED, for CPU tensors and the CUDA emulator.
#include "../ops/batch_norm.h"
#include "../ops/bias_act.h"
#include "../ops/channelwise.h"
#include "../ops/depthwise.h"
#include "../ops/optimizers.h"
#include "../ops/row_norm.h"
#include "../ops/scale_add.h"
#include "checks.h"

#ifndef FT_EMULATED
#include <torch/csrc/stable/accelerator.h>

// Weak: in libtorch_cuda, which a torch without CUDA does not have.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream)
    __attribute__((weak));
#endif

namespace fusedtrain {
namespace {

#ifdef FT_EMULATED
struct Place {
  explicit Place(const Tensor& t) {
    STD_TORCH_CHECK(t.is_cpu(), "emulator: cudaSetDevice: no such device");  // as CUDA would say
  }
  static bool on_device(const Tensor& t) { return t.is_cpu(); }
  void* stream = nullptr;
};
#else
// Makes a tensor's device the current one, for torch (which restores it) and for our own copy of
// the CUDA runtime.
struct Place {
  explicit Place(const Tensor& t) : guard(t.get_device_index()) {
    const int32_t device = t.get_device_index();
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                    "fusedtrain: this torch has no CUDA streams");
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    cuda::set_device(device);
  }
  static bool on_device(const Tensor& t) { return t.is_cuda(); }
  torch::stable::accelerator::DeviceGuard guard;
  void* stream = nullptr;
};
#endif

struct Backend {
  static constexpr int64_t kSmall = 1;  // kernels cannot read the host's memory

  static constexpr bool kStoresGradient = false;  // memory is what takes time

  explicit Backend(const Tensor& t) : model(t), place(t) {}

  static bool on_device(const Tensor& t) { return Place::on_device(t); }
  static Tensor prepared(Tensor output) { return output; }

  template <class... Call>
  void run(const Call&... call) const {
    compute(call..., place.stream);
  }
  void run(ChannelwiseBackward call) const { sum(call, cuda::channelwise_shares(call)); }
  void run(ScaleBackward call) const { sum(call, call.x ? cuda::chain_shares(call.shape) : 0); }
  void run(DepthwiseBackward call) const { sum(call, cuda::depthwise_shares(call)); }
  void run(RowNormBackward call) const { sum(call, cuda::row_norm_shares(call)); }
  // The kernel always sums; without a bias it sums into the workspace.
  void run(BiasActBackward call) const {
    const int64_t sums = call.grad_bias ? 0 : call.shape.samples * call.shape.channels;
    const Tensor workspace = new_workspace(cuda::chain_shares(call.shape) + sums);
    call.shares = doubles_of(workspace) + sums;
    if (call.grad_bias == nullptr) call.grad_bias = doubles_of(workspace);
    compute(call, place.stream);
  }

  void statistics(const BatchNorm& n, const BatchNormStatistics& s) const {
    const Tensor workspace = new_workspace(cuda::batch_norm_workspace(n));
    cuda::statistics(n, s, doubles_of(workspace), place.stream);
  }
  void train(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f) const {
    if (cuda::train_whole(n, s, f, place.stream)) return;
    statistics(n, s);
    normalise(n, f);
  }
  void evaluate(const BatchNorm& n, const BatchNormStatistics& s, const BatchNormForward& f) const {
    cuda::evaluate(n, s, f, place.stream);
  }
  void normalise(const BatchNorm& n, const BatchNormForward& f) const {
    cuda::normalise(n, f, place.stream);
  }
  void restore(const BatchNorm& n, const BatchNormRestore& r) const {
    cuda::restore(n, r, place.stream);
  }
  void reduce(const BatchNorm& n, const BatchNormBackward& b) const {
    const Tensor workspace = new_workspace(cuda::batch_norm_workspace(n));
    cuda::reduce(n, b, doubles_of(workspace), place.stream);
  }
  void grad_input(const BatchNorm& n, const BatchNormBackward& b) const {
    cuda::grad_input(n, b, place.stream);
  }
  void backward(const BatchNorm& n, BatchNormBackward b) const {
    if (b.averages != nullptr && cuda::backward_whole(n, b, place.stream)) return;
    reduce(n, b);
    if (b.averages == nullptr) return;  // grad_input is there as well
    b.ready = b.grad_residual;
    b.grad_residual = nullptr;
    grad_input(n, b);
  }

  void measure(const OptimizerCall& call) const {
    const Tensor workspace = new_workspace(cuda::optimizer_workspace(call));
    cuda::measure(call, doubles_of(workspace), place.stream);
  }
  void try_update(const OptimizerCall& call) const {
    const Tensor workspace = new_workspace(cuda::optimizer_workspace(call));
    cuda::try_update(call, doubles_of(workspace), place.stream);
  }
  void step(const OptimizerCall& call, bool measures, bool tries) const {
    const Tensor workspace = new_workspace(cuda::optimizer_workspace(call));
    cuda::optimizer_step(call, measures, tries, doubles_of(workspace), place.stream);
  }

  void update_scale(const ScaleUpdate& update) const { cuda::update_scale(update, place.stream); }
  void zero(const ZeroRange* ranges, int64_t count) const {
    cuda::zero(ranges, count, place.stream);
  }

  const Tensor& model;
  Place place;

 private:
  Tensor new_workspace(int64_t doubles) const {
    return new_contiguous(model, {doubles}, torch::headeronly::ScalarType::Double);
  }
  template <class Call>
  void sum(Call& call, int64_t shares) const {
    const Tensor workspace = new_workspace(shares);
    call.shares = doubles_of(workspace);
    compute(call, place.stream);
  }
  static double* doubles_of(const Tensor& t) { return static_cast<double*>(write_data(t)); }
};

}  // namespace
}  // namespace fusedtrain

#ifdef FT_EMULATED
#define FT_LIBRARY fusedtrain_emulated
#define FT_KEY CPU
#else
#define FT_LIBRARY fusedtrain
#define FT_KEY CUDA
#endif
#include "families.h"
