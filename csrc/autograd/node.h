// Base of the nodes of all ops: how they are made, what they save, and what Python and compiled
// autograd see of them.
#pragma once

#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
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
  virtual variable_list saved_tensors() = 0;
};

// Backward of a rule in torch operators, given once by Python.
template <class Rule>
PyObject*& formula_of() {
  static PyObject* formula = nullptr;
  return formula;
}

// A node whose gradients are those of a Rule. A Rule can be copied, and has
//   kSaved, kEdges    how many tensors it saves (some may be undefined) and edges
//   kLabel            name of the node: of the forward in profiles, and "Backward"; or label()
//   fields() const    what besides tensors decides about the gradients, as a tuple
//   variable_list gradients(const Tensor& grad, const SavedTensors<Rule>&, const Needs<Rule>&)
//   const             of each edge, by the op; what an edge that needs none gets is ignored
// and may have
//   by_formula(...) const    the same in torch operators, where these take more than the gradient,
//                            the saved tensors and the fields
//   NodePtr new_node() const    a node of a class derived from RuleNode
template <class Rule>
using SavedTensors = std::array<Tensor, Rule::kSaved>;
template <class Rule>
using Needs = std::array<bool, Rule::kEdges>;

template <class Rule>
const char* label_of(const Rule& rule) {
  if constexpr (requires { rule.label(); })
    return rule.label();
  else
    return Rule::kLabel;
}

// Whether backward is the op. Else, under create_graph for one, it is the formula in torch
// operators.
template <size_t count>
bool takes_op(const Tensor& grad, const std::array<Tensor, count>& saved) {
  if (at::GradMode::is_enabled() || !is_usual_gradient(grad)) return false;
  for (const Tensor& t : saved)
    if (t.defined() && !is_plain(t)) return false;
  return !is_transformed();
}

template <class Rule>
struct RuleNode : FusedNode {
  Rule rule = {};

  std::string name() const override { return label_of(rule); }

  // Keeps a tensor for backward; `is_output`: the output of this node itself.
  void save(size_t i, const Tensor& t, bool is_output = false) {
    if (!t.defined()) return;
    saved_[i] = SavedVariable(t, is_output);
    if (is_output) outputs_ |= 1u << i;
  }

  variable_list saved_tensors() override {
    const auto tensors = unpacked();
    return variable_list(tensors.begin(), tensors.end());
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& saved : saved_) saved.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    return gradients(rule, grads, input_metadata(0), unpacked(), needs());
  }

  // Compiled autograd calls the gradients as one function of its graph. `torch._dynamo` runs the
  // function with fake tensors, which the formula in torch operators takes.

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    args.collect(name());
    for (size_t i = 0; i < Rule::kSaved; ++i) args.collect(saved_[i], is_output(i));
    for (const bool need : needs()) args.collect(need);
    for_each_field(rule, [&](const auto& field) { args.collect(field); });
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::autograd::SwapSavedVariables& swap) override {
    for (SavedVariable& saved : saved_) swap.before(saved);
    const auto tensors = unpacked();
    std::vector<c10::IValue> arguments;
    std::vector<at::TypePtr> types;
    for (const Tensor& t : tensors) {
      if (!t.defined()) continue;
      arguments.emplace_back(t);
      types.emplace_back(at::TensorType::get());
    }
    std::array<bool, Rule::kSaved> defined;
    for (size_t i = 0; i < Rule::kSaved; ++i) defined[i] = tensors[i].defined();
    const auto function = [rule = rule, needs = needs(), defined, metadata = input_metadata(0)](
                              const variable_list& inputs, const std::vector<c10::IValue>& saved) {
      SavedTensors<Rule> all;
      for (size_t i = 0, next = 0; i < Rule::kSaved; ++i)
        if (defined[i]) all[i] = saved.at(next++).toTensor();
      return gradients(rule, inputs, metadata, all, needs);
    };
    using namespace torch::dynamo::autograd;
    const auto metadata =
        IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            get_input_metadata(next_edges()));
    const auto& python = getPyCompilerInterface();
    const std::string bound =
        python->bind_function(swap.get_py_compiler(), name(), function, types,
                              /*is_custom_function=*/true, /*is_traceable=*/true);
    variable_list result = python->call_function(swap.get_py_compiler(), "apply_functional", bound,
                                                 grads, arguments, metadata);
    for (SavedVariable& saved : saved_) swap.after(saved);
    return result;
  }

 private:
  std::array<SavedVariable, Rule::kSaved> saved_;
  uint32_t outputs_ = 0;

  bool is_output(size_t i) const { return (outputs_ >> i & 1) != 0; }

  // The lock ends before anything runs that may wait for the GIL.
  SavedTensors<Rule> unpacked() {
    std::lock_guard<std::mutex> lock(mutex_);
    SavedTensors<Rule> tensors;
    for (size_t i = 0; i < Rule::kSaved; ++i)
      tensors[i] = saved_[i].unpack(is_output(i) ? getptr() : nullptr);
    return tensors;
  }

  // Edges that the running backward asks for.
  Needs<Rule> needs() const {
    Needs<Rule> result;
    for (size_t i = 0; i < Rule::kEdges; ++i) result[i] = task_should_compute_output(i);
    return result;
  }

  static variable_list gradients(const Rule& rule, const variable_list& grads,
                                 const torch::autograd::InputMetadata& metadata,
                                 const SavedTensors<Rule>& saved, const Needs<Rule>& needs) {
    const Tensor grad = grads[0].defined() ? grads[0] : metadata.zeros_like();
    variable_list all;
    if (takes_op(grad, saved)) {
      at::AutoDispatchBelowADInplaceOrView below;
      all = rule.gradients(grad, saved, needs);
    } else if constexpr (requires { rule.by_formula(grad, saved, needs); }) {
      all = rule.by_formula(grad, saved, needs);
    } else {
      all = call_formula(formula_of<Rule>(), grad, saved, rule);
    }
    all.resize(Rule::kEdges);
    for (size_t i = 0; i < Rule::kEdges; ++i)
      if (!needs[i]) all[i] = Tensor();
    return all;
  }
};

