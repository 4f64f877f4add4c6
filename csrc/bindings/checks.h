// Properties of a tensor that the bindings need, and their checks. The only header with torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../ops/common.h"

// From torch 2.13 on; there, too, this is its meaning for a binary that torch 2.10 can load.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

// FT_REGISTER(m) { m.impl(name, function); } registers ops for the file's backend (families.h).
#define FT_REGISTER(m) STABLE_TORCH_LIBRARY_IMPL(FT_LIBRARY, FT_KEY, m)

namespace fusedtrain {

using torch::stable::Tensor;

inline Dtype dtype_of(const Tensor& t, const char* op, const char* argument) {
  switch (t.scalar_type()) {
    case torch::headeronly::ScalarType::Float:
      return Dtype::kFloat32;
    case torch::headeronly::ScalarType::Double:
      return Dtype::kFloat64;
    case torch::headeronly::ScalarType::Half:
      return Dtype::kFloat16;
    case torch::headeronly::ScalarType::BFloat16:
      return Dtype::kBFloat16;
    default:
      STD_TORCH_CHECK(false, "fusedtrain::", op, ": ", argument,
                      " must be float32, float64, float16 or bfloat16");
  }
}

// Every element once, no gaps: the data can be walked as one flat array.
inline bool is_dense(const Tensor& t) {
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const size_t dims = sizes.size();
  int64_t expected = 1;
  bool contiguous = true;
  for (size_t i = dims; i-- > 0;) {
    if (sizes[i] == 0) return true;
    if (sizes[i] == 1) continue;
    if (strides[i] != expected) {
      contiguous = false;
      break;
    }
    expected *= sizes[i];
  }
  if (contiguous) return true;
  // Some permutation of the dimensions is contiguous: find them in order of stride.
  expected = 1;
  int64_t total = 1;
  for (size_t i = 0; i < dims; ++i) total *= sizes[i];
  while (expected < total) {
    int64_t next = 0;
    for (size_t i = 0; i < dims; ++i)
      if (sizes[i] != 1 && strides[i] == expected) next = sizes[i];
    if (next == 0) return false;
    expected *= next;
  }
  return total == 0 || expected == total;
}

inline bool same_sizes(const Tensor& a, const Tensor& b) {
  const auto sa = a.sizes(), sb = b.sizes();
  if (sa.size() != sb.size()) return false;
  for (size_t i = 0; i < sa.size(); ++i)
    if (sa[i] != sb[i]) return false;
  return true;
}

// Whether element i in memory is the same element of both dense tensors of the same sizes.
inline bool same_layout(const Tensor& a, const Tensor& b) {
  const auto sizes = a.sizes(), sa = a.strides(), sb = b.strides();
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] != 1 && sa[i] != sb[i]) return false;
  return true;
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.get_device_index() == b.get_device_index() && a.is_cpu() == b.is_cpu() &&
         a.is_cuda() == b.is_cuda();
}

// A tensor of a call on the device of `model`, whose kernels a backend has.
template <class Backend>
void check_device(const char* op, const char* name, const Tensor& t, const Tensor& model) {
  STD_TORCH_CHECK(Backend::on_device(t) && same_device(t, model), "fusedtrain::", op, ": ", name,
                  " is on another device");
}

inline void check_same(const Tensor& a, const Tensor& b, const char* op, const char* name_a,
                       const char* name_b) {
  STD_TORCH_CHECK(same_sizes(a, b), "fusedtrain::", op, ": ", name_a, " and ", name_b,
                  " must have the same shape");
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), "fusedtrain::", op, ": ", name_a, " and ",
                  name_b, " must have the same dtype");
  STD_TORCH_CHECK(same_device(a, b), "fusedtrain::", op, ": ", name_a, " and ", name_b,
                  " must be on the same device");
}

// The pointers that kernels are given. The CUDA emulator of the tests hears of them, and so knows
// which memory a kernel may touch.
#ifdef FT_EMULATED
#include "emulated_buffers.h"
#else
inline const void* read_data(const Tensor& t) {
  const void* data = t.const_data_ptr();
  // Kernels take a null pointer for a tensor that the call lacks.
  STD_TORCH_CHECK(data != nullptr || t.numel() == 0,
                  "fusedtrain: the memory of a tensor was freed, as FSDP2 frees parameters between "
                  "forward and backward: fully_shard(..., reshard_after_forward=False), or "
                  "convert(memory='store')");
  return data;
}
inline void* write_data(const Tensor& t) { return t.mutable_data_ptr(); }
#endif
// Data of a tensor that is read and written.
inline void* update_data(const Tensor& t) {
  read_data(t);
  return write_data(t);
}

