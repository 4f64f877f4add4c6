"""The charts of the docs: bars as long as the numbers say, in SVG that a reader of XML accepts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import report
from benchmarks.harness.chart import Panel
from benchmarks.harness.page import Part
from benchmarks.harness.rows import load, make_row
from benchmarks.harness.summary_charts import charts, with_gpus
from benchmarks.harness.svg import WIDTH, chart
from helpers.benchmarks import STEADY, times, write

SVG = "{http://www.w3.org/2000/svg}"


def panel() -> Panel:
    return Panel(
        "time",
        ["a & b\nsmall", "<c>"],
        {"eager": [2.0, 1.0], "fusedtrain": [1.0, None]},
        title="Steps",
        text=lambda who, group, value: f"{value:g} ms",
        line=2.0,
        intervals={"fusedtrain": [(0.5, 3.0), None]},
        missing={"compile": "not measured"},
    )


def bars(text: str) -> list[tuple[str, float]]:
    """Fill and width of each bar; the squares of the legend are 11 wide and as high."""
    rects = ElementTree.fromstring(text).iter(f"{SVG}rect")
    return [
        (rect.get("class", ""), float(rect.get("width", "")))
        for rect in rects
        if rect.get("class", "").startswith("b") and rect.get("height") != "11"
    ]


def test_bars_are_as_long_as_their_numbers() -> None:
    drawn = bars(chart([panel()]))
    assert [fill for fill, _ in drawn] == ["b0", "b1", "b0"]
    eager, ours, other = (length for _, length in drawn)
    assert ours == other == pytest.approx(eager / 2, abs=0.1)


def test_all_words_are_there_and_none_leaves_the_chart() -> None:
    notes = ["a long note " * 20]
    root = ElementTree.fromstring(chart([panel(), panel()], notes))
    texts = [(node.text or "", float(node.get("x", ""))) for node in root.iter(f"{SVG}text")]
    words = [text for text, _ in texts]
    assert {"a & b", "small", "<c>", "Steps", "time", "2 ms", "1 ms"} <= set(words)
    assert "torch.compile: not measured" in words
    assert len(re.findall("a long note", " ".join(words))) == 20
    assert all(x + 6 * len(text) < WIDTH for text, x in texts)
    assert "eager torch 2 ms; fusedtrain 1 ms" in root.get("aria-label", "")


def test_the_interval_is_drawn_on_the_scale_of_the_bars() -> None:
    text = chart([panel()])
    left, right = map(float, re.findall(r'class="range" d="M([\d.]+) [\d.]+H([\d.]+)', text)[0])
    eager = bars(text)[0][1]
    assert right - left == pytest.approx(2.5 * eager / 2, abs=0.2)


def test_a_bar_beyond_the_most_is_cut() -> None:
    limited = replace(panel(), most=1.0)
    text = chart([limited])
    assert text.count('class="cut"') == 1
    assert len({length for _, length in bars(text)}) == 1
    assert 'class="cut"' not in chart([panel()])


def test_a_gpu_has_charts_of_its_own(tmp_path: Path) -> None:
    gpu = "NVIDIA H100"
    infos = [
        make_row(
            "activations", "cpu", {"fusedtrain": STEADY, "eager": times(ratio)}, op="mish",
            dtype="float32", numel=2**23, **{"pass": "forward+backward"},
        ) | {"device": device, "device_type": kind}
        for kind, device, ratio in (("cpu", "a CPU", 2.0), ("cuda", gpu, 3.0))
    ]  # fmt: skip
    rows = load([write(tmp_path / "rows.json", infos)])
    family = report.report_of("activations")
    drawn = charts({"activations": Part(family, rows)})
    assert drawn.keys() == {"activations", "activations-nvidia-h100"}
    assert "2.00x" in drawn["activations"]
    assert gpu not in drawn["activations"]
    assert "3.00x" in drawn["activations-nvidia-h100"]
    assert not any("not measured yet" in text for text in drawn.values())
    alone = charts({"activations": Part(family, rows[:1])})
    assert "GPUs: not measured yet." in alone["activations"]
    page = with_gpus("a\n\n![Mish](../charts/activations.svg)\n\nb\n", drawn)
    assert page == (
        "a\n\n![Mish](../charts/activations.svg)\n\n"
        "![Mish, activations-nvidia-h100](../charts/activations-nvidia-h100.svg)\n\nb\n"
    )
