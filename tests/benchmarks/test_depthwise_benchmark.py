"""The benchmark of depthwise convolutions: its layers, and a row."""

from __future__ import annotations

from benchmarks import bench_depthwise as bench
from benchmarks.harness.cases import Options
from helpers.benchmarks import measured


def test_layers_are_those_of_the_networks() -> None:
    """Each once, or its rows would replace one another."""
    assert len(set(bench.LAYERS)) == len(bench.LAYERS) == 23
    assert {case.layer for case in bench.select(Options("cpu"))} == set(bench.LAYERS)


def test_row() -> None:
    row = measured(bench, bench.select(Options(quick=True))[0])
    assert (row.op, row["shape"][1:]) == ("2-d 3/2", [16, 28, 28])
    assert set(row.ratio) == {"eager"}
