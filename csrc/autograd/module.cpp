// _C_autograd: the autograd nodes of the ops in C++, for one torch and one Python. The ops
// themselves are those of the dispatcher, whichever file their kernels are in.
#include <Python.h>

#include "activations.h"

namespace {
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C_autograd", nullptr, -1, nullptr};
}

PyMODINIT_FUNC PyInit__C_autograd() {
  THPObjectPtr module(PyModule_Create(&definition));
  if (!module) return nullptr;
  PyObject* activation = fusedtrain::activation_type();
  if (activation == nullptr || PyModule_AddObject(module, "Activation", activation) < 0)
    return nullptr;
  return module.release();
}
