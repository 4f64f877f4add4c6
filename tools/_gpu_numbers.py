"""Measurements on the GPU beside the predictions of tools/occupancy.py."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path

# family, op, pass, dtype -> GB/s; "" stands for any of its kind.
Key = tuple[str, str, str, str]
Predictions = Mapping[Key, float]


def predictions(gpu: str, arch: str) -> Predictions:
    """Predictions of ``tools/occupancy.py`` for this GPU; none where there is no such file.

    Its ``predictions(gpu, arch)`` takes the name as torch has it and an architecture such as "90".
    """
    if importlib.util.find_spec("occupancy") is None:
        return {}
    function: Callable[[str, str], Predictions] | None = getattr(
        importlib.import_module("occupancy"), "predictions", None
    )
    return function(gpu, arch) if function else {}


def predicted(key: Key, table: Predictions) -> float | None:
    """The entry of the row, or the most special one that it falls under."""
    family, op, pass_name, dtype = key
    for candidate in (
        key, (family, op, pass_name, ""), (family, op, "", dtype), (family, "", pass_name, dtype),
        (family, op, "", ""), (family, "", pass_name, ""), (family, "", "", dtype),
        (family, "", "", ""),
    ):  # fmt: skip
        if candidate in table:
            return table[candidate]
    return None


def measured(path: Path) -> dict[Key, tuple[int, float, float]]:
    """The largest row of each kind: elements, GB/s, percent of a copy's bandwidth."""
    largest: dict[Key, tuple[int, float, float]] = {}
    entries = json.loads(path.read_text())["benchmarks"] if path.exists() else []
    for entry in entries:
        info = entry["extra_info"]
        family = entry["fullname"].partition("bench_")[2].partition(".py")[0]
        speed = info.get("gb_per_s", {}).get("fusedtrain")
        if speed is None:
            continue  # networks and peaks of memory have no bandwidth
        key = (family, *(str(info.get(k, "")) for k in ("op", "pass", "dtype")))
        row = (int(info.get("numel", 0)), float(speed), float(info.get("percent_of_copy", 0)))
        assert len(key) == 4
        largest[key] = max(largest.get(key, row), row)
    return largest


def table(path: Path, expected: Predictions) -> list[str]:
    """Lines: what was measured, and the prediction where there is one."""
    rows = measured(path)
    if not rows:
        return ["measured and predicted: no row of bandwidth yet"]
    lines = [
        "measured GB/s of the largest row of a kind, and the prediction (computed, not measured)",
        f"{'family':<12} {'op':<18} {'pass':<17} {'dtype':<9} {'elements':>10} {'GB/s':>8} "
        f"{'% copy':>7} {'predicted':>9} {'of it':>6}",
    ]
    for key, (numel, speed, percent) in sorted(rows.items()):
        guess = predicted(key, expected)
        beside = f"{guess:9.0f} {100 * speed / guess:5.0f}%" if guess else f"{'-':>9} {'-':>6}"
        family, op, pass_name, dtype = key
        lines.append(
            f"{family:<12} {op:<18} {pass_name:<17} {dtype:<9} {numel:>10} {speed:8.1f} "
            f"{percent:7.0f} {beside}"
        )
    return lines
