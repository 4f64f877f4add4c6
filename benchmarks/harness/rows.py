"""Rows: what a benchmark stores of times, machine and day, and what a report reads back."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.store import FAMILIES
from fusedtrain.advisor.bench import numbers
from fusedtrain.advisor.bench.clock import device_name

# A time this many times the best of its kind was taken on a busy machine. With both of two cores
# taken, each call of torch's thread pool waited for a time slice: 16 ms for a copy of 256 KB.
BUSY = 2.0
# Policies of glibc for freed memory, and the environment that a process needs for each.
# "bounded": buffers up to 32 MiB are reused. Left alone, glibc decides by the history of the
# process whether a buffer of some MiB is reused or mapped anew: at 2^20 float32 numbers that is
# 70 us against 600 us, for whichever side it hits. "kept": all are reused, whatever their size; a
# layer's 38 MB mapped anew cost more in page faults than in arithmetic.
ALLOCATORS = {
    "bounded": {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)},
    "kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"},
}
# Words on the memory in tables.
_MEMORY = {"": "", "bounded": "", "kept": ", freed memory kept", "default": ", glibc's own malloc"}


def setting(device: str) -> dict[str, Any]:
    """Data of the machine and the day, for a row."""
    return {
        "device": device_name(device),
        "device_type": device,
        "backend": os.environ.get("FUSEDTRAIN_BACKEND", "default"),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "allocator": allocator() if device == "cpu" else "",
        **({"nvml": nvml()} if device == "cuda" else {}),
    }


def nvml() -> dict[str, float]:
    """Clock of the multiprocessors, power and temperature right behind a row; empty without
    nvidia-ml-py."""
    with contextlib.suppress(Exception):  # of several kinds: the driver may refuse any question
        return {
            "sm_mhz": torch.cuda.clock_rate(),
            "watts": torch.cuda.power_draw() / 1e3,
            "celsius": torch.cuda.temperature(),
        }
    return {}


def allocator() -> str:
    """The name in ``ALLOCATORS`` that this process runs with; "default" without any setting."""
    for name, settings in ALLOCATORS.items():
        if settings.items() <= dict(os.environ).items():
            return name
    others = sorted(name for name in os.environ if name.startswith("MALLOC_"))
    return f"with {', '.join(others)}" if others else "default"


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


def load(paths: Iterable[Path]) -> list[Row]:
    """The rows of JSON files."""
    rows: list[Row] = []
    for path in paths:
        infos = [entry["extra_info"] for entry in json.loads(path.read_text())["benchmarks"]]
        parsed = (Row.parse(info) for info in infos if "ratio" in info)
        rows += [row for row in parsed if row.family in FAMILIES]
    return _mark_noisy(rows)


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
