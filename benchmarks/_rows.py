"""The rows of stored results: what a report and a chart are made from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

# "exact": fusedtrain's own, where what is compared is its few-bit one.
RIVALS = ("eager", "compile", "exact")
# Below this size a call's fixed cost decides: the target there is in microseconds, not percent.
LARGE = 2**20
# A time this many times the best of its kind was taken on a busy machine. With both of two cores
# taken, each call of torch's thread pool waited for a time slice: 16 ms for a copy of 256 KB.
BUSY = 2.0


# The families whose rows are of the kind below.
FAMILIES = ("activations", "batch_norm", "chains", "images", "few_bit", "pool")
# What a table says of the memory (_measure.ALLOCATORS).
_MEMORY = {"": "", "bounded": "", "kept": ", freed memory kept", "default": ", glibc's own malloc"}


def stored(cls: Any, info: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass in a row's ``extra_info``; older rows lack those with a default."""
    named = (f for f in fields(cls) if f.name in info or f.default is MISSING)
    return {f.name: info[f.name] for f in named}


class Contest:
    """What rows have that are compared with their strongest rival."""

    ns: dict[str, float]
    ns_min: dict[str, float]
    ratio: dict[str, float]
    ratio_interval: dict[str, list[float]]

    @property
    def strongest(self) -> str | None:
        """The fastest rival; None where all were left out."""
        return min(self.ratio, key=self.ratio.__getitem__, default=None)

    @property
    def noisy(self) -> bool:
        """The machine was too busy for this row to be quoted."""
        names = self.ns.keys() & {"copy", "fusedtrain"}
        return any(self.ns[name] > BUSY * self.ns_min[name] for name in names)

    def slower_than(self, tolerance: float) -> str | None:
        """The strongest rival, if it is surely faster by more than ``tolerance``."""
        best = self.strongest
        return best if best is not None and self._loses_to(best, tolerance) else None

    def is_slower(self, tolerance: float) -> bool:
        """Slower than it may be."""
        return self.slower_than(tolerance) is not None

    def _loses_to(self, rival: str, tolerance: float) -> bool:
        return self.ratio_interval[rival][1] < 1 and self.ratio[rival] < 1 / (1 + tolerance)


@dataclass(frozen=True)
class Row:
    """One benchmark: an op's pass on one dtype, size and device (see README.md)."""

    op: str
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
    pass_name: str = ""
    allocator: str = ""
    family: str = FAMILIES[0]
    shape: Sequence[int] = ()  # of images
    layout: str = ""
    model: str = ""  # the network that a batch norm is of
    kept: dict[str, float] | None = None  # bytes for backward, for each element of the input
    noisy: bool = False  # the machine was too busy for this row to be quoted

    @classmethod
    def parse(cls, info: dict[str, Any]) -> Row:
        """From a result's ``extra_info``."""
        return cls(**stored(cls, {**info, "pass_name": info["pass"]}))

    @property
    def machine(self) -> str:
        """The device with all that must be equal for two rows to be compared."""
        return machine_text(vars(self))

    @property
    def is_layer(self) -> bool:
        """One of several shapes that share a section."""
        return bool(self.model) or self.family == "pool"

    @property
    def name(self) -> str:
        """The op, with all that tells it from the others of its section."""
        size = "x".join(map(str, self.shape[1:])) if self.is_layer else ""
        return " ".join(filter(None, (self.op, size, self.layout)))

    @property
    def title(self) -> str:
        """What the rows of its section share, but for the machine."""
        if self.model:
            return f"{self.dtype}, the batch norms of {self.model}, batch {self.shape[0]}"
        if self.is_layer:
            return f"{self.dtype}, batch {self.shape[0]}"
        if self.shape:
            return f"{self.dtype}, {' x '.join(map(str, self.shape))}"
        return f"{self.dtype}, {size_text(self.numel)} elements"

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
    kind = setting["allocator"]
    memory = _MEMORY.get(kind, f", {kind}")
    return f"{setting['device']}{threads}{backend}{memory}, torch {setting['torch']}, {day}"


def load(paths: Iterable[Path]) -> list[Row]:
    """The rows of pytest-benchmark's JSON files, in a readable order."""
    rows: list[Row] = []
    for path in paths:
        entries = json.loads(path.read_text())["benchmarks"]
        infos = [entry["extra_info"] for entry in entries]
        infos = [i for i in infos if "gb_per_s" in i and i.get("family", FAMILIES[0]) in FAMILIES]
        found = [Row.parse(info) for info in infos]
        # One date for one run of a family, also across midnight.
        dates: dict[str, str] = {}
        for row in found:
            dates[row.family] = min(row.date, dates.get(row.family, row.date))
        rows += [replace(row, date=dates[row.family]) for row in found]
    rows.sort(key=lambda r: (*section_key(r), -r.numel, *r.shape[1:], r.op, r.layout, r.pass_name))
    return _mark_noisy(rows)


def _mark_noisy(rows: Sequence[Row]) -> list[Row]:
    """Of rows of one size and machine, those whose copy was slow next to the others' are noisy."""
    best: dict[tuple[str, str, int], float] = {}
    for row in rows:
        size = (row.machine, row.dtype, row.numel)
        best[size] = min(best.get(size, math.inf), row.ns_min["copy"])
    return [
        replace(
            row,
            noisy=row.ns["copy"] > BUSY * best[row.machine, row.dtype, row.numel]
            or row.ns["fusedtrain"] > BUSY * row.ns_min["fusedtrain"],
        )
        for row in rows
    ]


def section_key(row: Row) -> tuple[str, str, str, str, int]:
    """What the rows of one table share."""
    size = row.shape[0] if row.is_layer else row.numel  # the batch
    return row.machine, row.family, row.model, row.dtype, size


def size_text(numel: int) -> str:
    """``2^20`` for a power of two."""
    exponent = numel.bit_length() - 1
    return f"2^{exponent}" if numel == 2**exponent else str(numel)
