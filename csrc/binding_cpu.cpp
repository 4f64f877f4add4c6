// torch::stable tensors -> cpu entry points of ops.h. Schemas are defined in fusedtrain/_ops.py.
#include "binding_activations.h"

#include <vector>

namespace fusedtrain {
namespace {

// Elements a thread takes at least; torch's own pointwise kernels use the same number.
constexpr int64_t kGrain = 32768;

struct Cpu {
  explicit Cpu(const Tensor&) {}

  static bool on_device(const Tensor& t) { return t.is_cpu(); }

  static Tensor new_output(const Tensor& model) {
    Tensor output = torch::stable::empty_like(model);
    cpu::prepare_output(output.mutable_data_ptr(), output.numel() * output.element_size());
    return output;
  }

  template <class Call>
  void pointwise(const Call& call, int64_t n) const {
    if (n <= kGrain) {
      cpu::pointwise(call, 0, n);
      return;
    }
    torch::stable::parallel_for(
        0, n, kGrain, [&](int64_t begin, int64_t end) { cpu::pointwise(call, begin, end); });
  }

  template <class Call>
  void channelwise(const Call& call) const {
    const int64_t tasks = cpu::channelwise_tasks(call.rows, call.channels, call.inner);
    torch::stable::parallel_for(
        0, tasks, 2, [&](int64_t first, int64_t last) { cpu::channelwise(call, first, last); });
  }

  void channelwise(ChannelwiseBackward call, Tensor* const* gradients) const {
    std::vector<double> shares(cpu::channelwise_shares(call.rows, call.channels, call.inner), 0.0);
    call.shares = shares.data();
    channelwise(call);
    for (int k = 0; k < kMaxParameters && gradients[k] != nullptr; ++k) {
      std::vector<int64_t> sizes(gradients[k]->sizes().begin(), gradients[k]->sizes().end());
      Tensor sums = torch::stable::empty(sizes, torch::headeronly::ScalarType::Double);
      torch::stable::zero_(sums);
      cpu::add_shares(call, k, static_cast<double*>(sums.mutable_data_ptr()));
      torch::stable::copy_(*gradients[k], sums);
    }
  }
};

}  // namespace
}  // namespace fusedtrain

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) {
  using namespace fusedtrain;
  using Ops = Activations<Cpu>;
  FT_POINTWISE(FT_IMPLEMENT_POINTWISE)
  FT_CHANNELWISE(FT_IMPLEMENT_CHANNELWISE)
}
