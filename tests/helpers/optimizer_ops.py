"""The three ops of the optimizers by backend, the steps they are tried with, and comparison."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_emulator
import fusedtrain
from fusedtrain.reference import optimizers
from helpers.activations import error
from helpers.backends import HAS_GPU, written_by
from helpers.optimizer_cases import BF16, F16, F32, F64, Case, specs_of
from helpers.optimizers import busy
from helpers.placed import call_placed
from helpers.triton_interpreter import round_to_nearest

NAMES = ("measure_gradients", "try_update", "optimizer_step")
ON_HOST = (9, 10)  # table and rows, of the arguments


def placed_on(device: str) -> SimpleNamespace:
    """The ops, from host memory to the device and back, whatever the alignment and the layout."""
    from fusedtrain.triton import OPS

    def op_of(name: str) -> Callable[..., Tensor]:
        written = written_by(name)
        return lambda *a: call_placed(OPS[name], device, a, written, ON_HOST).cpu()

    return SimpleNamespace(**{name: op_of(name) for name in NAMES})


def _cpu() -> Any:
    backend = fusedtrain.backend_info().backends["cpu"]
    if not backend.loaded:
        pytest.skip(backend.reason)
    return torch.ops.fusedtrain


def _triton() -> Any:
    """Interpreted, or on a GPU."""
    pytest.importorskip("triton", reason="triton is not installed")
    if HAS_GPU:
        return placed_on("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    from fusedtrain.triton import OPS

    round_to_nearest()
    return SimpleNamespace(**{name: OPS[name] for name in NAMES})


# The three ops, as namespaces.
BACKENDS: dict[str, Callable[[], Any]] = {
    "reference": lambda: optimizers, "cpu": _cpu, "triton": _triton
}  # fmt: skip


def _emulated() -> Any:
    if cuda_emulator.why_not():
        pytest.skip(cuda_emulator.why_not())
    emulator = cuda_emulator.load()
    calls = {name: lambda *a, n=name: emulator.call(n, *a) for name in NAMES}
    return SimpleNamespace(**calls, tolerance={**TOLERANCE, F32: 12.0})  # quotients, roots: 2 ULP


EVERY_BACKEND = {**BACKENDS, "emulated": _emulated}
# Eps of the dtype, relative to max(|x|, 1): sums of products with and without fused multiplies; a
# 16-bit number may be rounded the other way.
TOLERANCE = {F32: 8.0, F64: 8.0, F16: 1.0, BF16: 1.0}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {"measures": 2},
    "amp": {
        "scale": 512.0, "measures": 7, "max_norm": 3.0, "write_back": 1, "average_weight": 0.1,
    },
    "units": {
        "scale": 3.0, "measures": 7, "unit_factor": 0.3, "write_back": 1, "max_norm": 20.0,
        "stochastic": 1, "seed": 12345,
    },
    "trial": {
        "measures": 7, "trial": 1, "write_back": 2, "found_inf": 0.0, "average_weight": 0.9,
        "stochastic": 1, "seed": 12345,
    },
}  # fmt: skip


def case_of(rule: str, **step: Any) -> Case:
    groups = [busy(rule), busy(rule, lr=0.02, weight_decay=0.0, cautious=1, sign=-1)]
    return Case(rule, specs_of(rule), groups, **step)


def assert_close(case: Case, expected: Case) -> None:
    # Averages, too, whose own dtype may be float64.
    in_float = {
        f"averages[{row[-1]}]"
        for row, param in zip(case.rows.tolist(), case.params)
        if param.dtype != F64 and row[-1] >= 0 and case.averages[row[-1]].dtype == F64
    }
    for (name, ours), (_, theirs) in zip(case.written(), expected.written()):
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        actual = ours.float() if name in in_float else ours
        worst = error(actual[~same], theirs[~same])
        assert worst <= TOLERANCE[actual.dtype], f"{name} {ours.dtype}: {worst:.1f} eps"
        if ours.dtype in (F16, BF16) and ours.numel() > 100:
            assert (~same).sum() <= 2, f"{name} {ours.dtype}: {(~same).sum()} are rounded otherwise"


def step_alike(kernels: Any, case: Case) -> tuple[Tensor, Tensor]:
    """A step of the kernels and one of the reference from the same tensors; both sums."""
    expected = case.clone()
    theirs = optimizers.optimizer_step(*expected.arguments(), None, None)
    ours = kernels.optimizer_step(*case.arguments(), None, None)
    assert_close(case, expected)
    return ours, theirs


class Counted(TorchDispatchMode):
    """The names of all operators that torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))
