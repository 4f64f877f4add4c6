"""Fused GELU: how much faster is one kernel than five operators?

Kernels are launches on a GPU, operators on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as T
from torch import Tensor

import fusedtrain.functional as F
from benchmarks.experiments.experiment import Row, Settings, timed
from benchmarks.harness.race import count_launches, count_ops
from fusedtrain.advisor.bench import call_of
from fusedtrain.advisor.bench.activations import check
from fusedtrain.advisor.bench.clock import Call, Function, compiled

GATE = 2**14  # elements that are compared with float64
PARTS = ("forward", "forward+backward")
EAGER, SCRIPTED, COMPILED = "five operators", "torch.jit.script", "torch.compile"


def composed(x: Tensor) -> Tensor:
    """As published; a division, erf, a sum and two products."""
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421356237309504880))


MAKERS: Mapping[str, Callable[[], Function]] = {
    EAGER: lambda: composed,
    SCRIPTED: lambda: torch.jit.script(composed),
    COMPILED: lambda: compiled(composed),
    "torch's gelu": lambda: T.gelu,
    "fusedtrain's gelu": lambda: F.gelu,
}


def contestants(
    settings: Settings, x: Tensor, gradient: Tensor
) -> tuple[dict[str, Function], dict[str, str]]:
    """Functions with right numbers, and why others are left out. Ours and eager must be right."""
    functions, left_out = {}, {}
    for who, make in MAKERS.items():
        if settings.quick and who == COMPILED:
            left_out[who] = "left out of a quick run: it compiles for seconds"
            continue
        few = None if who == COMPILED else GATE  # it compiles for one size
        try:
            function = make()
            for _ in range(3 if who == SCRIPTED else 1):  # it fuses in its third call
                check("gelu", "composition", function, x[:few], gradient[:few])
            functions[who] = function
        except Exception as error:
            if who not in (COMPILED, SCRIPTED):
                raise
            left_out[who] = f"left out: {type(error).__name__}: {error}".splitlines()[0]
    return functions, left_out


def _kernels(who: str, call: Call, settings: Settings) -> dict[str, float]:
    """Operators on the CPU are not seen within scripted and compiled functions."""
    if settings.device == "cuda":
        return {"kernels": float(count_launches(call))}
    return {} if who in (SCRIPTED, COMPILED) else {"kernels": float(count_ops(call))}


def rows(settings: Settings) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(settings.seed)
    elements = settings.pick(2**14, 2**22, 2**26)
    x, gradient = (torch.randn(elements, generator=generator).to(settings.device) for _ in range(2))
    functions, left_out = contestants(settings, x, gradient)
    for part in PARTS:
        calls = {who: call_of(f, part, [x], gradient) for who, f in functions.items()}
        times = timed(calls, settings, 40, 6.0, 5e6)
        for who, call in calls.items():
            numbers = {"ms": 1e3 * times.seconds(who), **_kernels(who, call, settings)}
            yield Row(f"{part}, {who}", {**numbers, **times.over(EAGER, who)})
        for who, note in left_out.items():
            yield Row(f"{part}, {who}", {}, note)
