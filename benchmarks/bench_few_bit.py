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
from benchmarks.harness import ops
from benchmarks.harness.cases import Options, dtype_name
from benchmarks.harness.guards import admit, refuse_the_reference
from benchmarks.harness.race import PASSES, Race, call_of
from fusedtrain._graph.kept import kept_bytes
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
REPORT = ops.report(FAMILY)
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
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(numel, generator=generator).to(device, dtype) for _ in range(2))
    return x, gradient


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
def _rivals(
    op: str, numel: int, dtype: torch.dtype, device: str, with_compile: bool
) -> dict[str, Function]:
    """The exact ones that passed the gate: of all rows of an activation, which compiles once."""
    x, gradient = _tensors(numel, dtype, device)
    eager = ACTIVATIONS[op].eager
    contestants: dict[str, Function] = {"eager": eager, "exact": getattr(F, op)}
    if with_compile:
        contestants["compile"] = compiled(eager)

    def gate(who: str, function: Function) -> None:
        few = None if who == "compile" else GATE  # it compiles for one size
        check(op, function, x[:few], gradient[:few])

    return admit(contestants, gate, f"{op}, {dtype_name(dtype)}, {numel}")


def _entrants(case: Case, device: str) -> dict[str, Function]:
    x, gradient = (t[:GATE] for t in _tensors(case.numel, case.dtype, device))
    ours: Function = partial(getattr(F, case.op), save=case.save)

    def gate(who: str, function: Function) -> None:
        check(case.op, function, x, gradient, stated_error(case.op, case.save))
        kept = kept_bytes(lambda: function(x.detach().requires_grad_()))
        if kept * 8 > case.bits * x.numel():
            raise NotTheJob(f"keeps {8 * kept / x.numel():.3g} bits an element, not {case.bits}")

    rivals = _rivals(case.op, case.numel, case.dtype, device, case.compiled)
    return {**admit({"fusedtrain": ours}, gate, str(case)), **rivals}


def test_few_bit(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("few_bit", race.device)
    entrants = _entrants(case, race.device)
    if race.is_off():
        return
    x, gradient = _tensors(case.numel, case.dtype, race.device)
    leaf = x.detach().requires_grad_()
    race.tensors(
        {who: call_of(f, case.pass_name, x, gradient) for who, f in entrants.items()},
        x,
        family=FAMILY,
        op=f"{case.op} {case.save}",
        pass_name=case.pass_name,
        tensors=case.tensors(),
        kept={who: kept_bytes(partial(f, leaf)) / x.numel() for who, f in entrants.items()},
    )
