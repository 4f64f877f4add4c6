"""The benchmark of normalised images: who is wrong is not timed; its rows reach the report."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks._rows import load  # noqa: E402

bench: Any = importlib.import_module("benchmarks.bench_images")


@pytest.mark.filterwarnings("ignore:no torchvision rival")
def test_right_ones_pass_and_wrong_ones_do_not() -> None:
    for case in bench.select(quick=True, compiled=False):
        x = bench._bytes(1, case.read, "cpu")
        found = bench.contestants(case, "cpu")
        assert {"fusedtrain", "eager"} <= set(found) <= {"fusedtrain", "eager", "torchvision"}
        assert all(bench.is_right(function, x, case) for function in found.values())
        eager = found["eager"]
        for wrong in (
            lambda x, eager=eager: eager(x) * 1.02,
            lambda x, eager=eager: eager(x.flip(1)),
            lambda x, eager=eager: eager(x).double(),
            lambda x, eager=eager: eager(x).transpose(2, 3).contiguous().transpose(2, 3),
        ):
            assert not bench.is_right(wrong, x, case)


def test_cases() -> None:
    for device in ("cpu", "cuda"):
        names = list(map(str, bench.select(device)))
        assert len(set(names)) == len(names) == 16
    assert len(bench.select(quick=True)) == 4
    assert bench.DTYPES["cpu"][0] is torch.float32


def test_a_quick_run_reaches_the_report(tmp_path: Path) -> None:
    environment = os.environ | {"RESULTS_DIR": str(tmp_path)}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--quick", "--family", "images", "--no-compile"],
        cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    rows = load(tmp_path.glob("*.json"))
    assert {row.layout for row in rows} == {
        "contiguous", "channels_last", "contiguous to channels_last", "channels_last to contiguous"
    }  # fmt: skip
    assert all(row.family == "images" and "eager" in row.ratio for row in rows)
    assert list(tmp_path.glob("*-images.png"))