// New tensors, on the device of `model`. torch::stable::new_empty and empty_like look the operator
// up by name: 0.4 us.
inline Tensor new_strided(const Tensor& model, int64_t dims, const int64_t* sizes,
                          const int64_t* strides, torch::headeronly::ScalarType dtype) {
  int32_t device_type,
      kind = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(model.get(), &device_type));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes, strides, kind, device_type,
                                                         model.get_device_index(), &made));
  return Tensor(made);
}

// On the device of `model`, with its sizes.
inline Tensor empty_strided(const Tensor& model, const int64_t* strides,
                            torch::headeronly::ScalarType dtype) {
  return new_strided(model, model.dim(), model.sizes().data(), strides, dtype);
}

// Contiguous, of at most four dimensions.
inline Tensor new_contiguous(const Tensor& model, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                             torch::headeronly::ScalarType dtype) {
  int64_t strides[4], next = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = next;
    if (sizes[i] > 1) next *= sizes[i];
  }
  return new_strided(model, int64_t(sizes.size()), sizes.data(), strides, dtype);
}

// As torch.empty_like: dense, in the order of the tensor's strides, as at::infer_dense_strides
// sorts them.
inline Tensor new_like(const Tensor& t, torch::headeronly::ScalarType dtype) {
  if (is_dense(t)) return empty_strided(t, t.strides().data(), dtype);
  constexpr int kMaxDims = 8;
  const auto sizes = t.sizes(), strides = t.strides();
  const int dims = int(sizes.size());
  if (dims > kMaxDims) {
    const Tensor like = torch::stable::empty_like(t);
    return empty_strided(t, like.strides().data(), dtype);
  }
  int order[kMaxDims];  // the dimension of the smallest stride first
  for (int i = 0; i < dims; ++i) order[i] = dims - 1 - i;
  for (int i = 1; i < dims; ++i) {
    int at = i;
    for (int j = i - 1; j >= 0; --j) {
      const int a = order[j], b = order[at];
      if (strides[a] == 0 || strides[b] == 0) continue;  // says nothing
      if (strides[a] < strides[b]) break;
      if (strides[a] == strides[b] && sizes[a] <= sizes[b]) continue;
      order[j] = b;
      order[at] = a;
      at = j;
    }
  }
  int64_t result[kMaxDims], next = 1;
  for (int i = 0; i < dims; ++i) {
    result[order[i]] = next;
    if (sizes[order[i]] > 1) next *= sizes[order[i]];
  }
  return empty_strided(t, result, dtype);
}
inline Tensor new_like(const Tensor& t) { return new_like(t, t.scalar_type()); }

// Fresh memory for a kernel's output, and for a matrix, or a vector where there are no rows.
template <class Backend>
Tensor new_output(const Tensor& model) {
  return Backend::prepared(new_like(model));
}
template <class Backend>
Tensor new_matrix(const Tensor& model, int64_t rows, int64_t columns,
                  torch::headeronly::ScalarType dtype) {
  const int64_t sizes[] = {rows, columns};
  const size_t skipped = rows == 0;
  return Backend::prepared(new_contiguous(model, {sizes + skipped, 2 - skipped}, dtype));
}

// The tensor itself where its data are dense, else a dense copy (of torch's choice of strides).
inline Tensor dense(const Tensor& t) {
  if (is_dense(t)) return t;
  Tensor copy = new_like(t);
  torch::stable::copy_(copy, t);
  return copy;
}

// The tensor in order of its indices, copied only where it is in another. torch::stable::contiguous
// looks the operator up by name: 0.5 us.
inline Tensor in_order(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// `t` with the layout of `model`, copied only where it differs.
inline Tensor dense_like(const Tensor& t, const Tensor& model) {
  if (is_dense(t) && same_layout(t, model)) return t;
  Tensor copy = new_like(model);
  torch::stable::copy_(copy, t);
  return copy;
}

// A dense tensor as rows x channels x inner in memory order, channels being dimension 1.
struct ChannelView {
  int64_t rows, channels, inner;
};
inline ChannelView channel_view(const Tensor& t, bool one_channel) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t numel = 1;
  for (size_t i = 0; i < sizes.size(); ++i) numel *= sizes[i];
  if (one_channel || sizes.size() < 2 || numel == 0) return ChannelView{1, 1, numel};
  const int64_t channels = sizes[1];
  if (channels == 1) return ChannelView{1, 1, numel};
  const int64_t inner = strides[1];
  // Dense: the dimensions of smaller stride fill `inner` elements, the others are the rows.
  return ChannelView{numel / (channels * inner), channels, inner};
}

}  // namespace fusedtrain
