// The pointwise activations: `Activation`, a callable for each, and its node.
#pragma once

#include <structmember.h>

#include <cstddef>
#include <limits>

#include "node.h"

namespace fusedtrain {

// The ops of one activation with `count` float parameters.
struct ActivationOps {
  c10::OperatorHandle forward_op, in_place_op, backward_op;
  int count;

  ActivationOps(const std::string& name, int parameters)
      : forward_op(find(name)),
        in_place_op(find(name + "_")),
        backward_op(find(name + "_backward")),
        count(parameters) {}

  static c10::OperatorHandle find(const std::string& name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(("fusedtrain::" + name).c_str(), "");
  }

  template <class Result, class... Tensors>
  Result call(const c10::OperatorHandle& op, double a, double b, Tensors... tensors) const {
    if (count == 0) return op.typed<Result(Tensors...)>().call(tensors...);
    if (count == 1) return op.typed<Result(Tensors..., double)>().call(tensors..., a);
    return op.typed<Result(Tensors..., double, double)>().call(tensors..., a, b);
  }
  Tensor forward(const Tensor& x, double a, double b) const {
    return call<Tensor, const Tensor&>(forward_op, a, b, x);
  }
  void in_place(Tensor x, double a, double b) const { call<void, Tensor&>(in_place_op, a, b, x); }
  Tensor backward(const Tensor& g, const Tensor& saved, double a, double b) const {
    return call<Tensor, const Tensor&, const Tensor&>(backward_op, a, b, g, saved);
  }
};

// A class of C++ for each activation: each has its class in Python.
struct NodeClass {
  NodePtr (*make)();
  void (*register_as)(const char* name);
};

// Description of an activation, given by Python. Lasts as long as the process, since nodes point to
// it.
struct ActivationRow {
  ActivationOps ops;
  std::string labels[2];  // of grad_fn; the second one is in place
  NodeClass nodes[2];
  bool saves_output;
  bool in_place_by_output;  // in place, backward is another formula
  PyObject* formula;        // backward in torch operators
  PyObject* valid;          // whether the kernel is exact for these parameters, or None
};

// Rows of all activations, by their numbers.
inline std::vector<const ActivationRow*>& activation_rows() {
  static std::vector<const ActivationRow*> rows;
  return rows;
}

// An activation with the values of its parameters, as an argument of other ops; -1 is none.
struct Pointwise {
  int64_t op = -1;
  double a = 0, b = 0;

  const ActivationRow& row() const { return *activation_rows()[static_cast<size_t>(op)]; }
  bool saves_output() const { return op >= 0 && row().saves_output; }
  auto fields() const { return std::tie(op, a, b); }
};

inline bool read(PyObject* object, Pointwise& f) {
  return PyTuple_Check(object) && PyTuple_GET_SIZE(object) == 3 &&
         read(PyTuple_GET_ITEM(object, 0), f.op) && read(PyTuple_GET_ITEM(object, 1), f.a) &&
         read(PyTuple_GET_ITEM(object, 2), f.b) && f.op >= -1 &&
         f.op < static_cast<int64_t>(activation_rows().size());
}

struct ActivationRule {
  static constexpr size_t kSaved = 1, kEdges = 1;
  const ActivationRow* row;
  double a, b;
  bool in_place;

  const char* label() const { return row->labels[in_place].c_str(); }
  NodePtr new_node() const { return row->nodes[in_place].make(); }

  variable_list gradients(const Tensor& grad, const SavedTensors<ActivationRule>& saved,
                          const Needs<ActivationRule>&) const {
    return {row->ops.backward(grad, saved[0], a, b)};
  }

  variable_list by_formula(const Tensor& grad, const SavedTensors<ActivationRule>& saved,
                           const Needs<ActivationRule>&) const {
    if (row->ops.count == 0) return call_formula(row->formula, grad, saved);
    if (row->ops.count == 1) return call_formula(row->formula, grad, saved, a);
    return call_formula(row->formula, grad, saved, a, b);
  }

