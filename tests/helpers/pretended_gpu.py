"""A GPU that is not there: tensors that say they are on it, and refuse what a real GPU's refuse.

FUSEDTRAIN_TEST_PRETENDED_GPU=1 makes `[cuda]` cases of kernel tests, and these alone, run on a
machine without one (test_launch_rule.py). An `OnGpu` holds a tensor of the CPU. Tensors of
the CPU meet it in copies, as scalars and as indices alone; the numbers are the CPU kernels'. So a
test that forgets to place a tensor fails here, too, and one that places none starts no kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

IS_ON = os.environ.get("FUSEDTRAIN_TEST_PRETENDED_GPU") == "1"

# A torch without CUDA has no guard of a CUDA device, which indexing asks for.
DEVICE = "meta"
_GPU, _CPU = torch.device(DEVICE), torch.device("cpu")
_calls = 0


def calls() -> int:
    """Ops of fusedtrain that were given tensors of the pretended GPU."""
    return _calls


class OnGpu(Tensor):
    """Says that it is on the GPU."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls: type[OnGpu], on_cpu: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls, on_cpu.size(), on_cpu.stride(), on_cpu.storage_offset(), dtype=on_cpu.dtype,
            device=_GPU, requires_grad=on_cpu.requires_grad,
        )  # fmt: skip
        made.on_cpu = on_cpu.detach()
        return made

    def __repr__(self) -> str:
        return f"OnGpu({self.on_cpu})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


# Ops that may be given tensors of both devices.
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
_INDEXED = (
    torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)  # fmt: skip


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op with the CPU's tensors; results are on the GPU but where the CPU was asked for."""
    global _calls
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if func in _INDEXED:
        tensors = [t for t in (args[0], *args[2:3]) if isinstance(t, Tensor)]
    ours = func.namespace == "fusedtrain"
    if ours:  # whose tables of numbers stay on the host
        on_host = [a for a, s in zip(args, func._schema.arguments) if s.name in ("table", "rows")]
        tensors = [t for t in tensors if not any(t is table for table in on_host)]
    strangers = [t for t in tensors if not isinstance(t, OnGpu) and (t.dim() or ours)]
    if strangers and func not in _COPIES:
        raise RuntimeError(f"{func}: expected all tensors to be on the GPU, one is on the CPU")
    to = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    inner = tree_map(_inner, kwargs) | ({} if to is None else {"device": _CPU})
    result = func(*tree_map(_inner, args), **inner)
    _calls += ours and _has_work(func, tensors, args)
    if func._schema.is_mutable and func._schema.name.endswith("_") and not ours:  # in place
        return args[0] if func._schema.returns else None
    return result if to == _CPU else tree_map(_outer, result)


def _has_work(func: Any, tensors: list[Tensor], args: tuple[Any, ...]) -> bool:
    """Whether a kernel is started: the first argument with tensors has elements. A convolution
    without inputs still has a bias to fold."""
    if "fold_weight" in func._schema.name:
        return any(t.numel() for t in tensors)
    groups = ([t for t in tree_leaves(a) if isinstance(t, Tensor)] for a in args)
    return any(t.numel() for t in next(filter(None, groups)))


def _inner(value: Any) -> Any:
    return value.on_cpu if isinstance(value, OnGpu) else value


def _outer(value: Any) -> Any:
    return OnGpu(value) if isinstance(value, Tensor) else value


def _is_gpu(value: Any) -> bool:
    if isinstance(value, OnGpu):
        return True
    return isinstance(value, (str, torch.device)) and torch.device(value).type == DEVICE


class Mode(TorchFunctionMode):
    """Calls that torch would leave to a driver: tensors made on the GPU, or moved to it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and any(map(_is_gpu, (*args[1:], *kwargs.values()))):
            return _moved(*args, **kwargs)
        if isinstance(args[0] if args else None, OnGpu):
            if func in (Tensor.data_ptr, Tensor.untyped_storage, Tensor.tolist):
                return func(args[0].on_cpu)
            # Torch makes tensors of numbers and lists, which would be of the real device.
            if func in (Tensor.__setitem__, Tensor.__getitem__):
                return tree_map(_outer, func(*tree_map(_inner, args)))
            if func is Tensor.numpy:
                raise TypeError("can't convert a GPU's tensor to numpy")
        elif _is_gpu(kwargs.get("device")) and not isinstance(kwargs["device"], OnGpu):
            if kwargs.get("generator") is not None:
                raise RuntimeError("Expected a GPU's generator, but found one of the CPU")
            return OnGpu(func(*args, **{**kwargs, "device": _CPU}))
        return func(*args, **kwargs)


def _moved(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to` of the GPU: new memory, unless the tensor is on the GPU already."""
    options = [*args, *kwargs.values()]
    dtypes = [v.dtype if isinstance(v, Tensor) else v for v in options]
    dtype = next((d for d in dtypes if isinstance(d, torch.dtype)), t.dtype)
    if isinstance(t, OnGpu):
        return t if dtype is t.dtype else t.to(dtype)
    return OnGpu(t.detach().to(dtype, copy=True)).requires_grad_(t.requires_grad)


def some(items: list[Any], most: int = 4) -> list[Any]:
    """The cases of a pretended GPU: of each test a few, the first and the last among them."""
    tests: dict[Any, list[Any]] = {}
    for item in items:
        if "cuda" in getattr(getattr(item, "callspec", None), "params", {}).values():
            tests.setdefault(item.function, []).append(item)
    chosen = []
    for cases in tests.values():
        places = {round(i * (len(cases) - 1) / (most - 1)) for i in range(most)}
        chosen += [case for i, case in enumerate(cases) if i in places]
    return chosen


@contextmanager
def pretended() -> Iterator[None]:
    """Everything that is said to be on the GPU is an `OnGpu`."""
    with Mode():
        yield
