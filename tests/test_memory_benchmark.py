"""The benchmark of memory in training: what it measures, the batch that it finds, its rows."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _memory_report, _memory_rows  # noqa: E402
from benchmarks._networks import Setup  # noqa: E402

bench: Any = importlib.import_module("benchmarks.bench_memory")
MIB = 2**20


def test_bytes_of_a_call() -> None:
    """4 MiB that stay, 8 more that go."""

    def run() -> Tensor:
        kept = torch.empty(MIB)
        torch.empty(2 * MIB)
        return kept

    assert bench._most(run, "cpu") == (12 * MIB, 4 * MIB)


class Linear(nn.Module):
    """Keeps what `each` says, in float32 numbers a sample."""

    def __init__(self, each: int) -> None:
        super().__init__()
        self.each, self.weight = each, nn.Parameter(torch.ones(1000))

    def forward(self, images: Tensor) -> Tensor:
        large = torch.zeros(len(images), self.each)
        return (large * self.weight[0]).mean(1, keepdim=True) * self.weight.expand(len(images), -1)


def test_the_largest_batch_that_fits() -> None:
    setup = Setup("train", "none", 4, 8, "contiguous")
    eager, ours = Linear(200_000), Linear(120_000)
    limit, peak = (bench.bytes_of(m, setup, "cpu")[0] for m in (eager, ours))
    found = bench.largest(ours, setup, "cpu", limit, peak)
    assert found == 6
    assert bench.bytes_of(ours, setup, "cpu", found)[0] <= limit
    assert bench.bytes_of(ours, setup, "cpu", found + 1)[0] > limit
    assert bench.largest(eager, setup, "cpu", limit, limit) == 4
    assert bench.largest(eager, setup, "cpu", 100 * limit, limit) == 4 * bench.MOST


def test_quick_run(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--family=memory", "--quick", "--no-compile"],
        cwd=ROOT, capture_output=True, text=True,
        env=environment | {"RESULTS_DIR": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (results,) = tmp_path.glob("*.json")
    (row,) = _memory_rows.load([results])
    assert row.kept["fusedtrain"] < row.kept["store"] < row.kept["eager"]
    assert row.peak["fusedtrain"] <= row.peak["store"]
    assert row.fits["fusedtrain"] >= row.fits["store"] >= row.fits["eager"] == row.batch
    assert set(row.ratio) == {"eager", "store"}
    assert "| resnet18 4 x 64² contiguous float32 | eager |" in _memory_report.markdown([row], [])
    assert f"{row.kept['fusedtrain'] / row.kept['eager']:.2f}x" in _memory_report.summary([row], 0)
    assert next(tmp_path.glob("*-memory.png")).stat().st_size > 5000
    slow = json.loads(json.dumps(vars(row))) | {"ratio": {"store": 0.8, "eager": 0.9}}
    assert _memory_rows.MemoryRow(**slow).is_slower(0)
    assert not _memory_rows.MemoryRow(**slow | {"ratio": {"store": 0.95}}).is_slower(0)
    with pytest.raises(KeyError):
        _memory_rows.MemoryRow.parse({"family": "memory"})
