// Which calls the C++ route takes, and how it reaches Python for all others.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <initializer_list>
#include <string>
#include <vector>

namespace fusedtrain {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Tensors with other keys are wrapped, sparse, quantised, negated, or on another device.
inline bool has_usual_keys(const Tensor& t) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kUsual(
      {DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
       DispatchKey::ADInplaceOrView, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});
  return (t.key_set() | kUsual) == kUsual;
}

inline bool has_kernel_dtype(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
      return true;
    default:
      return false;
  }
}

// A dense tensor of a kernel's dtype, without a tangent of forward-mode AD.
inline bool is_usual(const Tensor& t) {
  return t.defined() && has_usual_keys(t) && has_kernel_dtype(t) &&
         !t._fw_grad(/*level=*/0).defined();
}

// A gradient may also be an instance of a Python subclass, which adds no key.
inline bool is_usual_gradient(const Tensor& t) {
  if (!is_usual(t)) return false;
  PyObject* object = t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object == nullptr || THPVariable_CheckExact(object);
}

// Whether a transform or a tracer follows the operators of this thread, and must see plain ones.
inline bool is_transformed() {
  // A dispatch mode (the Python keys) sees the op, whoever calls it.
  constexpr c10::DispatchKeySet kUsual =
      c10::default_included_set |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  const auto local = c10::impl::tls_local_dispatch_key_set();
  if ((local.included_ | kUsual) != kUsual) return true;
  // Within a transform whose keys are switched off for the moment.
  const auto& functorch = at::functorch::functorchTLSAccessor();
  if (functorch == nullptr) return false;  // This thread has never entered a transform.
  try {
    functorch->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    return true;
  }
  return false;
}

// Neither modes nor transforms nor tracers follow this thread.
inline bool is_usual_thread() {
  return !c10::impl::dispatch_mode_enabled() && !at::impl::torch_function_mode_enabled() &&
         !is_transformed();
}

// Whether autograd can record the call here: a tensor made in inference mode lacks the key that
// counts versions, and hooks on saved tensors are for Python's route, which knows `recompute`.
inline bool can_record(std::initializer_list<const Tensor*> tensors) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  if (local.excluded_.has_any(c10::autograd_dispatch_keyset_with_ADInplaceOrView)) return false;
  if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return false;
  for (const Tensor* t : tensors)
    if (t->defined() && t->is_inference()) return false;
  return true;
}

[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// The tensors that a Python function makes of these arguments; None is an undefined tensor.
inline variable_list call_python(PyObject* function, std::vector<THPObjectPtr>& arguments) {
  std::vector<PyObject*> borrowed;
  for (auto& argument : arguments) {
    if (!argument) throw_python_error();
    borrowed.push_back(argument.get());
  }
  THPObjectPtr result(PyObject_Vectorcall(function, borrowed.data(), borrowed.size(), nullptr));
  if (!result) throw_python_error();
  variable_list tensors;
  const auto add = [&](PyObject* object) {
    TORCH_CHECK(object == Py_None || THPVariable_Check(object),
                "fusedtrain: a gradient must be a tensor");
    tensors.push_back(object == Py_None ? Tensor() : THPVariable_Unpack(object));
  };
  if (PyTuple_Check(result.get())) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(result.get()); ++i)
      add(PyTuple_GET_ITEM(result.get(), i));
  } else {
    add(result.get());
  }
  return tensors;
}

inline THPObjectPtr python_tensor(const Tensor& t) {
  return THPObjectPtr(t.defined() ? THPVariable_Wrap(t) : Py_NewRef(Py_None));
}

}  // namespace fusedtrain
