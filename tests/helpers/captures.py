"""A CUDA graph that is not there: within `capture()` what a real capture refuses, or what its
replays would get wrong, raises, on the pretended GPU of `pretended_gpu.py`.

A real capture refuses a host that waits for the device, and copies from host memory that is not
pinned. The dispatcher sees what C++ reads, torch functions what Python does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedtrain.reference import FAMILIES
from helpers.pretended_gpu import DEVICE, Mode, OnGpu

_PYTHON_READS = (
    Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__,
    Tensor.__int__, Tensor.__index__, Tensor.__contains__, torch.equal, torch.allclose,
)  # fmt: skip
_READS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero",
    "aten::masked_select", "aten::_unique2", "aten::item",
}  # fmt: skip


class NotCapturable(Exception):
    """A call that a real capture would refuse."""


class _Functions(Mode):
    """The pretended GPU, whose copies from the host need pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.pin_memory:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if func is Tensor.is_pinned:
            return any(t is args[0] for t in self.pinned)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func in _PYTHON_READS and any(isinstance(t, OnGpu) for t in tensors):
            raise NotCapturable(f"{func} waits for the device")
        masks = func is Tensor.__getitem__ and any(t.dtype is torch.bool for t in tensors[1:])
        if masks and isinstance(args[0], OnGpu):
            raise NotCapturable("a mask's size waits for the device")
        if func is Tensor.to:
            to = [v.type if isinstance(v, torch.device) else v
                  for v in (*args[1:], *kwargs.values())]  # fmt: skip
            on_gpu = isinstance(args[0], OnGpu)
            if on_gpu and "cpu" in to:
                raise NotCapturable("a copy to the host waits for the device")
            if not on_gpu and DEVICE in to and not any(t is args[0] for t in self.pinned):
                raise NotCapturable("a copy from host memory that is not pinned")
        if func is torch.where and any(isinstance(v, (int, float)) for v in args):
            # Torch makes a tensor of the number, which would be on no pretended GPU.
            to = args[0].device
            args = [torch.tensor(v).to(to) if isinstance(v, (int, float)) else v for v in args]
        return super().__torch_function__(func, types, args, kwargs)


class _Operators(TorchDispatchMode):
    """Refuses the operators that read from the device."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func._schema.name
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(isinstance(t, OnGpu) for t in tensors):
            both = not all(isinstance(t, OnGpu) for t in tensors)
            to_host = kwargs.get("device") == torch.device("cpu")
            if name in _READS or to_host or (name == "aten::copy_" and both):
                raise NotCapturable(f"{name} waits for the device")
        return func(*args, **kwargs)


@contextmanager
def capture(kernels: bool = True) -> Iterator[None]:
    """Within it a CUDA graph is said to be captured.

    Args:
        kernels: False: the optimizers' ops run in plain torch.
    """
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.multiple(
                torch.cuda, is_initialized=lambda: True, is_current_stream_capturing=lambda: True
            )
        )
        if not kernels:
            for family in ("optimizers", "scaling"):
                module = importlib.import_module(f"fusedtrain.reference.{family}")
                for name in FAMILIES[family]:
                    plain = mock.patch.object(torch.ops.fusedtrain, name, getattr(module, name))
                    stack.enter_context(plain)
        stack.enter_context(_Functions())
        stack.enter_context(_Operators())
        yield
