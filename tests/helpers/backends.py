"""The implementations of the ops, by backend, that one table of cases drives.

CPU and emulated CUDA run here; interpreted Triton too, where triton is installed. On a machine with
a GPU, CUDA and Triton are the real ones.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import cuda_emulator
from fusedtrain import backend_info
from fusedtrain.reference import ACTIVATIONS, FAMILIES
from helpers import pretended_gpu
from helpers.launches import COUNTERS
from helpers.triton_interpreter import round_to_nearest

# The references of ops that are not activations, by their names.
REFERENCES = {
    name: importlib.import_module(f"fusedtrain.reference.{family}")
    for family, names in FAMILIES.items()
    if family != "activations"
    for name in names
}
HAS_GPU = torch.cuda.is_available()
_ROUGH_DIGITS = 10.0  # quotients, roots and exponentials of CUDA are off by 2 ULP


class Kernels:
    """Calls ops by name, the last letters of which tell forward, backward and in place apart.

    What an op is given must lie on the device. A call must start a kernel, but where something of
    it is empty, or nothing was asked for.
    """

    device = "cpu"
    counter: str | None = None  # of COUNTERS
    kernel = True  # strides are kept, and 16-bit numbers rounded once
    slow = False  # or no kernel: of large tensors and long tables only a part
    digits = 2.0  # eps of float32 by which a batch's deviation may be off
    gradient_digits = 8.0  # and by which a batch norm's gradients may be

    def __call__(self, name: str, *arguments: Any) -> Any:
        tensors = tensors_of(name, arguments)
        for t in tensors:
            assert t.device.type == self.device, f"{name}: a tensor was left on the {t.device}"
        count = COUNTERS[self.counter] if self.counter else lambda: 1
        before = count()
        result = self.run(name, *arguments)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        made += written_by_call(name, arguments)
        if self.counter and all(t.numel() for t in tensors) and any(t.numel() for t in made):
            assert count() > before, f"{name} started no {self.counter} kernel"
        return result

    def run(self, name: str, *arguments: Any) -> Any:
        """The op itself."""
        raise NotImplementedError

    def has(self, name: str) -> bool:
        """Whether there is a kernel of that name."""
        return True


class Reference(Kernels):
    """Plain torch, the fallback of the ops. Its 16-bit results are rounded at every step."""

    kernel = False
    slow = True

    def run(self, name: str, *arguments: Any) -> Any:
        if name in REFERENCES:
            return getattr(REFERENCES[name], name)(*arguments)
        if name.endswith("_backward"):
            return ACTIVATIONS[name.removesuffix("_backward")].backward(*arguments)
        if name.endswith("_"):
            arguments[0].copy_(ACTIVATIONS[name[:-1]].forward(*arguments))
            return None
        return ACTIVATIONS[name].forward(*arguments)


class Registered(Kernels):
    """The kernels that the dispatcher has for a device."""

    digits = 4.0  # the CPU adds up a few dozen elements in float32, what they come to in double

    def __init__(self, device: str) -> None:
        self.device = device
        self.counter = None if device == "cpu" else "cuda"
        self.slow = device == pretended_gpu.DEVICE
        if device == "cuda":
            self.gradient_digits = _ROUGH_DIGITS

    def run(self, name: str, *arguments: Any) -> Any:
        return getattr(torch.ops.fusedtrain, name)(*arguments)

    def has(self, name: str) -> bool:
        key = "cuda" if self.device == "cuda" else "cpu"  # whose numbers a pretended GPU has
        return has_kernel(f"fusedtrain::{name}", key.upper())


class Emulated(Kernels):
    """The CUDA kernels, on the CPU, with their threads in every order: the same bits each time."""

    counter = "emulated"
    slow = True
    gradient_digits = _ROUGH_DIGITS
    orders: tuple[str, ...] = cuda_emulator.ORDERS

    def __init__(self) -> None:
        self.emulator = cuda_emulator.load()

    def run(self, name: str, *arguments: Any) -> Any:
        written = written_by_call(name, arguments)
        kept = [t.clone() for t in written]
        results = []
        for order in self.orders:
            for t, before in zip(written, kept, strict=True):
                t.copy_(before)
            self.emulator.set_order(order)
            result = self.emulator.call(name, *arguments)
            results.append((result, *(t.clone() for t in written)))
        self.emulator.set_order("forward")
        for other in results[1:]:
            assert same_bits(results[0], other), f"{name} depends on the order of its threads"
        return results[0][0]

    def has(self, name: str) -> bool:
        return has_kernel(f"fusedtrain_emulated::{name}", "CPU")


class Triton(Kernels):
    """The Triton kernels: on the GPU, or interpreted."""

    counter = "triton"

    def __init__(self) -> None:
        import fusedtrain.triton

        if not HAS_GPU:
            round_to_nearest()
        self.device = "cuda" if HAS_GPU else "cpu"
        self.slow = not HAS_GPU
        self.digits = 16.0  # adds up in float32
        self.ops = fusedtrain.triton.OPS

    def run(self, name: str, *arguments: Any) -> Any:
        return self.ops[name](*arguments)

    def has(self, name: str) -> bool:
        return name in self.ops


def has_kernel(op: str, key: str) -> bool:
    """Whether the dispatcher has a kernel of the op for that key itself, not a fallback."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


