"""Helpers of the benchmarks' tests: a row measured in this process, and wrong contestants."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.race import Race, contest_of
from benchmarks.harness.rows import Row
from fusedtrain.advisor.bench.clock import Effort, cpu_clock

BRIEF = Effort(min_rounds=2, max_rounds=2, seconds=0.0, sample_ns=1.0)
STEADY = [1e6] * 9


def measured(bench: ModuleType, case: Any) -> Row:
    """The row that the family's test makes of the case, as a results file has it."""
    (test,) = (f for name, f in vars(bench).items() if name.startswith("test_"))
    race = Race(cpu_clock, BRIEF, "cpu")
    forget(bench)
    gc.freeze()  # else `interleave` collects the objects of all tests before it
    try:
        test(race, case)
    finally:
        forget(bench)
    row = Row.parse(json.loads(json.dumps(race.entry["extra_info"])))
    assert race.entry["stats"]["rounds"] == row["rounds"] == BRIEF.max_rounds
    assert (row.family, row.device_type) == (bench.FAMILY, "cpu")
    assert set(row.ratio) == set(row.ns) - {"fusedtrain", "copy", "copy_fresh"}
    assert all(time > 0 for time in row.ns.values())
    return row


def forget(bench: ModuleType) -> None:
    """Contestants that are kept: those of another test may be changed ones."""
    contest_of.cache_clear()
    for value in vars(bench).values():
        if hasattr(value, "cache_clear") and value.__module__ == bench.__name__:
            value.cache_clear()


def times(factor: float) -> list[float]:
    """Samples of a steady contestant."""
    return [factor * ns for ns in STEADY]


def write(path: Path, infos: Sequence[dict[str, Any]]) -> Path:
    """A file of results."""
    path.write_text(json.dumps({"benchmarks": [{"extra_info": info} for info in infos]}))
    return path


def cells(text: str, mark: str) -> list[str]:
    """Cells of the one line of a table that has the mark."""
    (line,) = (line for line in text.splitlines() if mark in line and "\u2502" in line)
    return [cell.strip() for cell in line.split("\u2502")[1:-1]]


class Off(torch.autograd.Function):
    """The identity with a gradient that is off by 2 %."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.02


def mistakes(right: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """Contestants that do almost what the right one does; all must be refused."""
    return {
        "output": lambda x, *rest: right(x, *rest) * 1.02,
        "gradient": lambda x, *rest: right(Off.apply(x), *rest),
        "sign": lambda x, *rest: -right(x, *rest),
        "nan": lambda x, *rest: right(x, *rest) * torch.nan,
        "dtype": lambda x, *rest: right(x, *rest).to(
            torch.float32 if x.dtype == torch.float64 else torch.float64
        ),
        "no graph": lambda x, *rest: right(x, *rest).detach(),
        "no gradient": lambda x, *rest: right(x.detach(), *rest) + 0 * x.sum(),
    }
