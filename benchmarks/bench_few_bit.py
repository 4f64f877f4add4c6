"""Activations that keep their derivative in few bits against exact ones: eager torch's,
fusedtrain's own (``save=None``) and torch.compile's. Rivals take turns within one test."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedtrain.functional as F
from benchmarks._guards import NotTheJob, admit, refuse_the_reference
from benchmarks._measure import (
    FORWARD_TOLERANCE,
    GRADIENT_TOLERANCE,
    Clock,
    Effort,
    ReplayClock,
    TensorFunction,
    dtype_name,
)
from benchmarks._race import PASSES, call_of, kept_bytes, race
from fusedtrain.reference import ACTIVATIONS

FAMILY = "few_bit"
BITS = ("q8", "q4", "q2")
SAVES = {"gelu": BITS, "silu": BITS, "mish": BITS, "hardswish": BITS, "relu": ("q1",)}
QUICK_SAVES = {"gelu": ("q8",), "relu": ("q1",)}
SIZES = (2**20, 2**24)
QUICK_SIZE = 2**16
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16, torch.float32),
}
GATE = 2**19  # elements that the gate looks at
BIAS = 0.005  # of the mean derivative: 4 times the noise that q2 leaves in 2^16 elements
REPLAY = ReplayClock()


@dataclass(frozen=True)
class Case:
    """One row."""

    op: str
    save: str
    numel: int
    dtype: torch.dtype
    pass_name: str
    compiled: bool

    @property
    def bits(self) -> int:
        return int(self.save[1:])

    def tensors(self) -> float:
        """Read and written at least: two and the codes, forward as backward."""
        each = 2 + self.bits / 8 / self.dtype.itemsize
        return each * (1 + (self.pass_name == "forward+backward"))

    def __str__(self) -> str:
        exponent = self.numel.bit_length() - 1
        return f"{self.op}-{self.save}-{self.pass_name}-{dtype_name(self.dtype)}-2^{exponent}"


def select(
    device: str = "cpu",
    *,
    full: bool = False,
    quick: bool = False,
    compiled: bool = True,
    ops: tuple[str, ...] = (),
) -> list[Case]:
    """The cases of a run; those of an activation together. torch.compile takes part in the first
    dtype, at the larger size; --full has it everywhere."""
    first = DTYPES[device][0]
    saves = QUICK_SAVES if quick and not ops else SAVES
    cases = []
    for numel in (QUICK_SIZE,) if quick else SIZES:
        for dtype in (first,) if quick else DTYPES[device]:
            rival = compiled and not quick and (full or (dtype == first and numel == SIZES[-1]))
            cases += [
                Case(op, save, numel, dtype, pass_name, rival)
                for op in saves
                if not ops or op in ops
                for save in saves[op]
                for pass_name in PASSES
            ]
    return cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    cases = select(
        option("--device"),
        full=option("--full"),
        quick=option("--quick"),
        compiled=not option("--no-compile"),
        ops=tuple(option("--op")),
    )
    metafunc.parametrize("case", [] if option("--model") else cases, ids=str)


@lru_cache(maxsize=1)
def _tensors(numel: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """The input, of which the errors are stated for N(0, 1), and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(numel, generator=generator).to(device, dtype) for _ in range(2))
    return x, gradient


def stated_error(op: str, save: str) -> tuple[float, float]:
    """Of the derivative, at most and rms: what the docstring says; none where it says nothing."""
    found = re.search(rf"{save} (0?\.\d+),\s+(0?\.\d+)", getattr(F, op).__doc__ or "")
    return (float(found[1]), float(found[2])) if found else (0.0, 0.0)


