// Included by csrc/bindings/checks.h in the emulated build: every pointer that a binding takes out
// of a tensor becomes a buffer of the emulator, with the tensor's bounds.
#pragma once

// `writes`: the kernel may write. A buffer that is not also read is filled with NaN bits first.
extern "C" void emulator_buffer(const void* data, int64_t bytes, int writes);

// From the first element to the last: half of a tensor has gaps.
inline int64_t extent(const Tensor& t) {
  int64_t elements = 1;
  for (int64_t d = 0; d < int64_t(t.dim()); ++d) elements += (t.size(d) - 1) * t.stride(d);
  return t.numel() == 0 ? 0 : elements * t.element_size();
}
inline const void* read_data(const Tensor& t) {
  emulator_buffer(t.const_data_ptr(), extent(t), 0);
  return t.const_data_ptr();
}
inline void* write_data(const Tensor& t) {
  emulator_buffer(t.const_data_ptr(), extent(t), 1);
  return t.mutable_data_ptr();
}