// Python's view of a node: the methods and attributes of torch's own nodes, and `saved_tensors`.

inline PyObject* saved_tensors_of(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  auto* node = reinterpret_cast<torch::autograd::THPCppFunction*>(self)->cdata.get();
  const variable_list tensors = static_cast<FusedNode*>(node)->saved_tensors();
  THPObjectPtr result(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  if (!result) throw_python_error();
  for (size_t i = 0; i < tensors.size(); ++i)
    PyTuple_SET_ITEM(result.get(), static_cast<Py_ssize_t>(i), to_python(tensors[i]).release());
  return result.release();
  END_HANDLE_TH_ERRORS
}

// A class of Python with this name, for the nodes of a C++ class. Classes last as long as the
// process, and so do their names.
template <class Node>
void register_class(const char* name) {
  using namespace torch::autograd;
  // Methods of THP_FUNCTION_DEFAULT_METHODS that the header declares.
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

// prepare(formula), for a Rule with the name of its nodes: kLabel.
template <class Rule>
PyObject* prepare(PyObject*, PyObject* formula) {
  HANDLE_TH_ERRORS
  if (formula_of<Rule>() == nullptr) register_class<RuleNode<Rule>>(Rule::kLabel);
  formula_of<Rule>() = Py_NewRef(formula);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The output of `forward()`, which autograd records where an input needs a gradient: then
// `save(node, output)` keeps what backward needs. An output that is an input has been overwritten.
// The output is undefined, and nothing was done, where Python must record the call.
template <class Rule, class Forward, class Save, class... Tensors>
Tensor run(const Rule& rule, const Forward& forward, const Save& save, const Tensors&... inputs) {
  using namespace torch::autograd;
  if (!compute_requires_grad(inputs...)) return forward();
  if (!can_record({&inputs...})) return {};
  const std::string_view label = label_of(rule);
  RECORD_FUNCTION(std::string(label.substr(0, label.size() - std::strlen("Backward"))),
                  std::vector<c10::IValue>({c10::IValue(maybe(inputs))...}),
                  at::sequence_number::peek());
  NodePtr made;
  if constexpr (requires { rule.new_node(); })
    made = rule.new_node();
  else
    made = make_node<RuleNode<Rule>>();
  auto& node = static_cast<RuleNode<Rule>&>(*made);
  node.rule = rule;
  node.set_next_edges(collect_next_edges(inputs...));
  Tensor output = forward();
  const Edge edge(std::move(made), node.add_input_metadata(output));
  if ((output.is_same(inputs) || ...))
    impl::rebase_history(output, edge);
  else
    impl::set_gradient_edge(output, edge);
  save(node, output);
  return output;
}

}  // namespace fusedtrain
