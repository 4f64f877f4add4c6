"""The ops as Triton kernels: twins of the C++ ones, for NVIDIA and AMD GPUs.

Importing this needs an installed triton, but does not import it: the first op does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._batch_norm_ops import KERNELS as _BATCH_NORM_OPS
from .._chain_ops import KERNELS as _CHAIN_OPS
from .._few_bit_ops import KERNELS as _FEW_BIT_OPS
from .._image_ops import KERNELS as _IMAGE_OPS
from .._pool_ops import KERNELS as _POOL_OPS
from ..reference import ACTIVATIONS

if importlib.util.find_spec("triton") is None:
    raise ImportError("fusedtrain.triton needs triton, which is not installed: pip install triton")

_OPTIMIZER_OPS = (
    "measure_gradients", "try_update", "optimizer_step", "update_scale", "zero_tensors",
)  # fmt: skip
# By the module here that has them.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "batch_norm": _BATCH_NORM_OPS,
    "fold": ("fold_weight", "fold_weight_backward"),
    "chains": _CHAIN_OPS,
    "few_bit": _FEW_BIT_OPS,
    "images": _IMAGE_OPS,
    "pool": _POOL_OPS,
}
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
    from . import channelwise, multi_tensor, pointwise, scaling

    ops: dict[str, Callable[..., Any]] = {}
    for name, row in ACTIVATIONS.items():
        loop: Any = channelwise if row.tensors else pointwise
        ops[name] = functools.partial(loop.forward, name)
        ops[f"{name}_backward"] = functools.partial(loop.backward, name)
        if not row.tensors:
            ops[f"{name}_"] = functools.partial(loop.inplace, name)
    for name in _OPTIMIZER_OPS:
        ops[name] = getattr(multi_tensor, name, None) or getattr(scaling, name)
    for family, names in _FAMILIES.items():
        module = importlib.import_module(f".{family}", __name__)
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

    for name, row in ACTIVATIONS.items():
        companions = ("", "_backward") if row.tensors else ("", "_backward", "_")
        for companion in companions:
            library.impl(name + companion, late(name + companion), dispatch_key)
    for name in (*_OPTIMIZER_OPS, *(name for family in _FAMILIES.values() for name in family)):
        library.impl(name, late(name), dispatch_key)
