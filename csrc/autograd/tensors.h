// Tensors made without the dispatcher, which takes 0.3 to 0.5 us each. A dispatch mode must see
// them made: where one is active, torch's operators make them.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/DistributionsHelper.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <mutex>
#include <utility>

#include "calls.h"

namespace fusedtrain {

// As torch.empty_like.
inline Tensor new_like(const Tensor& t) {
  if (t.is_cpu() && t.is_non_overlapping_and_dense() && !c10::impl::dispatch_mode_enabled())
    return Tensor(at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type()));
  return at::empty_like(t);
}

// The halves along a dimension of even size: views, below autograd.
inline std::pair<Tensor, Tensor> halves(const Tensor& t, int64_t dim) {
  if (c10::impl::dispatch_mode_enabled()) {
    const auto both = t.chunk(2, dim);
    return {both[0], both[1]};
  }
  at::DimVector sizes(t.sizes());
  const int64_t each = sizes[static_cast<size_t>(dim)] /= 2, start = t.storage_offset();
  return {at::native::as_strided_tensorimpl(t, sizes, t.strides(), start),
          at::native::as_strided_tensorimpl(t, sizes, t.strides(), start + each * t.stride(dim))};
}

// Two random numbers of the device's generator, as torch.empty(2, dtype=torch.int64).random_().
inline Tensor new_seed(const Tensor& input) {
  if (!input.is_cpu()) return at::empty({2}, input.options().dtype(at::kLong)).random_();
  Tensor seed(at::detail::empty_cpu({2}, at::kLong));
  auto* generator = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
  std::lock_guard<std::mutex> lock(generator->mutex_);
  at::uniform_int_distribution<int64_t> draw;
  auto* numbers = seed.mutable_data_ptr<int64_t>();
  for (int i = 0; i < 2; ++i) numbers[i] = draw(generator);
  return seed;
}

}  // namespace fusedtrain
