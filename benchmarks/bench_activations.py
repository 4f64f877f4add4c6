"""Activations against eager torch and torch.compile, forward and forward+backward.

Every op at 2^20 float32, and a chosen few over all sizes and dtypes; ``--full`` runs the cross
product. Rivals take turns within one test (see ``fusedtrain.advisor.bench.clock``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.harness import ops
from benchmarks.harness.cases import Options, dtype_name
from benchmarks.harness.guards import admit
from benchmarks.harness.race import Race
from fusedtrain.advisor.bench.activations import CHOSEN, GATE, TENSORS, check, ours
from fusedtrain.advisor.bench.clock import Call, Function, compiled
from fusedtrain.reference import ACTIVATIONS

FAMILY = "activations"
REPORT = ops.report(FAMILY, chosen_by=("dtype", "numel"))
SIZES = tuple(2**power for power in (10, 16, 20, 23, 25))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUICK_OPS = ("mish", "relu")
# torch.compile builds a kernel per size, dtype and pass: 1 to 2 s each on the CPU.
COMPILED_SIZES = (2**20, 2**23)
# Unless --full: on the CPU float16 moves the bytes of bfloat16 and costs a quarter of the run.
CPU_FLOAT16_LIMIT = 2**23


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


def select(options: Options) -> list[Case]:
    """The cases of a run, grouped by size and dtype so that neighbours share their input."""
    if options.models and not options.ops:
        return []
    dtypes = DTYPES + ((torch.float64,) if options.float64 else ())
    cases = []
    for numel in SIZES:
        for dtype in dtypes:
            brief = options.device == "cpu" and dtype == torch.float16
            for op in filter(ACTIVATIONS.__contains__, options.ops or ACTIVATIONS):
                common = numel == 2**20 and dtype == torch.float32
                if options.quick:
                    quick = op in (options.ops or QUICK_OPS)
                    wanted = numel == 2**16 and dtype == torch.float32 and quick
                else:
                    chosen = op in CHOSEN and not (brief and numel > CPU_FLOAT16_LIMIT)
                    wanted = options.full or common or chosen
                rival = options.full or (op in CHOSEN and numel in COMPILED_SIZES and not brief)
                compiled = options.compiled and rival and not options.quick
                if wanted:
                    cases += [Case(numel, dtype, op, name, compiled) for name in TENSORS]
    return cases


@lru_cache(maxsize=1)
def _tensors(numel: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(numel, generator=generator).to(device, dtype) for _ in range(2))
    return x, gradient


@lru_cache(maxsize=1)
def _entrants(
    op: str, numel: int, dtype: torch.dtype, device: str, with_compile: bool
) -> dict[str, Function]:
    """Contestants that passed the gate, for both passes."""
    x, gradient = _tensors(numel, dtype, device)
    contestants: dict[str, Function] = {"fusedtrain": ours(op), "eager": ACTIVATIONS[op].eager}
    if with_compile:
        contestants["compile"] = compiled(ACTIVATIONS[op].eager)

    def gate(who: str, function: Function) -> None:
        few = None if who == "compile" else GATE  # it compiles for one size
        check(op, who, function, x[:few], gradient[:few])

    return admit(contestants, gate, f"{op}, {dtype_name(dtype)} on {device}")


def _call(function: Function, case: Case, x: Tensor, gradient: Tensor) -> Call:
    if case.pass_name == "forward":
        return lambda: function(x)
    leaf = x.detach().requires_grad_()
    return lambda: torch.autograd.grad(function(leaf), leaf, gradient)


def test_activation(race: Race, case: Case) -> None:
    """One row of the results."""
    entrants = _entrants(case.op, case.numel, case.dtype, race.device, case.compiled)
    if race.is_off:
        return
    x, gradient = _tensors(case.numel, case.dtype, race.device)
    race.tensors(
        {who: _call(function, case, x, gradient) for who, function in entrants.items()},
        x,
        family=FAMILY,
        op=case.op,
        pass_name=case.pass_name,
        tensors=TENSORS[case.pass_name],
    )
