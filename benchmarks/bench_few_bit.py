"""Activations that keep their derivative in few bits against exact ones: eager torch's,
fusedtrain's own (``save=None``) and torch.compile's. Rivals take turns within one test."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

import fusedtrain.functional as F
from benchmarks.harness.cases import Options, Work, dtype_name
from benchmarks.harness.guards import refuse_the_reference
from benchmarks.harness.race import PASSES, Race, call_of
from fusedtrain._graph.kept import kept_bytes
from fusedtrain.advisor.bench import COMPILE, EAGER, OURS, Contest
from fusedtrain.advisor.bench.clock import Function, compiled
from fusedtrain.advisor.bench.gate import (
    FORWARD,
    GRADIENT,
    NotTheJob,
    Tolerance,
    agrees,
    first_call,
)
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


FIRST = [Case("gelu", "q4", 2**27, torch.bfloat16, name, False) for name in PASSES[:2]]


def select(options: Options) -> list[Case]:
    """The cases of a run; those of an activation together. torch.compile takes part in the first
    dtype, at the larger size; --full has it everywhere."""
    if options.models:
        return []
    dtypes = DTYPES[options.device]
    saves = QUICK_SAVES if options.quick and not options.ops else SAVES
    cases = []
    for numel in (QUICK_SIZE,) if options.quick else SIZES:
        for dtype in dtypes[:1] if options.quick else dtypes:
            rival = options.full or (dtype == dtypes[0] and numel == SIZES[-1])
            compiled = options.compiled and not options.quick and rival
            cases += [
                Case(op, save, numel, dtype, pass_name, compiled)
                for op in saves
                if options.wants(op)
                for save in saves[op]
                for pass_name in PASSES
            ]
    return cases


@lru_cache(maxsize=1)
def _tensors(numel: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """The input, of which the errors are stated for N(0, 1), and the gradient of the output."""
    work = Work(device, dtype)
    return work.random(numel), work.random(numel, seed=1)


def stated_error(op: str, save: str) -> tuple[float, float]:
    """The derivative's maximal and rms error by the docstring; zeros where it states none."""
    match = re.search(rf"{save} (0?\.\d+),\s+(0?\.\d+)", getattr(F, op).__doc__ or "")
    return (float(match[1]), float(match[2])) if match else (0.0, 0.0)


def check(
    op: str,
    function: Function,
    x: Tensor,
    gradient: Tensor,
    error: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Raise NotTheJob unless output and gradient are those of eager torch in float64, the gradient
    to within ``error`` of the derivative, at most and rms, and without bias."""
    exact, want = first_call(ACTIVATIONS[op].eager, [x.double()], gradient.double())
    y, dx = first_call(function, [x], gradient)
    agrees("output", y, exact, FORWARD[x.dtype])
    (rtol, atol, _), (most, rms) = GRADIENT[x.dtype], error
    weight, off = gradient.double(), dx - want
    allowed = most * weight.abs() + atol * weight.abs().clamp(min=1)
    agrees("gradient", dx, want, Tolerance(rtol, allowed))
    if rms:
        rounding = torch.finfo(x.dtype).eps / 4 * want.norm()  # 0.21 eps of uniform mantissas
        limit = 1.1 * math.hypot(rms * weight.norm(), rounding)
        if not off.norm() <= limit:
            raise NotTheJob(f"wrong gradient: rms {float(off.norm() / limit):.2f} of what is right")
        bias = float((off * weight).mean() / (want * weight).mean())
        if not abs(bias) <= BIAS:
            raise NotTheJob(f"wrong gradient: the mean is off by {bias:.1%}")


@lru_cache(maxsize=1)
def _rivals(op: str, numel: int, dtype: torch.dtype, device: str, with_compile: bool) -> Contest:
    """The exact ones: of all rows of an activation, which compiles once."""
    x, gradient = _tensors(numel, dtype, device)
    eager = ACTIVATIONS[op].eager
    functions: dict[str, Function] = {EAGER: eager, "exact": getattr(F, op)}
    if with_compile:
        functions[COMPILE] = compiled(eager)

    def gate(who: str, function: Function) -> None:
        few = None if who == COMPILE else GATE  # it compiles for one size
        check(op, function, x[:few], gradient[:few])

    return Contest(functions, gate, partial(call_of, x=x, gradient=gradient), lambda _: 0, x)


def contest(case: Case, device: str) -> Contest:
    """fusedtrain's function and the exact ones."""
    exact = _rivals(case.op, case.numel, case.dtype, device, case.compiled)
    x, gradient = (t[:GATE] for t in _tensors(case.numel, case.dtype, device))

    def gate(who: str, function: Function) -> None:
        if who != OURS:
            exact.gate(who)
            return
        check(case.op, function, x, gradient, stated_error(case.op, case.save))
        kept = kept_bytes(lambda: function(x.detach().requires_grad_()))
        if kept * 8 > case.bits * x.numel():
            raise NotTheJob(f"keeps {8 * kept / x.numel():.3g} bits an element, not {case.bits}")

    functions = {OURS: partial(getattr(F, case.op), save=case.save), **exact.functions}
    moved = case.tensors() * exact.source.nbytes
    return Contest(functions, gate, exact.call, lambda _: moved, exact.source)


def test_few_bit(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("few_bit", race.device)
    made = contest(case, race.device)
    leaf = made.source.detach().requires_grad_()
    race.match(
        made,
        case.pass_name,
        str(case),
        family=FAMILY,
        op=f"{case.op} {case.save}",
        kept={who: partial(function, leaf) for who, function in made.functions.items()},
    )
