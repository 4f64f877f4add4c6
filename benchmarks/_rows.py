"""The rows of stored results: what a report and a chart are made from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

RIVALS = ("eager", "compile")
# Below this size a call's fixed cost decides: the target there is in microseconds, not percent.
LARGE = 2**20
# A time this many times the best of its kind was taken on a busy machine. With both of two cores
# taken, each call of torch's thread pool waited for a time slice: 16 ms for a copy of 256 KB.
BUSY = 2.0


@dataclass(frozen=True)
class Row:
    """One benchmark: an op's pass on one dtype, size and device (see README.md)."""

    op: str
    pass_name: str
    dtype: str
    numel: int
    device: str
    device_type: str
    backend: str
    torch: str
    date: str
    threads: int
    ns: dict[str, float]
    ns_min: dict[str, float]
    gb_per_s: dict[str, float]
    percent_of_copy: float
    percent_of_preallocated_copy: float
    ratio: dict[str, float]
    ratio_interval: dict[str, list[float]]
    noisy: bool = False  # the machine was too busy for this row to be quoted

    @classmethod
    def parse(cls, info: dict[str, Any]) -> Row:
        """From a result's ``extra_info``."""
        own = ("pass_name", "noisy")
        fields = {name: info[name] for name in cls.__dataclass_fields__ if name not in own}
        return cls(pass_name=info["pass"], **fields)

    @property
    def machine(self) -> str:
        """The device with all that must be equal for two rows to be compared."""
        return machine_text(vars(self))

    def is_slower(self, tolerance: float, overhead_us: float) -> bool:
        """Slower than eager by more than ``tolerance``, and surely so.

        Below 2^20 elements on the CPU, a difference within ``overhead_us`` is let pass.
        """
        if "eager" not in self.ratio:
            return False
        surely = self.ratio_interval["eager"][1] < 1
        slower = surely and self.ratio["eager"] < 1 / (1 + tolerance)
        if self.device_type == "cpu" and self.numel < LARGE:
            slower &= self.ns["fusedtrain"] - self.ns["eager"] > overhead_us * 1e3
        return slower


def machine_text(setting: Mapping[str, Any]) -> str:
    """The machine, in words, from ``_measure.setting``."""
    threads = f", {setting['threads']} threads" if setting["device_type"] == "cpu" else ""
    backend = "" if setting["backend"] == "default" else f", {setting['backend']} backend"
    day = setting["date"][:10]
    return f"{setting['device']}{threads}{backend}, torch {setting['torch']}, {day}"


def load(paths: Iterable[Path]) -> list[Row]:
    """The rows of pytest-benchmark's JSON files, in a readable order."""
    rows: list[Row] = []
    for path in paths:
        entries = json.loads(path.read_text())["benchmarks"]
        infos = [entry["extra_info"] for entry in entries]
        found = [Row.parse(i) for i in infos if "gb_per_s" in i and "family" not in i]
        # One date for one run, also across midnight.
        rows += [replace(row, date=min(r.date for r in found)) for row in found]
    rows.sort(key=lambda row: (*section_key(row), row.op, row.pass_name))
    return [row for _, members in groupby(rows, key=section_key) for row in _mark_noisy([*members])]


def _mark_noisy(section: Sequence[Row]) -> list[Row]:
    """Rows of one size: those whose copy was slow next to the others' are noisy."""
    best = min(row.ns_min["copy"] for row in section)
    return [
        replace(
            row,
            noisy=row.ns["copy"] > BUSY * best
            or row.ns["fusedtrain"] > BUSY * row.ns_min["fusedtrain"],
        )
        for row in section
    ]


def section_key(row: Row) -> tuple[str, str, int]:
    """What the rows of one table share."""
    return row.machine, row.dtype, row.numel


def size_text(numel: int) -> str:
    """``2^20`` for a power of two."""
    exponent = numel.bit_length() - 1
    return f"2^{exponent}" if numel == 2**exponent else str(numel)