  auto fields() const { return std::tie(a, b); }
};
using ActivationNode = RuleNode<ActivationRule>;

// The callable: (input, inplace, *parameters), all by position. `fallback` takes what is unusual.
struct Activation {
  PyObject_HEAD vectorcallfunc vectorcall;
  ActivationRow* row;
  PyObject* fallback;
  double checked_a, checked_b;  // the parameters that `valid` accepted last
};

inline bool in_range(const Tensor& t, double parameter) {
  const double largest = t.scalar_type() == at::kDouble  ? std::numeric_limits<double>::max()
                         : t.scalar_type() == at::kFloat ? std::numeric_limits<float>::max()
                         : t.scalar_type() == at::kHalf
                             ? 65504.0
                             : static_cast<double>(std::numeric_limits<c10::BFloat16>::max());
  return -largest <= parameter && parameter <= largest;
}

// Reads the parameters; false where they need a closer look.
inline bool read_parameters(Activation* self, const Tensor& input, PyObject* const* args,
                            double (&p)[2]) {
  const ActivationRow& row = *self->row;
  for (int i = 0; i < row.ops.count; ++i) {
    if (PyFloat_CheckExact(args[i])) {
      p[i] = PyFloat_AS_DOUBLE(args[i]);
    } else if (PyLong_CheckExact(args[i])) {
      p[i] = PyLong_AsDouble(args[i]);
      if (p[i] == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
      }
    } else {
      return false;
    }
    if (!in_range(input, p[i])) return false;
  }
  if (row.valid == Py_None || (p[0] == self->checked_a && p[1] == self->checked_b)) return true;
  THPObjectPtr answer(PyObject_Vectorcall(row.valid, args, row.ops.count, nullptr));
  if (!answer) throw_python_error();
  if (PyObject_IsTrue(answer.get()) != 1) return false;
  self->checked_a = p[0];
  self->checked_b = p[1];
  return true;
}

inline Tensor out_of_place(const ActivationRow& row, const Tensor& input, const double (&p)[2]) {
  const auto forward = [&] {
    const BelowAutograd below(input);
    return row.ops.forward(input, p[0], p[1]);
  };
  const auto save = [&](auto& node, const Tensor& output) {
    node.save(0, row.saves_output ? output : input, row.saves_output);
  };
  return run(ActivationRule{&row, p[0], p[1], false}, forward, save, input);
}

// Works in place where that is simple. The output is undefined where nothing was done.
inline Tensor in_place(const ActivationRow& row, const Tensor& input, const double (&p)[2]) {
  if (input.is_inference() || (at::GradMode::is_enabled() && input.is_view())) return {};
  const bool records = torch::autograd::compute_requires_grad(input);
  if (records && (input.is_leaf() || row.in_place_by_output)) return {};
  Tensor saved;
  const auto forward = [&] {
    // The clone is recorded, so that second derivatives reach the input through it.
    if (records && !row.saves_output) saved = input.clone();
    {
      const BelowAutograd below(input);
      row.ops.in_place(input, p[0], p[1]);
    }
    input.unsafeGetTensorImpl()->bump_version();
    return input;
  };
  const auto save = [&](auto& node, const Tensor& output) {
    node.save(0, row.saves_output ? output : saved, row.saves_output);
  };
  return run(ActivationRule{&row, p[0], p[1], true}, forward, save, input);
}

// Returns null, without an error, where Python must decide.
inline PyObject* run_usual(Activation* self, PyObject* const* args, Py_ssize_t count) {
  const ActivationRow& row = *self->row;
  if (count != 2 + row.ops.count || !THPVariable_CheckExact(args[0])) return nullptr;
  const bool inplace = args[1] == Py_True;
  if (!inplace && args[1] != Py_False) return nullptr;
  const Tensor& input = THPVariable_Unpack(args[0]);
  double p[2] = {0, 0};
  if (!is_usual(input) || !is_usual_thread() || !read_parameters(self, input, args + 2, p))
    return nullptr;
  const Tensor output = inplace ? in_place(row, input, p) : out_of_place(row, input, p);
  return output.defined() ? THPVariable_Wrap(output) : nullptr;
}

inline PyObject* call_activation(PyObject* object, PyObject* const* args, size_t nargsf,
                                 PyObject* names) {
  HANDLE_TH_ERRORS
  auto* self = reinterpret_cast<Activation*>(object);
  if (names == nullptr) {
    PyObject* result = run_usual(self, args, PyVectorcall_NARGS(nargsf));
    if (result != nullptr || PyErr_Occurred()) return result;
  }
  return PyObject_Vectorcall(self->fallback, args, nargsf, names);
  END_HANDLE_TH_ERRORS
}

template <size_t number>
struct NumberedNode final : ActivationNode {};

template <size_t... numbers>
const NodeClass& node_class(size_t number, std::index_sequence<numbers...>) {
  static constexpr NodeClass kClasses[] = {
      {[]() -> NodePtr { return make_node<NumberedNode<numbers>>(); },
       register_class<NumberedNode<numbers>>}...};
  TORCH_CHECK(number < sizeof...(numbers), "fusedtrain: more activations than classes of nodes");
  return kClasses[number];
}

// Activation(name, class name, parameters, saves_output, in_place_by_output, formula, valid,
//            fallback)
inline PyObject* new_activation(PyTypeObject* type, PyObject* args, PyObject* names) {
  HANDLE_TH_ERRORS
  const char *name, *class_name;
  int parameters, saves_output, in_place_by_output;
  PyObject *formula, *valid, *fallback;
  static const char* kNames[] = {"name",         "class_name",         "parameters",
                                 "saves_output", "in_place_by_output", "formula",
                                 "valid",        "fallback",           nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, names, "ssippOOO", const_cast<char**>(kNames), &name,
                                   &class_name, &parameters, &saves_output, &in_place_by_output,
                                   &formula, &valid, &fallback))
    return nullptr;
  const size_t first = 2 * activation_rows().size();
  constexpr auto kNumbers = std::make_index_sequence<80>();
  const std::string title = class_name;
  auto* row = new ActivationRow{{name, parameters},
                                {title + "Backward", title + "InplaceBackward"},
                                {node_class(first, kNumbers), node_class(first + 1, kNumbers)},
                                saves_output != 0,
                                in_place_by_output != 0,
                                Py_NewRef(formula),
                                Py_NewRef(valid)};
  for (int i = 0; i < 2; ++i) row->nodes[i].register_as(row->labels[i].c_str());
  activation_rows().push_back(row);
  auto* self = reinterpret_cast<Activation*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = call_activation;
  self->row = row;
  self->fallback = Py_NewRef(fallback);
  self->checked_a = self->checked_b = std::numeric_limits<double>::quiet_NaN();
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

inline void delete_activation(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_DECREF(reinterpret_cast<Activation*>(self)->fallback);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* activation_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Activation, vectorcall), READONLY, nullptr},
      {nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_activation)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(delete_activation)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec = {"fusedtrain._C_autograd.Activation", sizeof(Activation), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  return PyType_FromSpec(&spec);
}

}  // namespace fusedtrain
