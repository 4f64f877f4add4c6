// Tensors with channels as kernels walk them, for scaled sums and for bias + activation + dropout.
#pragma once

#include "../ops/channels.h"
#include "checks.h"

#include <algorithm>
#include <optional>

namespace fusedtrain {
namespace {

using torch::headeronly::ScalarType;

// Where the channels of a dense tensor are: dimension `dim` (-1: none), for so many samples.
inline bool find_channels(const Tensor& t, int64_t dim, int64_t samples, Channels& shape) {
  const auto sizes = t.sizes(), strides = t.strides();
  const int64_t numel = t.numel();
  const int64_t channels = dim < 0 ? 1 : sizes[dim];
  shape = {samples, 1, channels, numel / std::max<int64_t>(samples * channels, 1)};
  if (numel == 0) return true;
  if (channels > 1) {
    shape.inner = strides[dim];
    shape.rows = numel / (samples * channels * shape.inner);
  }
  return samples == 1 || sizes[0] == 1 || strides[0] * sizes[0] == numel;
}

// The input in a layout whose channels can be walked, and that layout.
inline Tensor with_channels(const char* op, const Tensor& input, int64_t dim, int64_t samples,
                            Channels& shape) {
  STD_TORCH_CHECK(dim >= -1 && dim < std::max<int64_t>(input.dim(), 0), "fusedtrain::", op,
                  ": dim is not a dimension of input");
  STD_TORCH_CHECK(samples == 1 || (dim != 0 && input.dim() > 0 && samples == input.sizes()[0]),
                  "fusedtrain::", op, ": there must be one sample, or as many as in dimension 0");
  Tensor x = dense(input);
  if (!find_channels(x, dim, samples, shape)) {
    x = torch::stable::contiguous(input);
    find_channels(x, dim, samples, shape);
  }
  return x;
}

// `result`, made in the layout of `walked`, with the strides that the op promises. `walked` is the
// input or a copy.
inline Tensor as_promised(const Tensor& result, const Tensor& walked, const Tensor& input) {
  if (walked.get() == input.get()) return result;
  Tensor promised = new_like(input);
  if (same_layout(result, promised)) return result;
  torch::stable::copy_(promised, result);
  return promised;
}

// Data of an optional tensor like `input`, in the layout of `walked`; `kept` holds them.
template <class Backend>
const void* read_like(const char* op, const char* name, const std::optional<Tensor>& t,
                      const Tensor& input, const Tensor& walked, Tensor& kept) {
  if (!t.has_value()) return nullptr;
  check_device<Backend>(op, name, *t, input);
  check_same(*t, input, op, name, "input");
  kept = dense_like(*t, walked);
  return read_data(kept);
}

// Compute dtype of a tensor.
inline ScalarType wide_type(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A sum for each sample and channel; without elements where not needed.
template <class Backend>
Tensor sums_for(const Tensor& model, const Channels& shape, bool needed) {
  if (!needed) return new_matrix<Backend>(model, 0, 0, wide_type(model));
  if (shape.samples == 0) return new_contiguous(model, {0, shape.channels}, wide_type(model));
  return new_matrix<Backend>(model, shape.samples, shape.channels, wide_type(model));
}

}  // namespace
}  // namespace fusedtrain
