// _C_autograd: the autograd nodes of the ops in C++, for one torch and one Python. The ops
// themselves are those of the dispatcher, whichever file their kernels are in.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "activations.h"
#include "batch_norm.h"
#include "bias_act.h"
#include "depthwise.h"
#include "gated.h"
#include "scale_add.h"

namespace {

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

using namespace fusedtrain;

PyMethodDef methods[] = {{"prepare_batch_norm", prepare_batch_norm, METH_VARARGS, nullptr},
                         {"prepare_bias_act", prepare_bias_act, METH_VARARGS, nullptr},
                         {"prepare_depthwise", prepare<DepthwiseRule>, METH_O, nullptr},
                         {"prepare_gated", prepare<GatedRule>, METH_O, nullptr},
                         {"prepare_gated_halves", prepare<GatedHalvesRule>, METH_O, nullptr},
                         {"prepare_gated_spread", prepare<GatedSpreadRule>, METH_O, nullptr},
                         {"prepare_scale_add", prepare<ScaleRule>, METH_O, nullptr},
                         {"batch_norm_act", fast(batch_norm_act), METH_FASTCALL, nullptr},
                         {"bias_act", fast(bias_act), METH_FASTCALL, nullptr},
                         {"depthwise_conv", fast(depthwise_conv), METH_FASTCALL, nullptr},
                         {"gated", fast(gated), METH_FASTCALL, nullptr},
                         {"gated_halves", fast(gated_halves), METH_FASTCALL, nullptr},
                         {"scale_add", fast(scale_add), METH_FASTCALL, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C_autograd", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__C_autograd() {
  THPObjectPtr module(PyModule_Create(&definition));
  if (!module) return nullptr;
  PyObject* activation = activation_type();
  if (activation == nullptr || PyModule_AddObject(module, "Activation", activation) < 0)
    return nullptr;
  return module.release();
}
