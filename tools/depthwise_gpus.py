"""Writes fusedtrain/ops/depthwise_gpus.json, by which a GPU chooses depthwise kernels.

    python -m tools.depthwise_gpus

It is made of all benchmarks/results/*.json, where `make gpu` leaves its rows.
"""

from __future__ import annotations

import json
from pathlib import Path

from fusedtrain.ops.depthwise_gpus import FILE, rows_of

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results"


def text() -> str:
    entries = [
        entry
        for path in sorted(RESULTS.glob("*.json"))
        for entry in json.loads(path.read_text())["benchmarks"]
    ]
    return json.dumps(rows_of(entries), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
