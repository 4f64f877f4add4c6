"""Activations against eager torch and torch.compile, forward and forward+backward.

Every op at 2^20 float32, and a chosen few over all sizes and dtypes; ``--full`` runs the cross
product. Rivals take turns within one test (see ``fusedtrain.advisor.bench.clock``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from benchmarks.harness.cases import Options, Work, dtype_name
from benchmarks.harness.race import Race
from fusedtrain.advisor.bench import Contest
from fusedtrain.advisor.bench.activations import CHOSEN, TENSORS, contest
from fusedtrain.reference import ACTIVATIONS

FAMILY = "activations"
SIZES = tuple(2**power for power in (10, 16, 20, 23, 25))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUICK_OPS = ("mish", "relu")
FIRST_OPS, FIRST_SIZE = ("relu", "silu", "gelu", "mish", "prelu"), 2**27
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


FIRST = [Case(FIRST_SIZE, torch.bfloat16, op, part) for op in FIRST_OPS for part in TENSORS]


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
def _contest(op: str, numel: int, dtype: torch.dtype, device: str, with_compile: bool) -> Contest:
    """Both passes."""
    return contest(Work(device, dtype, compiled=with_compile), op, numel)


def test_activation(race: Race, case: Case) -> None:
    """One row of the results."""
    race.match(
        _contest(case.op, case.numel, case.dtype, race.device, case.compiled),
        case.pass_name,
        f"{case.op}, {dtype_name(case.dtype)} on {race.device}",
        family=FAMILY,
        op=case.op,
    )
