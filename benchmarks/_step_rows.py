"""The rows of the AMP step: how they are stored, and how they are read back."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks._contestants import JOBS, KINDS, RULES
from benchmarks._measure import compare, setting
from benchmarks._parameter_lists import MODELS
from benchmarks._rows import Contest, machine_text, stored

FAMILY = "amp_step"
R = TypeVar("R", bound="StepRow")


def step_row(
    *,
    model: str,
    op: str,
    job: str,
    kind: str,
    numel: int,
    tensors: int,
    device: str,
    moved: int,
    copied: int,
    samples: Mapping[str, Sequence[float]],
    host: Mapping[str, Sequence[float]],
    counts: Mapping[str, int],
    family: str = FAMILY,
) -> dict[str, Any]:
    """One row of the results, from the samples of ``interleave``.

    ``samples`` has "fusedtrain", the rivals, and "copy", which moves ``copied`` bytes (read and
    written); the job moves ``moved``. ``host`` has the same calls on one element a tensor,
    ``counts`` their kernel launches (CUDA) or dispatched ops (CPU).
    """
    ns = {name: statistics.median(values) for name, values in samples.items()}
    gb_per_s = {n: (copied if n == "copy" else moved) / time_ns for n, time_ns in ns.items()}
    return {
        "family": family,
        "op": op,
        "job": job,
        "model": model,
        "dtype": kind,
        "numel": numel,
        "tensors": tensors,
        **setting(device),
        "rounds": len(samples["fusedtrain"]),
        "ns": ns,
        "ns_min": {name: min(values) for name, values in samples.items()},
        "host_ns": {name: statistics.median(values) for name, values in host.items()},
        "counts": dict(counts),
        "bytes": moved,
        "gb_per_s": gb_per_s,
        "percent_of_copy": 100 * gb_per_s["fusedtrain"] / gb_per_s["copy"],
        **compare(samples, ns.keys() - {"fusedtrain", "copy"}),
    }


@dataclass(frozen=True)
class StepRow(Contest):
    """One benchmark: an optimizer's job on the parameters of a network (see README.md)."""

    op: str
    job: str
    model: str
    dtype: str
    numel: int
    tensors: int
    device: str
    device_type: str
    backend: str
    torch: str
    date: str
    threads: int
    ns: dict[str, float]
    ns_min: dict[str, float]
    host_ns: dict[str, float]
    counts: dict[str, int]
    bytes: int
    gb_per_s: dict[str, float]
    percent_of_copy: float
    ratio: dict[str, float]
    ratio_interval: dict[str, list[float]]
    allocator: str = ""

    @classmethod
    def parse(cls: type[R], info: dict[str, Any]) -> R:
        """From a result's ``extra_info``."""
        return cls(**stored(cls, info))

    @property
    def machine(self) -> str:
        """The device with all that must be equal for two rows to be compared."""
        return machine_text(vars(self))

    @property
    def bytes_per_parameter(self) -> int:
        """What the job has to read and write at least."""
        return round(self.bytes / self.numel)


def section_key(row: StepRow) -> tuple[str, str, str]:
    """What the rows of one table share."""
    return row.machine, row.model, row.dtype


def read(paths: Iterable[Path], family: str, kind: type[R]) -> list[R]:
    """The rows of a family in pytest-benchmark's JSON files."""
    rows: list[R] = []
    for path in paths:
        infos = [entry["extra_info"] for entry in json.loads(path.read_text())["benchmarks"]]
        found = [kind.parse(i) for i in infos if i.get("family") == family]
        # One date for one run, also across midnight.
        rows += [replace(row, date=min(r.date for r in found)) for row in found]
    return rows


def load(paths: Iterable[Path]) -> list[StepRow]:
    """The rows of the AMP step in pytest-benchmark's JSON files, in a readable order."""
    rows = read(paths, FAMILY, StepRow)
    models, kinds, rules, jobs = map(list, (MODELS, KINDS, RULES, JOBS))
    rows.sort(
        key=lambda row: (
            row.machine, models.index(row.model), kinds.index(row.dtype),
            rules.index(row.op), jobs.index(row.job),
        )
    )  # fmt: skip
    return rows