def tensors_of(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The tensors of an op's arguments, without an optimizer's tables, which stay on the host."""
    schema = getattr(torch.ops.fusedtrain, name).default._schema
    values = [
        a for a, argument in zip(arguments, schema.arguments, strict=False)
        if argument.name not in ("table", "rows")
    ]  # fmt: skip
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def written_by(name: str) -> list[int]:
    """Positions of the arguments that the op writes to."""
    schema = getattr(torch.ops.fusedtrain, name).default._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    return [i for i, is_written in enumerate(written) if is_written]


def written_by_call(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that a call of the op writes to."""
    leaves = tree_leaves([arguments[i] for i in written_by(name)])
    return [t for t in leaves if t is not None]


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors, or tuples of them, or None, are equal; one NaN is as good as another."""
    if a is None:
        return b is None
    if isinstance(a, tuple):
        return all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _triton() -> Triton:
    pytest.importorskip("triton")
    if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    return Triton()


def _emulated() -> Emulated:
    if reason := cuda_emulator.why_not():
        pytest.skip(reason)
    return Emulated()


def _registered(device: str) -> Registered:
    if device == "cuda" and pretended_gpu.IS_ON:
        return Registered(pretended_gpu.DEVICE)
    if device == "cuda" and not HAS_GPU:
        pytest.skip("needs a CUDA GPU: never in CI, see `make gpu`")
    if not backend_info().backends[device].loaded:
        pytest.skip(backend_info().backends[device].reason)
    return Registered(device)


BACKENDS: dict[str, Callable[[], Kernels]] = {
    "reference": Reference,
    "cpu": lambda: _registered("cpu"),
    "emulated": _emulated,
    "triton": _triton,
    "cuda": lambda: _registered("cuda"),
}


def copied(t: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    """A copy with the strides, the gaps and the offset of `t`, which ``t.to(device)`` loses: where
    memory begins on 16 bytes, both are misaligned alike."""
    if t.device.type == "meta":
        return t
    memory = t.detach().as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0)
    copy = torch.empty(memory.shape, dtype=dtype or t.dtype, device=device).copy_(memory)
    return copy.as_strided(t.size(), t.stride(), t.storage_offset())


def placed(t: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on the device, copied where it is elsewhere or of another dtype."""
    as_asked = t.device.type == device and dtype in (None, t.dtype)
    return t if as_asked else copied(t, device, dtype)


def call_placed(
    op: Callable[..., Any],
    device: str,
    arguments: Iterable[Any],
    written: Iterable[int],
    stays: Iterable[int] = (),
) -> Any:
    """The result of `op` on copies of the tensors, in lists too, on `device`. The arguments
    numbered in `written` get the values that `op` wrote; those in `stays` are not copied."""
    originals, kept = list(arguments), set(stays)

    def moved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(moved, value))
        return copied(value, device) if isinstance(value, Tensor) else value

    copies = [v if i in kept else moved(v) for i, v in enumerate(originals)]
    result = op(*copies)
    for i in set(written) - kept:
        old, new = originals[i], copies[i]
        for a, b in zip(old, new) if isinstance(old, (list, tuple)) else [(old, new)]:
            if isinstance(a, Tensor) and a.device.type != "meta":
                a.copy_(b)
    return result


def in_layout_of(values: Tensor, like: Tensor) -> Tensor:
    """The values with the strides of a dense tensor."""
    return torch.empty_like(like).copy_(values)
