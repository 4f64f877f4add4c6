"""The benchmark of normalised images: who is wrong is not timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bench_images as bench
from benchmarks.harness.cases import Options
from fusedtrain.advisor.bench.gate import NotTheJob
from helpers.benchmarks import measured

pytestmark = pytest.mark.filterwarnings("ignore:no torchvision rival")


def test_right_ones_pass_and_wrong_ones_do_not() -> None:
    for case in bench.select(Options(quick=True, compiled=False)):
        x = bench._bytes(1, case.read, "cpu")
        contestants = bench.contestants(case, "cpu")
        assert {"fusedtrain", "eager"} <= set(contestants)
        assert set(contestants) <= {"fusedtrain", "eager", "torchvision"}
        for function in contestants.values():
            bench.check(function, x, case)
        eager = contestants["eager"]
        for wrong in (
            lambda x, eager=eager: eager(x) * 1.02,
            lambda x, eager=eager: eager(x.flip(1)),
            lambda x, eager=eager: eager(x).double(),
            lambda x, eager=eager: eager(x).transpose(2, 3).contiguous().transpose(2, 3),
        ):
            with pytest.raises(NotTheJob):
                bench.check(wrong, x, case)


def test_cases() -> None:
    for device in ("cpu", "cuda"):
        assert len(bench.select(Options(device))) == 16
    assert len(bench.select(Options(quick=True))) == 4
    assert bench.DTYPES["cpu"][0] is torch.float32


def test_rows() -> None:
    rows = [measured(bench, c) for c in bench.select(Options(quick=True, compiled=False))]
    assert [row.layout for row in rows] == [
        "contiguous", "contiguous to channels_last", "channels_last to contiguous", "channels_last"
    ]  # fmt: skip
    for row in rows:
        assert (row.op, row["pass"], row["bytes"]) == (bench.OP, "forward", 5 * row.numel)
        assert "eager" in row.ratio
