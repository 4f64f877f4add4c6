// Test for calls that the C++ route takes, and its way to Python for all others.
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
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fusedtrain {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

inline MaybeTensor maybe(const Tensor& t) { return t.defined() ? MaybeTensor(t) : std::nullopt; }

// An op by its name: `const Op<Tensor(const Tensor&)> op = "fusedtrain::silu"`.
template <class Signature>
class Op;
template <class Result, class... Arguments>
class Op<Result(Arguments...)> {
 public:
  Op(const char* name)
      : handle_(c10::Dispatcher::singleton()
                    .findSchemaOrThrow(name, "")
                    .typed<Result(Arguments...)>()) {}
  Result call(Arguments... arguments) const {
    return handle_.call(std::forward<Arguments>(arguments)...);
  }

 private:
  c10::TypedOperatorHandle<Result(Arguments...)> handle_;
};

// Guard of a forward: below autograd, and without the GIL where that gives others time to run. To
// release it and take it again is 0.15 us of the 1.2 us of a small activation.
class BelowAutograd {
 public:
  explicit BelowAutograd(const Tensor& input) {
    if (!input.is_cpu() || input.numel() > kBrief) no_gil_.emplace();
  }

 private:
  static constexpr int64_t kBrief = 4096;  // elements: some microseconds
  std::optional<pybind11::gil_scoped_release> no_gil_;
  at::AutoDispatchBelowADInplaceOrView below_;
};

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

// A dense tensor without a tangent of forward-mode AD.
inline bool is_plain(const Tensor& t) {
  return t.defined() && has_usual_keys(t) && !t._fw_grad(/*level=*/0).defined();
}

// One of a kernel's dtype.
inline bool is_usual(const Tensor& t) { return is_plain(t) && has_kernel_dtype(t); }

// Tensors of one dtype and device; those that are not there count for nothing.
inline bool are_usual(const Tensor& model, std::initializer_list<const Tensor*> others) {
  if (!is_usual(model)) return false;
  for (const Tensor* t : others)
    if (t->defined() &&
        !(is_usual(*t) && t->scalar_type() == model.scalar_type() && t->device() == model.device()))
      return false;
  return true;
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

// Reads an argument; false where Python must look at it.
inline bool read(PyObject* object, Tensor& t) {
  if (object == Py_None) return true;
  if (!THPVariable_CheckExact(object)) return false;
  t = THPVariable_Unpack(object);
  return true;
}
inline bool read(PyObject* object, double& number) {
  if (!PyFloat_CheckExact(object)) return false;
  number = PyFloat_AS_DOUBLE(object);
  return true;
}
inline bool read(PyObject* object, bool& flag) {
  flag = object == Py_True;
  return flag || object == Py_False;
}
inline bool read(PyObject* object, int64_t& number) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}
inline bool read(PyObject* object, std::vector<int64_t>& numbers) {
  if (!PyTuple_CheckExact(object)) return false;
  numbers.resize(static_cast<size_t>(PyTuple_GET_SIZE(object)));
  for (size_t i = 0; i < numbers.size(); ++i)
    if (!read(PyTuple_GET_ITEM(object, static_cast<Py_ssize_t>(i)), numbers[i])) return false;
  return true;
}

// Reads all arguments of a function, which are by position; false where Python must look at the
// call.
template <class... Values>
bool read_call(const char* name, PyObject* const* args, Py_ssize_t count, Values&... values) {
  TORCH_CHECK(count == sizeof...(values), name, ": ", sizeof...(values), " arguments");
  return (read(*args++, values) && ...) && is_usual_thread();
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

inline THPObjectPtr to_python(const Tensor& t) {
  return THPObjectPtr(t.defined() ? THPVariable_Wrap(t) : Py_NewRef(Py_None));
}
inline THPObjectPtr to_python(double number) { return THPObjectPtr(PyFloat_FromDouble(number)); }
inline THPObjectPtr to_python(int64_t number) { return THPObjectPtr(PyLong_FromLongLong(number)); }
inline THPObjectPtr to_python(bool flag) { return THPObjectPtr(PyBool_FromLong(flag)); }
inline THPObjectPtr to_python(at::IntArrayRef numbers) {
  THPObjectPtr tuple(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; tuple && i < numbers.size(); ++i)
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(numbers[i]));
  return tuple;
}

// Calls f with a value, or with each field of a struct that has fields() and each tensor of an
// array.
template <class T, class F>
void for_each_field(const T& value, const F& f) {
  const auto each = [&](const auto&... fields) { (for_each_field(fields, f), ...); };
  if constexpr (requires { value.fields(); })
    std::apply(each, value.fields());
  else if constexpr (requires { std::tuple_size<T>::value; })
    std::apply(each, value);
  else
    f(value);
}

// The same, of values of C++ and without the GIL.
template <class... Values>
variable_list call_formula(PyObject* function, const Values&... values) {
  pybind11::gil_scoped_acquire gil;
  std::vector<THPObjectPtr> arguments;
  const auto add = [&](const auto& field) { arguments.push_back(to_python(field)); };
  (for_each_field(values, add), ...);
  return call_python(function, arguments);
}

// The output in Python; NotImplemented for a call that Python must record.
inline PyObject* wrapped(const Tensor& output) {
  return output.defined() ? THPVariable_Wrap(output) : Py_NewRef(Py_NotImplemented);
}

}  // namespace fusedtrain
