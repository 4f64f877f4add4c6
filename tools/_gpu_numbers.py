"""Measurements on the GPU beside the predictions of tools/occupancy.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import occupancy

HEAD = ("family", "op", "pass", "dtype", "elements", "GB/s", "% copy", "predicted", "of it")


def table(path: Path, predictions: Mapping[tuple[str, str, str, str], float]) -> list[str]:
    """Lines: what was measured, and the prediction in GB/s where there is one.

    Args:
        path: of the rows.
        predictions: by family, "", pass and dtype, as occupancy.predictions() has them.
    """
    largest: dict[tuple[str, ...], tuple[int, float, float]] = {}
    for entry in json.loads(path.read_text())["benchmarks"] if path.exists() else []:
        info = entry["extra_info"]
        speed = info.get("gb_per_s", {}).get("fusedtrain")
        if speed is None:
            continue  # networks and peaks of memory have no bandwidth
        family = entry["fullname"].partition("bench_")[2].partition(".py")[0]
        key = (family, *(str(info.get(k, "")) for k in ("op", "pass", "dtype")))
        row = (int(info.get("numel", 0)), float(speed), float(info.get("percent_of_copy", 0)))
        largest[key] = max(largest.get(key, row), row)
    if not largest:
        return ["measured and predicted: no row of bandwidth yet"]
    lines = []
    for (family, op, way, dtype), (numel, speed, percent) in sorted(largest.items()):
        guess = predictions.get((family, "", way, dtype))
        beside = (f"{guess:.0f}", f"{100 * speed / guess:.0f}%") if guess else ("-", "-")
        measured = (str(numel), f"{speed:.1f}", f"{percent:.0f}")
        lines.append((family, op, way, dtype, *measured, *beside))
    return [
        "measured GB/s of the largest row of a kind, and the prediction (computed, not measured)",
        *occupancy.table(HEAD, lines, markdown=False).splitlines(),
    ]
