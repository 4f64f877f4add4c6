// What the nodes of all ops share: how they are made, what they save, and what Python and compiled
// autograd see of them.
#pragma once

#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <typeindex>
#include <type_traits>
#include <utility>

#include "calls.h"

namespace fusedtrain {

// c10::intrusive_ptr<Node> since torch 2.13, std::shared_ptr<Node> before.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class T>
auto make_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

// A node of one output. `apply` runs without the GIL.
struct FusedNode : torch::autograd::Node {
  const char* label = "";

  std::string name() const override { return label; }
  virtual variable_list saved_tensors() = 0;
};

// A node that saves N tensors, some of which may be undefined.
template <size_t N>
struct SavingNode : FusedNode {
  using Tensors = std::array<Tensor, N>;

  // The gradients of the edges, of the gradient of the output.
  virtual variable_list gradients(const Tensor& grad, const Tensors& saved) = 0;
  // What besides tensors decides about the backward, for compiled autograd.
  virtual void collect(torch::autograd::CompiledNodeArgs& args) const = 0;

  // Keeps a tensor for backward; `is_output`: the output of this node itself.
  void save(size_t i, const Tensor& t, bool is_output = false) {
    if (!t.defined()) return;
    saved_[i] = SavedVariable(t, is_output);
    if (is_output) outputs_ |= 1u << i;
  }

  // The lock ends before anything runs that may wait for the GIL.
  Tensors unpacked() {
    std::lock_guard<std::mutex> lock(mutex_);
    Tensors tensors;
    for (size_t i = 0; i < N; ++i)
      tensors[i] = saved_[i].unpack((outputs_ >> i & 1) != 0 ? getptr() : nullptr);
    return tensors;
  }

  variable_list saved_tensors() override {
    const Tensors tensors = unpacked();
    return variable_list(tensors.begin(), tensors.end());
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& saved : saved_) saved.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const Tensors saved = unpacked();
    return gradients(grads[0].defined() ? grads[0] : input_metadata(0).zeros_like(), saved);
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    args.collect(std::string(label));
    for (size_t i = 0; i < N; ++i) args.collect(saved_[i], (outputs_ >> i & 1) != 0);
    for (size_t i = 0; i < num_outputs(); ++i) args.collect(task_should_compute_output(i));
    collect(args);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::autograd::SwapSavedVariables& swap) override {
    for (SavedVariable& saved : saved_) swap.before(saved);
    variable_list result = apply(variable_list(grads));
    for (SavedVariable& saved : saved_) swap.after(saved);
    return result;
  }

 protected:
  std::array<SavedVariable, N> saved_;
  uint32_t outputs_ = 0;
};

// What Python sees of a node: the methods and attributes of torch's own nodes, and `saved_tensors`.

inline PyObject* saved_tensors_of(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  auto* node = reinterpret_cast<torch::autograd::THPCppFunction*>(self)->cdata.get();
  const variable_list tensors = static_cast<FusedNode*>(node)->saved_tensors();
  THPObjectPtr result(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  if (!result) throw_python_error();
  for (size_t i = 0; i < tensors.size(); ++i)
    PyTuple_SET_ITEM(result.get(), static_cast<Py_ssize_t>(i), python_tensor(tensors[i]).release());
  return result.release();
  END_HANDLE_TH_ERRORS
}

// A class of Python with this name, for the nodes of a C++ class. Classes last as long as the
// process, and so do their names.
template <class Node>
void register_class(const char* name) {
  using namespace torch::autograd;
  // Those of THP_FUNCTION_DEFAULT_METHODS that the header declares.
  static PyMethodDef methods[] = {
      {"_register_hook_dict", THPCppFunction_register_hook_dict, METH_O, nullptr},
      {"register_hook", THPCppFunction_register_hook, METH_O, nullptr},
      {"register_prehook", THPCppFunction_register_prehook, METH_O, nullptr},
      {"name", THPCppFunction_name, METH_NOARGS, nullptr},
      {"_sequence_nr", THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
      {nullptr}};
  static PyGetSetDef properties[] = {
      THP_FUNCTION_DEFAULT_PROPERTIES,
      {const_cast<char*>("saved_tensors"), saved_tensors_of, nullptr, nullptr, nullptr},
      {nullptr}};
  auto* type = new PyTypeObject{};
  _initFunctionPyTypeObject(*type, name, properties, methods);
  registerCppFunction(typeid(Node), type);
}

}  // namespace fusedtrain
