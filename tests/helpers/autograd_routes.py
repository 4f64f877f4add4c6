"""The two routes of autograd: nodes in C++ (``_C_autograd.so``) and in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fusedtrain
from fusedtrain import _backends
from fusedtrain.ops import batch_norm, bias_act, depthwise, gated, scale_add
from fusedtrain.ops.activations import KERNELS

NEEDS_CPP = pytest.mark.skipif(
    _backends.autograd() is None, reason=f"{fusedtrain.backend_info().backends['autograd']}"
)


@contextmanager
def python_route() -> Iterator[None]:
    """Within it every call makes its nodes in Python."""
    with ExitStack() as patches:
        for module in (batch_norm, bias_act, depthwise, gated, scale_add):
            patches.enter_context(mock.patch.object(module, "_cpp", None))
        calls = {name: kernel.call for name, kernel in KERNELS.items()}
        for kernel in KERNELS.values():
            kernel.call = kernel.in_python
        try:
            yield
        finally:
            for name, kernel in KERNELS.items():
                kernel.call = calls[name]


def by_both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Results by the nodes in C++, and by those in Python."""
    ours = run()
    with python_route():
        return ours, run()


def is_of_this_package(node: type) -> bool:
    """Whether a class of nodes is of this package, in C++ or in Python: those of torch do not show
    what they save by this name."""
    return hasattr(node, "saved_tensors")


def is_cpp(output: Tensor) -> bool:
    """Whether the node of an output of this package is in C++."""
    assert output.grad_fn is not None
    return not isinstance(output.grad_fn, torch.autograd.function.BackwardCFunction)
