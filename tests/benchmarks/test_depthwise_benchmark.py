"""The benchmark of depthwise convolutions: its layers and the chart of their geometric means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_depthwise as bench, report
from benchmarks.harness.cases import Options
from helpers.benchmarks import measured, write


def test_layers_are_those_of_the_networks() -> None:
    """Each once, or its rows would replace one another."""
    assert len(set(bench.LAYERS)) == len(bench.LAYERS) == 23
    assert {case.layer for case in bench.select(Options("cpu"))} == set(bench.LAYERS)


@pytest.fixture(scope="module")
def info() -> dict[str, Any]:
    """A row of a run, for others to be made of."""
    row = measured(bench, bench.select(Options(quick=True))[0])
    return {**{k: v for k, v in vars(row).items() if k != "extra"}, **row.extra}


def test_chart(info: dict[str, Any], tmp_path: Path) -> None:
    """A mean for each network and pass; the layouts side by side, and a row of panels a dtype."""
    ratios = {"forward": 2.0, "backward": 4.0, "forward+backward": 3.0}
    infos = []
    for case in bench.select(Options("cpu", compiled=False)):
        layer, last = case.layer, case.layout == "channels_last"
        ratio = ratios[case.pass_name] * (1 + 3 * (layer == bench.LAYERS[0])) / (1 + last)
        shape = [8, layer.channels, *[layer.side] * layer.dims]
        infos.append({
            **info, "op": layer.name, "shape": shape, "pass": case.pass_name,
            "layout": case.layout, "dtype": bench.dtype_name(case.dtype), "ratio": {"eager": ratio},
        })  # fmt: skip
    path = write(tmp_path / "rows.json", infos)
    rows = report.read([path])["depthwise"]
    first, second = bench.REPORT.panels(rows)
    assert [panel.groups == first[0].groups for panel in (*first, *second)] == [True] * 4
    contiguous, last = ({n: dict(zip(p.groups, v, strict=True)) for n, v in p.series.items()}
                        for p in first)  # fmt: skip
    assert list(contiguous) == list(ratios)
    assert contiguous["forward"]["EfficientNet-B0"] == pytest.approx(2 * 4 ** (1 / 12))
    assert contiguous["backward"]["ConvNeXt-T"] == pytest.approx(4)
    assert contiguous["backward"]["all layers"] == pytest.approx(4 * 4 ** (1 / 23))
    assert last["forward+backward"]["RepLKNet"] == pytest.approx(1.5)
    assert last["forward"]["X3D, 3-d"] is last["forward"]["Conformer, 1-d"] is None
    assert report.main([str(path), "--svg", str(tmp_path / "chart.svg")]) == 0
    assert (tmp_path / "chart-depthwise.svg").read_text().startswith("<svg ")


def test_chart_of_a_quick_run(info: dict[str, Any], tmp_path: Path) -> None:
    """Its layer is of no network."""
    (panels,) = bench.REPORT.panels(
        report.read([write(tmp_path / "rows.json", [info])])["depthwise"]
    )
    (panel,) = panels
    values = panel.series[info["pass"]]
    assert values[-1] == pytest.approx(info["ratio"]["eager"])
    assert set(values[:-1]) == {None}
