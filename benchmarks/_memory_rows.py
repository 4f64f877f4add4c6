"""The rows of memory in training: how they are stored, and how they are read back."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._measure import compare, setting
from benchmarks._networks import Setup
from benchmarks._rows import Contest, machine_text, stored

FAMILY = "memory"


def memory_row(
    setup: Setup,
    *,
    device: str,
    samples: Mapping[str, Sequence[float]],
    kept: Mapping[str, int],
    peak: Mapping[str, int],
    fits: Mapping[str, int],
) -> dict[str, Any]:
    """One row of the results. ``kept`` and ``peak``: bytes after a forward and at most in forward
    and backward; ``fits``: images of the largest batch whose peak is eager's at the most."""
    return {
        "family": FAMILY,
        "model": setup.model,
        "batch": setup.batch,
        "pixels": setup.pixels,
        "layout": setup.layout,
        "dtype": setup.dtype,
        **setting(device),
        "rounds": len(samples["fusedtrain"]),
        "ns": {name: statistics.median(values) for name, values in samples.items()},
        "ns_min": {name: min(values) for name, values in samples.items()},
        "kept": dict(kept),
        "peak": dict(peak),
        "fits": dict(fits),
        **compare(samples, samples.keys() - {"fusedtrain"}),
    }


@dataclass(frozen=True)
class MemoryRow(Contest):
    """One benchmark: a network in training (see README.md)."""

    model: str
    batch: int
    pixels: int
    layout: str
    dtype: str
    device: str
    device_type: str
    backend: str
    torch: str
    date: str
    threads: int
    allocator: str
    ns: dict[str, float]
    ns_min: dict[str, float]
    kept: dict[str, int]
    peak: dict[str, int]
    fits: dict[str, int]
    ratio: dict[str, float]
    ratio_interval: dict[str, list[float]]

    @classmethod
    def parse(cls, info: dict[str, Any]) -> MemoryRow:
        """From a result's ``extra_info``."""
        return cls(**stored(cls, info))

    @property
    def machine(self) -> str:
        """The device with all that must be equal for two rows to be compared."""
        return machine_text(vars(self))

    @property
    def numel(self) -> int:
        """Of the images."""
        return self.batch * 3 * self.pixels**2

    @property
    def name(self) -> str:
        """The network and its input."""
        return f"{self.model} {self.batch} x {self.pixels}² {self.layout} {self.dtype}"

    def is_slower(self, tolerance: float) -> bool:
        """Recomputing takes time by design: 10 % more than keeping everything is its limit."""
        del tolerance
        return self.ratio["store"] < 1 / 1.1


def load(paths: Iterable[Path]) -> list[MemoryRow]:
    """The rows of memory in pytest-benchmark's JSON files, in a readable order."""
    rows: list[MemoryRow] = []
    for path in paths:
        infos = [entry["extra_info"] for entry in json.loads(path.read_text())["benchmarks"]]
        found = [MemoryRow.parse(i) for i in infos if i.get("family") == FAMILY]
        # One date for one run, also across midnight.
        rows += [replace(row, date=min(r.date for r in found)) for row in found]
    rows.sort(key=lambda row: (row.machine, row.model, row.layout))
    return rows
