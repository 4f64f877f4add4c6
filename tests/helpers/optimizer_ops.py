"""The three ops of the optimizers by backend, the steps they are tried with, and comparison."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from fusedtrain.reference import optimizers
from helpers.activations import error
from helpers.backends import BACKENDS as KERNELS, call_placed, written_by
from helpers.optimizer_cases import BF16, F16, F32, F64, Case, specs_of
from helpers.optimizers import busy

NAMES = ("measure_gradients", "try_update", "optimizer_step")
ON_HOST = (9, 10)  # table and rows, of the arguments


def placed_on(device: str) -> SimpleNamespace:
    """The ops, from host memory to the device and back, whatever the alignment and the layout."""
    from fusedtrain.triton import OPS

    def op_of(name: str) -> Callable[..., Tensor]:
        written = written_by(name)
        return lambda *a: call_placed(OPS[name], device, a, written, ON_HOST).cpu()

    return SimpleNamespace(**{name: op_of(name) for name in NAMES})


def _ops_of(backend: str) -> Any:
    """The three ops, as a namespace."""
    kernels = KERNELS[backend]()
    if kernels.device == "cuda":
        return placed_on("cuda")
    if backend == "emulated":
        kernels.orders = ("forward",)
    calls = {name: partial(kernels.run, name) for name in NAMES}
    return SimpleNamespace(**calls, is_reference=backend == "reference")


BACKENDS: dict[str, Callable[[], Any]] = {
    name: partial(_ops_of, name) for name in ("reference", "cpu", "triton")
}


def _emulated() -> Any:
    ops = _ops_of("emulated")
    ops.tolerance = {**TOLERANCE, F32: 12.0}  # quotients, roots: 2 ULP
    return ops


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