def check(
    op: str,
    function: TensorFunction,
    x: Tensor,
    gradient: Tensor,
    error: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Raise NotTheJob unless output and gradient are those of eager torch in float64, the gradient
    to within ``error`` of the derivative, at most and rms, and without bias."""
    exact_x = x.double().requires_grad_()
    exact_y = ACTIVATIONS[op].eager(exact_x)
    (want,) = torch.autograd.grad(exact_y, exact_x, gradient.double())
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    if (y.dtype, y.shape) != (x.dtype, x.shape):
        raise NotTheJob(f"returned {y.dtype}, {tuple(y.shape)}")
    # torch.compile makes a backward that can be repeated where the first call asks for it.
    (dx,) = torch.autograd.grad(y, leaf, gradient, retain_graph=True)
    tolerance = FORWARD_TOLERANCE[x.dtype]
    _within("output", y - exact_y, tolerance.atol + tolerance.rtol * exact_y.abs())
    tolerance, (most, rms) = GRADIENT_TOLERANCE[x.dtype], error
    weight, off = gradient.double(), dx - want
    allowed = most * weight.abs() + tolerance.atol * weight.abs().clamp(min=1)
    _within("gradient", off, allowed + tolerance.rtol * want.abs())
    if rms:
        rounding = torch.finfo(x.dtype).eps / 4 * want.norm()  # 0.21 eps of uniform mantissas
        limit = 1.1 * math.hypot(rms * weight.norm(), rounding)
        if not off.norm() <= limit:
            raise NotTheJob(f"wrong gradient: rms {float(off.norm() / limit):.2f} of what is right")
        bias = float((off * weight).mean() / (want * weight).mean())
        if not abs(bias) <= BIAS:
            raise NotTheJob(f"wrong gradient: the mean is off by {bias:.1%}")


def _within(what: str, off: Tensor, allowed: Tensor) -> None:
    worst = float((off.detach().abs() / allowed.detach()).nan_to_num(math.inf).max())
    if worst > 1:
        raise NotTheJob(f"wrong {what}: off by {worst:.2g} times what is allowed")


@lru_cache(maxsize=1)
def _rivals(
    op: str, numel: int, dtype: torch.dtype, device: str, compiled: bool
) -> dict[str, TensorFunction]:
    """The exact ones that passed the gate: of all rows of an activation, which compiles once."""
    x, gradient = _tensors(numel, dtype, device)
    eager = ACTIVATIONS[op].eager
    found: dict[str, TensorFunction] = {"eager": eager, "exact": getattr(F, op)}
    if compiled:
        torch.compiler.reset()
        found["compile"] = torch.compile(eager, fullgraph=True, dynamic=False)

    def gate(who: str, function: TensorFunction) -> None:
        few = None if who == "compile" else GATE  # it compiles for one size
        check(op, function, x[:few], gradient[:few])

    return admit(found, gate, f"{op}, {dtype_name(dtype)}, {numel}")


def _entrants(case: Case, device: str) -> dict[str, TensorFunction]:
    x, gradient = (t[:GATE] for t in _tensors(case.numel, case.dtype, device))
    ours: TensorFunction = partial(getattr(F, case.op), save=case.save)

    def gate(who: str, function: TensorFunction) -> None:
        check(case.op, function, x, gradient, stated_error(case.op, case.save))
        kept = kept_bytes(lambda: function(x.detach().requires_grad_()))
        if kept * 8 > case.bits * x.numel():
            raise NotTheJob(f"keeps {8 * kept / x.numel():.3g} bits an element, not {case.bits}")

    rivals = _rivals(case.op, case.numel, case.dtype, device, case.compiled)
    return {**admit({"fusedtrain": ours}, gate, str(case)), **rivals}


@pytest.mark.benchmark(timer=REPLAY)
def test_few_bit(benchmark: Any, clock: Clock, effort: Effort, device: str, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("few_bit", device)
    entrants = _entrants(case, device)
    if benchmark.disabled:
        benchmark.pedantic(lambda: None)
        return
    x, gradient = _tensors(case.numel, case.dtype, device)
    leaf = x.detach().requires_grad_()
    kept = {who: kept_bytes(partial(f, leaf)) / x.numel() for who, f in entrants.items()}
    benchmark.group = f"{dtype_name(case.dtype)} {case.numel} {case.pass_name}"
    race(
        benchmark,
        REPLAY,
        {who: call_of(f, case.pass_name, x, gradient) for who, f in entrants.items()},
        x,
        clock,
        effort,
        op=f"{case.op} {case.save}",
        pass_name=case.pass_name,
        tensors=case.tensors(),
        family=FAMILY,
        kept=kept,
    )
