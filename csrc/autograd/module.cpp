// _C_autograd: the autograd nodes of the ops in C++, for one torch and one Python. The ops
// themselves are those of the dispatcher, whichever file their kernels are in.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "activations.h"
#include "batch_norm.h"

namespace {

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"prepare_batch_norm", fusedtrain::prepare_batch_norm, METH_VARARGS, nullptr},
    {"batch_norm_act", fast(fusedtrain::batch_norm_act), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C_autograd", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__C_autograd() {
  THPObjectPtr module(PyModule_Create(&definition));
  if (!module) return nullptr;
  PyObject* activation = fusedtrain::activation_type();
  if (activation == nullptr || PyModule_AddObject(module, "Activation", activation) < 0)
    return nullptr;
  return module.release();
}
