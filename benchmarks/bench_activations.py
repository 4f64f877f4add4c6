"""Activations against eager torch and torch.compile, forward and forward+backward.

Every op at 2^20 float32, and a chosen few over all sizes and dtypes; ``--full`` runs the cross
product. Rivals take turns within one test (see ``fusedtrain.advisor.bench.clock``).
"""

from __future__ import annotations

import torch

from benchmarks.harness.cases import Case, Options, dtype_name, joined
from benchmarks.harness.race import Race
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


def _rows(op: str, numel: int, dtype: torch.dtype, compiled: bool = False) -> list[Case]:
    return [
        Case(
            joined(op, part, dtype_name(dtype), numel), op, part, dtype, (numel,), contest,
            (op, numel), compiled=compiled,
        )
        for part in TENSORS
    ]  # fmt: skip


FIRST = [case for op in FIRST_OPS for case in _rows(op, FIRST_SIZE, torch.bfloat16)]


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
                    cases += _rows(op, numel, dtype, compiled)
    return cases


def test_activation(race: Race, case: Case) -> None:
    """One row of the results."""
    race.op(FAMILY, case)
