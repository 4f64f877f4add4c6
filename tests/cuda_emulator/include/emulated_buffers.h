// Included by csrc/checks.h in the emulated build: every pointer that a binding takes out of a
// tensor becomes a buffer of the emulator, with the tensor's bounds.
#pragma once

// `writes`: the kernel may write. A buffer that is not also read is filled with NaN bits first.
extern "C" void emulator_buffer(const void* data, int64_t bytes, int writes);

inline const void* read_data(const Tensor& t) {
  emulator_buffer(t.const_data_ptr(), t.numel() * t.element_size(), 0);
  return t.const_data_ptr();
}
inline void* write_data(const Tensor& t) {
  emulator_buffer(t.const_data_ptr(), t.numel() * t.element_size(), 1);
  return t.mutable_data_ptr();
}
