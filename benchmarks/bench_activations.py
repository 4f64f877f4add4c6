"""Activations against eager torch and torch.compile, forward and forward+backward.

Every op at 2^20 float32, and a chosen few over all sizes and dtypes; ``--full`` runs the cross
product. Rivals take turns within one test (see ``_measure.interleave``).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks._measure import (
    TENSOR_PASSES,
    Call,
    Clock,
    Effort,
    PointwiseOp,
    ReplayClock,
    TensorFunction,
    dtype_name,
)
from benchmarks._race import race
from fusedtrain import functional
from fusedtrain.reference import ACTIVATIONS

if TYPE_CHECKING:
    from benchmarks.conftest import Gate

SIZES = tuple(2**power for power in (10, 16, 20, 23, 25))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One of each kind: native and composed in eager torch, saving the input and saving the output,
# with exp and without.
CHOSEN = (
    "mish",
    "silu",
    "gelu",
    "quick_gelu",
    "leaky_relu",
    "hardswish",
    "elu",
    "softplus",
    "relu_squared",
)
QUICK_OPS = ("mish", "relu")
# torch.compile builds a kernel per size, dtype and pass: 1 to 2 s each on the CPU.
COMPILED_SIZES = (2**20, 2**23)
# Unless --full: on the CPU float16 moves the bytes of bfloat16 and costs a quarter of the run.
CPU_FLOAT16_LIMIT = 2**23
REPLAY = ReplayClock()


@dataclass(frozen=True)
class Case:
    """One row: its rivals share the input and the measurement loop."""

    numel: int
    dtype: torch.dtype
    op: str
    pass_name: str
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.op}-{self.pass_name}-{dtype_name(self.dtype)}-{self.numel}"


def select(
    device: str = "cpu",
    *,
    full: bool = False,
    quick: bool = False,
    float64: bool = False,
    compiled: bool = True,
    ops: tuple[str, ...] = (),
) -> list[Case]:
    """The cases of a run, grouped by size and dtype so that neighbours share their input."""
    dtypes = DTYPES + ((torch.float64,) if float64 else ())
    cases = []
    for numel in SIZES:
        for dtype in dtypes:
            brief = device == "cpu" and dtype == torch.float16
            for op in filter(ACTIVATIONS.__contains__, ops) if ops else ACTIVATIONS:
                common = numel == 2**20 and dtype == torch.float32
                if quick:
                    wanted = numel == 2**16 and dtype == torch.float32 and op in (ops or QUICK_OPS)
                else:
                    chosen = op in CHOSEN and not (brief and numel > CPU_FLOAT16_LIMIT)
                    wanted = full or common or chosen
                rival = full or (op in CHOSEN and numel in COMPILED_SIZES and not brief)
                if wanted:
                    cases += [
                        Case(numel, dtype, op, pass_name, compiled and rival and not quick)
                        for pass_name in TENSOR_PASSES
                    ]
    return cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    cases = select(
        option("--device"),
        full=option("--full"),
        quick=option("--quick"),
        float64=option("--float64"),
        compiled=not option("--no-compile"),
        ops=tuple(option("--op")),
    )
    if option("--model") and not option("--op"):
        cases = []
    metafunc.parametrize("case", cases, ids=str)


def _op(name: str) -> PointwiseOp:
    """The activation with its example parameters."""
    row = ACTIVATIONS[name]
    if name == "gelu_tanh":
        return PointwiseOp(name, lambda x: functional.gelu(x, approximate="tanh"), row.eager)
    function = getattr(functional, name)
    return PointwiseOp(name, lambda x: function(x, *row.arguments_for(x)), row.eager)


@lru_cache(maxsize=1)
def _tensors(numel: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(numel, generator=generator).to(device, dtype)
    gradient = torch.randn(numel, generator=generator).to(device, dtype)
    return x, gradient


def _call(function: TensorFunction, case: Case, x: torch.Tensor, gradient: torch.Tensor) -> Call:
    if case.pass_name == "forward":
        return lambda: function(x)
    leaf = x.detach().requires_grad_()
    return lambda: torch.autograd.grad(function(leaf), leaf, gradient)


def _compiled(function: TensorFunction) -> TensorFunction:
    # Dynamo keeps at most 8 variants of one function; rows must not meet that limit.
    torch.compiler.reset()
    compiled: TensorFunction = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled


@pytest.mark.benchmark(timer=REPLAY)
def test_activation(
    benchmark: Any, gate: Gate, clock: Clock, effort: Effort, device: str, case: Case
) -> None:
    """One row of the results."""
    op = _op(case.op)
    gate(op, case.dtype)
    if benchmark.disabled:
        benchmark.pedantic(op.function, args=(torch.ones(1, dtype=case.dtype, device=device),))
        return
    x, gradient = _tensors(case.numel, case.dtype, device)
    calls: dict[str, Call] = {
        "fusedtrain": _call(op.function, case, x, gradient),
        "eager": _call(op.eager, case, x, gradient),
    }
    if case.compiled:
        compiled = _call(_compiled(op.eager), case, x, gradient)
        try:
            compiled()
        except Exception as error:
            warnings.warn(f"{case}: no torch.compile rival: {error}", stacklevel=1)
        else:
            calls["compile"] = compiled
    benchmark.group = f"{dtype_name(case.dtype)} {case.numel} {case.pass_name}"
    race(benchmark, REPLAY, calls, x, clock, effort, op=case.op, pass_name=case.pass_name)
