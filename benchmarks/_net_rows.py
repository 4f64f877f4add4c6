"""The rows of whole networks: how they are stored, and how they are read back."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._measure import compare, setting
from benchmarks._networks import JOBS, Setup
from benchmarks._rows import Contest, machine_text, stored

FAMILY = "conv_bn"


def net_row(
    setup: Setup,
    *,
    device: str,
    samples: Mapping[str, Sequence[float]],
    saved: Mapping[str, int],
    note: str,
    errors: Mapping[str, float],
) -> dict[str, Any]:
    """One row of the results, from the samples of ``interleave``.

    ``saved``: bytes kept for backward; ``note``: what fusedtrain changed; ``errors``: how far it
    was from float64.
    """
    return {
        "family": FAMILY,
        **vars(setup),
        **setting(device),
        "rounds": len(samples["fusedtrain"]),
        "ns": {name: statistics.median(values) for name, values in samples.items()},
        "ns_min": {name: min(values) for name, values in samples.items()},
        "saved": dict(saved),
        "note": note,
        "errors": dict(errors),
        **compare(samples, samples.keys() - {"fusedtrain"}),
    }


@dataclass(frozen=True)
class NetRow(Contest):
    """One benchmark: a job with a network (see README.md)."""

    job: str
    model: str
    batch: int
    pixels: int
    layout: str
    dtype: str
    optimizer: str
    device: str
    device_type: str
    backend: str
    torch: str
    date: str
    threads: int
    allocator: str
    ns: dict[str, float]
    ns_min: dict[str, float]
    saved: dict[str, int]
    note: str
    errors: dict[str, float]
    ratio: dict[str, float]
    ratio_interval: dict[str, list[float]]

    @classmethod
    def parse(cls, info: dict[str, Any]) -> NetRow:
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
        step = "" if self.job == "inference" else f" {self.optimizer}"
        return f"{self.model} {self.batch} x {self.pixels}² {self.layout} {self.dtype}{step}"


def load(paths: Iterable[Path]) -> list[NetRow]:
    """The rows of networks in pytest-benchmark's JSON files, in a readable order."""
    rows: list[NetRow] = []
    for path in paths:
        infos = [entry["extra_info"] for entry in json.loads(path.read_text())["benchmarks"]]
        found = [NetRow.parse(i) for i in infos if i.get("family") == FAMILY]
        # One date for one run, also across midnight.
        rows += [replace(row, date=min(r.date for r in found)) for row in found]
    jobs = list(JOBS)
    rows.sort(key=lambda row: (row.machine, jobs.index(row.job)))
    return rows
