"""Rows: what a benchmark stores, and what a report reads back."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.harness.clock import setting
from benchmarks.harness.store import FAMILIES
from fusedtrain.advisor.bench import numbers

# A time this many times the best of its kind was taken on a busy machine. With both of two cores
# taken, each call of torch's thread pool waited for a time slice: 16 ms for a copy of 256 KB.
BUSY = 2.0
# At least, between two runs.
_PAUSE = timedelta(hours=6)
# Words on the memory in tables (clock.ALLOCATORS).
_MEMORY = {"": "", "bounded": "", "kept": ", freed memory kept", "default": ", glibc's own malloc"}


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of the samples of each."""
    return {name: statistics.median(values) for name, values in samples.items()}


def make_row(
    family: str,
    device: str,
    samples: Mapping[str, Sequence[float]],
    *,
    moved: float = 0,
    copied: float = 0,
    **extra: Any,
) -> dict[str, Any]:
    """One row of the results, from the samples of ``interleave``: "fusedtrain", the rivals, and
    copies where bandwidths are compared (see ``numbers``)."""
    return {
        "family": family,
        **extra,
        **setting(device),
        **numbers(samples, moved, copied),
        "ns_min": {name: min(values) for name, values in samples.items()},
    }


@dataclass(frozen=True)
class Row:
    """One benchmark: what all have, and in ``extra`` what the family adds (see README.md)."""

    dtype: str
    device: str
    device_type: str
    backend: str
    torch: str
    date: str
    threads: int
    ns: dict[str, float]
    ns_min: dict[str, float]
    ratio: dict[str, float]
    ratio_interval: dict[str, list[float]]
    family: str = "activations"
    op: str = ""
    model: str = ""  # the network
    layout: str = ""
    numel: int = 0
    allocator: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    noisy: bool = False  # the machine was too busy for this row to be quoted

    @classmethod
    def parse(cls, info: Mapping[str, Any]) -> Row:
        """From a result's ``extra_info``."""
        names = {f.name for f in fields(cls)}
        common = {name: value for name, value in info.items() if name in names}
        return cls(**common, extra={k: v for k, v in info.items() if k not in names})

    def __getitem__(self, name: str) -> Any:
        return self.extra[name]

    def get(self, name: str, default: Any) -> Any:
        """The family's own entry, or the default in rows that lack it."""
        return self.extra.get(name, default)

    @property
    def machine(self) -> str:
        """The device with all that must be equal for two rows to be compared."""
        threads = f", {self.threads} threads" if self.device_type == "cpu" else ""
        backend = "" if self.backend == "default" else f", {self.backend} backend"
        memory = _MEMORY.get(self.allocator, f", {self.allocator}")
        day = self.date[:10]
        return f"{self.device}{threads}{backend}{memory}, torch {self.torch}, {day}"

    def strongest(self, among: Collection[str] = ()) -> str | None:
        """The fastest rival (of these); None where all were left out."""
        names = [name for name in self.ratio if not among or name in among]
        return min(names, key=self.ratio.__getitem__, default=None)

    def loses_to(self, rival: str | None, tolerance: float) -> bool:
        """Whether the rival is faster by more than ``tolerance``, and surely so."""
        if rival not in self.ratio:
            return False
        return self.ratio_interval[rival][1] < 1 and self.ratio[rival] < 1 / (1 + tolerance)


def load(paths: Iterable[Path]) -> list[Row]:
    """The rows of JSON files."""
    rows: list[Row] = []
    for path in paths:
        infos = [entry["extra_info"] for entry in json.loads(path.read_text())["benchmarks"]]
        parsed = [Row.parse(info) for info in infos if "ratio" in info]
        began = {f: _runs([row.date for row in parsed if row.family == f]) for f in FAMILIES}
        rows += [replace(r, date=began[r.family][r.date]) for r in parsed if r.family in began]
    return _mark_noisy(rows)


def _runs(dates: Sequence[str]) -> dict[str, str]:
    """When the run of each date began: one run of a family has one date, also across midnight.
    Rows that were added on another day keep theirs."""
    began: dict[str, str] = {}
    first = last = ""
    for date in sorted(dates):
        if not last or datetime.fromisoformat(date) - datetime.fromisoformat(last) > _PAUSE:
            first = date
        began[date], last = first, date
    return began


def _mark_noisy(rows: Sequence[Row]) -> list[Row]:
    """Rows are noisy if fusedtrain was slow next to its own best, or the copy next to its best of
    the run: over the rows of one machine and size, where these are what is copied."""

    def copied(number: int, row: Row) -> Any:
        of_size = "copy_fresh" in row.ns
        return (row.machine, row.dtype, row.numel) if of_size else number

    best: dict[Any, float] = {}
    for number, row in enumerate(rows):
        size = copied(number, row)
        best[size] = min(best.get(size, math.inf), row.ns_min.get("copy", math.inf))
    return [
        replace(
            row,
            noisy=row.ns.get("copy", 0) > BUSY * best[copied(number, row)]
            or row.ns["fusedtrain"] > BUSY * row.ns_min["fusedtrain"],
        )
        for number, row in enumerate(rows)
    ]
