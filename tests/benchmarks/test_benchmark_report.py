"""The report: rows that are slower, and that the docs show the stored results."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import charts, report
from benchmarks.harness.rows import load, make_row
from helpers.benchmarks import STEADY, times, write

N = 2**20
BOTH = {"pass": "forward+backward"}
MACHINE = {"device": "a CPU", "device_type": "cpu", "torch": "2.13", "threads": 2, "allocator": "",
           "date": "2026-11-21T08:00:00+00:00", "backend": "default"}  # fmt: skip


def row(
    family: str, factors: dict[str, float], ours: list[float] = STEADY, **extra: Any
) -> dict[str, Any]:
    """A row of results, from the times of rivals over 1 ms."""
    samples = {"fusedtrain": ours, **{who: times(factor) for who, factor in factors.items()}}
    return make_row(family, "cpu", samples, **{"dtype": "float32", **extra}) | MACHINE


def mish(numel: int = N, op: str = "mish", ours: list[float] = STEADY, **factors: float) -> Any:
    factors = {"eager": 3, "copy": 0.5, "copy_fresh": 1} | factors
    moved = {"numel": numel, "moved": 20 * numel, "copied": 8 * numel}
    return row("activations", factors, ours, op=op, **BOTH, **moved)


def words(svg: str) -> list[str]:
    """Each line of text of a chart."""
    return [html.unescape(text) for text in re.findall(r">([^<>\n]+)</t(?:ext|span)>", svg)]


# --- what is slower ---


@pytest.mark.parametrize(
    ("numel", "ours", "eager", "slower"),
    [
        pytest.param(N, [1.2e6] * 20, 1.0, True, id="surely slower"),
        pytest.param(N, [1.04e6] * 20, 1.0, False, id="within 5 percent"),
        pytest.param(N, [0.9e6] + [1.2e6] * 19, 1.0, True, id="one outlier"),
        pytest.param(N, [0.9e6] * 8 + [1.3e6] * 12, 1.0, False, id="noise"),
        pytest.param(2**10, [4e3] * 20, 1e-3, False, id="small, 3 us more"),
        pytest.param(2**10, [8e3] * 20, 1e-3, True, id="small, 7 us more"),
    ],
)
def test_ops_that_are_slower(
    tmp_path: Path, numel: int, ours: list[float], eager: float, slower: bool
) -> None:
    samples = {"fusedtrain": ours, "eager": [1e6 * eager] * 20, "compile": [1.0] * 20}
    info = make_row("activations", "cpu", samples, op="relu", dtype="float32", numel=numel, **BOTH)
    path = write(tmp_path / "rows.json", [info])
    assert report.main([str(path), "--fail-slower"]) == int(slower)
    assert report.main([str(path)]) == 0


@pytest.mark.parametrize(
    ("family", "factors", "rival", "at_most"),
    [
        ("amp_step", {"fused": 0.94, "foreach": 9}, "fused", 1.0),
        ("amp_step", {"fused": 0.96}, None, 1.0),
        ("conv_bn", {"eager": 2, "compile": 0.9}, "compile", 1.0),
        ("memory", {"eager": 0.5, "store": 0.8}, "store", 1.0),
        ("memory", {"eager": 0.5, "store": 0.95}, None, 1.0),
        ("apex", {"own": 0.9, "max_grad_norm": 0.6, "fused": 1.5}, "own", 1.0),
        ("apex", {"own": 1, "max_grad_norm": 0.6, "fused": 0.9}, "fused", 1.0),
        ("apex", {"own": 0.98, "max_grad_norm": 0.6, "fused": 1.5}, None, 1.0),
        ("host", {}, None, 1.0),
        ("host", {"eager": 0.97}, None, 1.0),
        ("host", {"eager": 0.77}, "eager", 1.0),
        ("host", {"eager": 0.77}, None, 1.35),
        ("host", {"eager": 1.69}, None, 0.6),
        ("host", {"eager": 1.43}, "eager", 0.6),
    ],
)
def test_rival_that_counts(
    tmp_path: Path, family: str, factors: dict[str, float], rival: str | None, at_most: float
) -> None:
    (of_family,) = load([write(tmp_path / "rows.json", [row(family, factors, at_most=at_most)])])
    assert report.loses_to(of_family) == rival


# --- the docs ---


def test_the_docs_show_the_stored_results() -> None:
    parts = report.stored()
    for path, text in report.texts(parts).items():
        if path.read_text(encoding="utf-8") != text:
            pytest.fail(f"{path.name}: {report.COMMAND} --docs", pytrace=False)
    folder, drawn = report.ROOT / "docs" / "charts", charts.charts(parts)
    files = {path.stem for path in folder.iterdir()} - {"rounding"}  # of examples/rounding.py
    assert files == drawn.keys()
    for name, panels in drawn.items():
        of_file = " ".join(words((folder / f"{name}.svg").read_text(encoding="utf-8")))
        for panel in panels:
            names = [line for group in panel.groups for line in group.split("\n")]
            texts = [bar.text for bars in panel.bars.values() for bar in bars if bar]
            missing = [word for word in (panel.title, *names, *texts) if word not in of_file]
            if missing:
                pytest.fail(f"{name}.svg lacks {missing}: {report.COMMAND} --docs", pytrace=False)


def test_every_family_has_a_page_with_all_of_its_rows() -> None:
    parts, folder = report.stored(), report.ROOT / "docs" / "benchmarks"
    pages = [path.read_text(encoding="utf-8") for path in folder.glob("*.md")]
    assert sorted(place[1] for page in pages for place in report.ROWS.finditer(page)) == [*parts]
    page = report.with_rows(next(page for page in pages if "--family images`" in page))
    assert page.count("\n| normalize_images, ") == len(parts["images"])
    with pytest.raises(ValueError, match="no stored rows of nothing"):
        report.with_rows(f"All rows: on the site, or `{report.COMMAND} x --family nothing`.")
