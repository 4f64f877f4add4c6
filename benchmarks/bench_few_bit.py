"""Activations that keep their derivative in few bits against exact ones: eager torch's,
fusedtrain's own (``save=None``) and torch.compile's. Rivals take turns within one test."""

from __future__ import annotations

import math
import re
from functools import lru_cache, partial

import torch
from torch import Tensor

import fusedtrain.functional as F
from benchmarks.harness.cases import PASSES, Case, Options, Work, dtype_name, grid, joined
from benchmarks.harness.race import Race
from fusedtrain._graph.kept import kept_bytes
from fusedtrain.advisor.bench import COMPILE, OURS, Contest, call_of, duel
from fusedtrain.advisor.bench.clock import Function
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


def _row(numel: int, dtype: torch.dtype, op: str, save: str, part: str) -> Case:
    name = joined(op, save, part, dtype_name(dtype), f"2^{numel.bit_length() - 1}")
    arguments, label = (op, save, numel), f"{op} {save}"
    return Case(name, op, part, dtype, (numel,), contest, arguments, label, kept=True)


def select(options: Options) -> list[Case]:
    """The cases of a run; those of an activation together."""
    saves = QUICK_SAVES if options.quick and not options.ops else SAVES
    choices = [(op, save, part) for op in saves for save in saves[op] for part in PASSES]
    sizes = (QUICK_SIZE,) if options.quick else SIZES
    return grid(options, _row, sizes, DTYPES[options.device], choices)


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
def _rivals(work: Work, op: str, numel: int) -> tuple[Contest, Tensor]:
    """The exact ones, of all rows of an activation, which compiles once; and the gradient of the
    output. The errors are stated for inputs of N(0, 1)."""
    x, gradient = work.random(numel), work.random(numel, seed=1)

    def gate(who: str, function: Function) -> None:
        few = None if who == COMPILE else GATE  # it compiles for one size
        check(op, function, x[:few], gradient[:few])

    functions = duel(work, getattr(F, op), ACTIVATIONS[op].eager)
    functions["exact"] = functions.pop(OURS)
    call = partial(call_of, tensors=[x], gradient=gradient, trains=True)
    return Contest(functions, gate, call, lambda _: 0, x), gradient


def tensors(save: str, part: str, dtype: torch.dtype) -> float:
    """Tensors read and written at least: two and the codes, forward as backward."""
    each = 2 + int(save[1:]) / 8 / dtype.itemsize
    return each * (1 + (part == "forward+backward"))


def contest(work: Work, op: str, save: str, numel: int) -> Contest:
    """fusedtrain's function and the exact ones."""
    exact, gradient = _rivals(work, op, numel)
    x = exact.source

    def gate(who: str, function: Function) -> None:
        if who != OURS:
            exact.gate(who)
            return
        few = x[:GATE]
        check(op, function, few, gradient[:GATE], stated_error(op, save))
        kept = kept_bytes(lambda: function(few.detach().requires_grad_()))
        if kept * 8 > int(save[1:]) * few.numel():
            raise NotTheJob(f"keeps {8 * kept / few.numel():.3g} bits an element, not {save[1:]}")

    def moved(part: str) -> float:
        return tensors(save, part, work.dtype) * x.nbytes

    functions = {OURS: partial(getattr(F, op), save=save), **exact.functions}
    return Contest(functions, gate, exact.call, moved, x)


FIRST = [_row(2**27, torch.bfloat16, "gelu", "q4", name) for name in PASSES[:2]]


def test_few_bit(race: Race, case: Case) -> None:
    """One row of the results."""
    race.op(FAMILY, case, kernel="few_bit")
