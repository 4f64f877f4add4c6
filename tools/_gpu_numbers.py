"""The first rows of `make gpu` beside the predictions of tools/occupancy.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import occupancy

HEAD = ("family", "op", "pass", "dtype", "size", "GB/s", "% copy", "predicted", "of it")
FAR = 0.25  # from the prediction, either way


class Row(NamedTuple):
    """A row that has a bandwidth."""

    share: float  # of the prediction, or of a copy's speed where there is none
    kind: tuple[str, ...]  # family, op, pass, dtype, size
    speed: float  # GB/s
    percent: float  # of a copy
    guess: float  # GB/s, 0.0 where nothing is predicted
    name: str  # of the test


def first_rows(path: Path, gpu: str) -> list[Row]:
    """The rows in a file of results that `make gpu` began with, the slowest beside its prediction
    first; networks and peaks of memory have no bandwidth."""
    rows, predictions = [], occupancy.kept_predictions(gpu)
    for entry in json.loads(path.read_text())["benchmarks"] if path.exists() else []:
        info, name = entry["extra_info"], entry["fullname"]
        speed, percent = info.get("gb_per_s", {}).get("fusedtrain"), info.get("percent_of_copy", 0)
        if speed and info.get("first"):
            family = name.partition("bench_")[2].partition(".py")[0]
            op, way, dtype = (str(info.get(key, "")) for key in ("op", "pass", "dtype"))
            size = "x".join(map(str, info.get("shape", ()))) or str(info.get("numel", 0))
            kind = family, op, way, dtype, f"{size} {info.get('layout', '')}".strip()
            guess = predictions.get(f"{family}  {way} {dtype}", 0.0)  # of any op
            share = speed / guess if guess else percent / 100
            rows.append(Row(share, kind, speed, percent, guess, name))
    return sorted(rows)


def table(rows: list[Row]) -> str:
    """Measurement beside prediction, and a question for each row that is far from it."""
    lines, questions = [], []
    for r in rows:
        beside = (f"{r.guess:.0f}", f"{r.share:.0%}") if r.guess else ("-", "-")
        lines.append((*r.kind, f"{r.speed:.1f}", f"{r.percent:.0f}", *beside))
        if r.guess and abs(r.share - 1) > FAR:
            questions.append(
                f"EXPLAIN: {' '.join(r.kind)}: {r.speed:.0f} GB/s measured, {r.guess:.0f} "
                f"predicted, {r.share - 1:+.0%}: find the reason for docs/gpu_kernels.md"
            )
    text = occupancy.table(HEAD, lines, markdown=False) if lines else "no row of bandwidth yet"
    return "\n".join(["measured GB/s, and the prediction (computed)", text, *questions])
