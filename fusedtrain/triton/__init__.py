"""The ops as Triton kernels: twins of the C++ ones, for NVIDIA and AMD GPUs.

Importing this needs an installed triton, but does not import it: the first op does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..reference import ACTIVATIONS, FAMILIES

if importlib.util.find_spec("triton") is None:
    raise ImportError("fusedtrain.triton needs triton, which is not installed: pip install triton")

# The modules here whose family has another name.
_MODULES = {"optimizers": "multi_tensor"}
_OLDEST = (3, 6)  # of torch 2.10; older ones were not tried


def available() -> str | None:
    """Why the kernels cannot run here; None where nothing is known to be in the way.

    Asks no driver, so that a process may fork after it.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build without CUDA or ROCm"
    return None


@functools.cache
def _load() -> dict[str, Callable[..., Any]]:
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ImportError(f"fusedtrain.triton needs triton {oldest}, not {triton.__version__}")
    from . import channelwise, pointwise

    ops: dict[str, Callable[..., Any]] = {}
    for name, row in ACTIVATIONS.items():
        loop: Any = channelwise if row.tensors else pointwise
        ops[name] = functools.partial(loop.forward, name)
        ops[f"{name}_backward"] = functools.partial(loop.backward, name)
        if not row.tensors:
            ops[f"{name}_"] = functools.partial(loop.inplace, name)
    for family, names in FAMILIES.items():
        if family != "activations":
            module = importlib.import_module(f".{_MODULES.get(family, family)}", __name__)
            ops.update((name, getattr(module, name)) for name in names)
    return ops


class _Ops(Mapping[str, Callable[..., Any]]):
    """Loads the kernels when the first one is asked for."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return _load()[name]

    def __iter__(self) -> Any:
        return iter(_load())

    def __len__(self) -> int:
        return len(_load())


# By the name of the op, with the op's arguments: OPS["mish"](x), OPS["celu_"](x, 1.0).
OPS: Mapping[str, Callable[..., Any]] = _Ops()


def register(library: torch.library.Library, dispatch_key: str = "CUDA") -> None:
    """Makes these the kernels of the ``fusedtrain`` ops, on CUDA and ROCm tensors if not told else.

    Triton is imported by the first call of one. ``"CPU"`` is for Triton's interpreter.
    """

    def late(name: str) -> Callable[..., Any]:
        return lambda *arguments: _load()[name](*arguments)

    for name in itertools.chain(*FAMILIES.values()):
        library.impl(name, late(name), dispatch_key)
