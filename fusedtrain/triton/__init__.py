"""The ops as Triton kernels: twins of the C++ kernels, for NVIDIA and AMD GPUs.

This module needs an installed triton, but only the first op imports it.
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

_OLDEST = (3, 6)  # torch 2.10's Triton; older releases were not tried


def available() -> str | None:
    """Why the kernels cannot run; None if no reason is known.

    Calls no driver, so a process may fork afterwards.
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
            module = importlib.import_module(f".{family}", __name__)
            ops.update((name, getattr(module, name)) for name in names)
    return ops


class _Ops(Mapping[str, Callable[..., Any]]):
    """Loads the kernels on first use."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return _load()[name]

    def __iter__(self) -> Any:
        return iter(_load())

    def __len__(self) -> int:
        return len(_load())


# The kernels by the op's name, with the op's arguments: OPS["mish"](x), OPS["celu_"](x, 1.0).
OPS: Mapping[str, Callable[..., Any]] = _Ops()


def register(library: torch.library.Library, dispatch_key: str = "CUDA") -> None:
    """Registers these kernels for the ``fusedtrain`` ops, by default on CUDA and ROCm tensors.

    The first call of an op imports Triton. ``"CPU"`` is for Triton's interpreter.
    """

    def late(name: str) -> Callable[..., Any]:
        return lambda *arguments: _load()[name](*arguments)

    for name in itertools.chain(*FAMILIES.values()):
        library.impl(name, late(name), dispatch_key)
