"""Measurements on the GPU beside the predictions of tools/occupancy.py."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import occupancy
from _devices import GPUS

KEPT = occupancy.ROOT / "build/gpu"
HEAD = ("family", "op", "pass", "dtype", "size", "GB/s", "% copy", "predicted", "of it")
FAR = 0.25  # from the prediction, either way
Predictions = Mapping[tuple[str, str, str, str], float]  # of occupancy.predictions()


class Measured(NamedTuple):
    """A benchmark's row that has a bandwidth. `is_first`: one that `make gpu` begins with."""

    kind: tuple[str, str, str, str]  # family, op, pass, dtype
    size: str
    speed: float  # GB/s
    percent: float  # of a copy
    guess: float  # GB/s, 0.0 where nothing is predicted
    numel: int
    is_first: bool
    name: str  # of the test

    @property
    def share(self) -> float:
        """Speed over the prediction, or over a copy's where there is none."""
        return self.speed / self.guess if self.guess else self.percent / 100


def measured(path: Path, gpu: str) -> list[Measured]:
    """The rows of a file of results: networks and peaks of memory have no bandwidth."""
    rows, predictions = [], predicted(gpu)
    for entry in json.loads(path.read_text())["benchmarks"] if path.exists() else []:
        info = entry["extra_info"]
        if speed := info.get("gb_per_s", {}).get("fusedtrain"):
            family = entry["fullname"].partition("bench_")[2].partition(".py")[0]
            op, way, dtype = (str(info.get(key, "")) for key in ("op", "pass", "dtype"))
            numel = int(info.get("numel", 0))
            size = "x".join(map(str, info.get("shape", ()))) or str(numel)
            rows.append(Measured(
                (family, op, way, dtype), f"{size} {info.get('layout', '')}".strip(), speed,
                info.get("percent_of_copy", 0.0), predictions.get((family, "", way, dtype), 0.0),
                numel, bool(info.get("first")), entry["fullname"],
            ))  # fmt: skip
    return rows


def worst(rows: list[Measured], count: int) -> list[Measured]:
    """First rows that are the furthest below their predictions."""
    return sorted((r for r in rows if r.is_first), key=lambda r: r.share)[:count]


def table(rows: list[Measured], first: bool) -> list[str]:
    """Lines of the first rows, or of the largest of each kind of the others: measurement beside
    prediction, and a question for each row that is far from it."""
    shown = sorted((row for row in rows if row.is_first == first), key=lambda row: row.numel)
    shown = shown if first else list({row.kind: row for row in shown}.values())
    lines, questions = [], []
    for r in sorted(shown):
        beside = (f"{r.guess:.0f}", f"{r.share:.0%}") if r.guess else ("-", "-")
        lines.append((*r.kind, r.size, f"{r.speed:.1f}", f"{r.percent:.0f}", *beside))
        if r.guess and abs(r.share - 1) > FAR:
            questions.append(
                f"EXPLAIN: {' '.join(r.kind)} {r.size}: {r.speed:.0f} GB/s measured, {r.guess:.0f} "
                f"predicted, {r.share - 1:+.0%}: find the reason, and write it into docs/gpu.md"
            )
    if not lines:
        return ["measured and predicted: no row of bandwidth yet"]
    text = occupancy.table(HEAD, lines, markdown=False).splitlines()
    return ["measured GB/s, and the prediction (computed, not measured)", *text, *questions]


def _kept() -> Path:
    """The file of the predictions for the library that is built."""
    key = hashlib.sha256(occupancy.LIBRARY.read_bytes()).hexdigest()[:16]
    return KEPT / f"predictions-{key}.json"


def predict() -> int:
    """Computes the predictions for the library, for all GPUs whose code it has; the exit code."""
    if not occupancy.LIBRARY.exists():
        print(f"no predictions: {occupancy.LIBRARY} is not built")
        return 1
    print("reading the machine code, about half a minute", flush=True)
    speeds = {}
    for gpu in GPUS:
        with contextlib.suppress(LookupError):  # no code for its architecture
            of_gpu = occupancy.predictions(gpu.name, gpu.arch)
            speeds[gpu.name.split()[0]] = [[*kind, speed] for kind, speed in of_gpu.items()]
    KEPT.mkdir(parents=True, exist_ok=True)
    _kept().write_text(json.dumps(speeds))
    print(f"predictions for {', '.join(speeds)} are in {_kept()}")
    return 0


def predicted(gpu: str) -> Predictions:
    """The predictions for a GPU by its name, if they were computed (`make gpu-predictions`)."""
    kept = (
        json.loads(_kept().read_text()) if occupancy.LIBRARY.exists() and _kept().exists() else {}
    )
    rows = next((kept[word] for word in gpu.split() if word in kept), [])
    return {(family, op, way, dtype): speed for family, op, way, dtype, speed in rows}
