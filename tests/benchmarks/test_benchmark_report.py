"""The report: what is slower, tables, charts, and what the docs show of the stored results."""

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
STEP: dict[str, Any] = {
    "model": "resnet50", "op": "adamw", "dtype": "float32", "numel": 2 * N, "moved": 64 * N,
    "copied": 16 * N,
}  # fmt: skip


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


SNAPSHOT = """\
activations, a CPU, 2 threads, torch 2.13, 2026-11-21: 3 rows, 1 noisy
  vs eager at 2^20 and above: 1.22x (geometric mean of 2), from 0.50x to 3.00x
  vs compile at 2^20 and above: 1.25x (geometric mean of 1), from 1.25x to 1.25x
Slower than a rival beyond noise (> 5%): 1 rows
  relu, forward+backward, 2^20, float32: 0.50x eager, 1 ms against 500 us

activations, a CPU, 2 threads, torch 2.13, 2026-11-21

| row | fusedtrain | eager | compile | GB/s | B/element |
| --- | ---: | ---: | ---: | ---: | ---: |
| silu, forward+backward, 2^10, float32 | 3 ms \\* | 1 ms, 0.33x (0.33-1.00) |  | 0.0 (83 %, 42 %) | 20 |
| mish, forward+backward, 2^20, float32 | 1 ms | 3 ms, 3.00x (3.00-3.00) | 1.25 ms, 1.25x (1.25-1.25) | 21.0 (250 %, 125 %) | 20 |
| relu, forward+backward, 2^20, float32 | 1 ms | 500 us, 0.50x (0.50-0.50) |  | 21.0 (250 %, 125 %) | 20 |

amp_step, a CPU, 2 threads, torch 2.13, 2026-11-21: 2 rows, 0 noisy
  vs fused at 2^20 and above: 1.06x (geometric mean of 2), from 0.75x to 1.50x
  vs foreach at 2^20 and above: 3.00x (geometric mean of 1), from 3.00x to 3.00x
Slower than a rival beyond noise (> 5%): 1 rows
  adamw, ResNet-50, step, 2^21, float32: 0.75x fused, 1 ms against 750 us

amp_step, a CPU, 2 threads, torch 2.13, 2026-11-21

| row | fusedtrain | fused | foreach | GB/s | B/element | launches |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| adamw, ResNet-50, step, 2^21, float32 | 1 ms | 750 us, 0.75x (0.75-0.75) |  | 67.1 (400 %) | 32 |  |
| adamw, ResNet-50, ema, 2^21, float32 | 1 ms | 1.5 ms, 1.50x (1.50-1.50) | 3 ms, 3.00x (3.00-3.00) | 67.1 (400 %) | 32 | 7 (fused 22) |

host, a CPU, 2 threads, torch 2.13, 2026-11-21: 2 rows, 0 noisy
  vs eager: 1.73x (geometric mean of 2), from 1.50x to 2.00x
  targets met: 1 of 2
Slower than a rival beyond noise (> 5%): 1 rows
  silu, forward, contiguous, float32: 1.50x eager, 1 ms against 1.5 ms

host, a CPU, 2 threads, torch 2.13, 2026-11-21

| row | fusedtrain | eager | launches | at most, of the rival |
| --- | ---: | ---: | ---: | ---: |
| gelu, forward, contiguous, float32 | 1 ms | 2 ms, 2.00x (2.00-2.00) | 1 (eager 2) | 0.60x |
| silu, forward, contiguous, float32 | 1 ms | 1.5 ms, 1.50x (1.50-1.50) | 1 (eager 2) | 0.60x |

memory, a CPU, 2 threads, torch 2.13, 2026-11-21: 1 rows, 0 noisy
  vs eager: 2.00x (geometric mean of 1), from 2.00x to 2.00x
  vs store: 0.80x (geometric mean of 1), from 0.80x to 0.80x
Slower than a rival beyond noise (> 5%): 1 rows
  ResNet-18, 4 x 64 px, contiguous, float32: 0.80x store, 1 ms against 800 us

memory, a CPU, 2 threads, torch 2.13, 2026-11-21

| row | fusedtrain | eager | store | kept | largest batch |
| --- | ---: | ---: | ---: | ---: | ---: |
| ResNet-18, 4 x 64 px, contiguous, float32 | 1 ms | 2 ms, 2.00x (2.00-2.00) | 800 us, 0.80x (0.80-0.80) | 50 MB (eager 100 MB, store 80 MB) | 6 (eager 4, store 5) |
"""  # noqa: E501


def test_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = row(
        "memory", {"eager": 2, "store": 0.8}, model="resnet18", batch=4, pixels=64,
        layout="contiguous", kept={"eager": 10**8, "store": 8 * 10**7, "fusedtrain": 5 * 10**7},
        fits={"eager": 4, "store": 5, "fusedtrain": 6},
    )  # fmt: skip
    infos = [
        mish(compile=1.25),
        memory,
        mish(op="relu", eager=0.5),
        mish(2**10, "silu", [1e6] + [3e6] * 8, eager=1),
        row("amp_step", {"fused": 1.5, "foreach": 3, "copy": 1}, **STEP, job="ema",
            counts={"fusedtrain": 7, "fused": 22}),
        row("amp_step", {"fused": 0.75, "copy": 1}, **STEP, job="step"),
        *(row("host", {"eager": eager}, op=op, layout="contiguous", at_most=0.6,
              counts={"fusedtrain": 1, "eager": 2}, **{"pass": "forward"})
          for op, eager in (("silu", 1.5), ("gelu", 2))),
    ]  # fmt: skip
    path, chart = write(tmp_path / "rows.json", infos), tmp_path / "chart.svg"
    assert report.main([str(path), f"--svg={chart}", "--fail-slower"]) == 1
    assert capsys.readouterr().out == f"{SNAPSHOT}\n{report.LEGEND}\n"
    assert {"mish", "relu", "3 ms", "500 us"} <= {*words(chart.read_text())}
    assert report.main([str(path), "--family=amp_step"]) == 0
    assert "mish" not in capsys.readouterr().out
    assert report.main([str(path), "--family=pool"]) == 2


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


def test_rows_of_a_busy_machine_are_marked(tmp_path: Path) -> None:
    infos = [
        mish(op="relu", copy=3, copy_fresh=3),  # silu's copy is three times as fast
        mish(op="silu", copy=1),
        mish(2**10, ours=[1e3] + [3e3] * 8),
        mish(2**23, "gelu", copy=8, copy_fresh=8),  # the only one of its size
    ]
    rows = load([write(tmp_path / "rows.json", infos)])
    assert [row.op for row in rows if row.noisy] == ["relu", "mish"]


# --- charts ---


def test_bars_are_as_long_as_their_numbers() -> None:
    bars = {
        "eager torch": [charts.Bar(2, "2 ms"), charts.Bar(9, "9 ms")],
        "fusedtrain": [charts.Bar(1, "1 ms", (0.5, 1.5)), None],
    }
    panel = charts.Panel("Steps", "Shorter is faster", [], ["a & b\nsmall", "<c>"], bars, line=1)
    svg = charts.draw([panel])
    assert svg == charts.draw([panel])
    assert {"Steps", "a & b", "small", "<c>", "2 ms", "9 ms, bar cut"} <= {*words(svg)}


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


def test_what_is_generated_is_replaced() -> None:
    text = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    fresh = report.replace_generated(text, "new")
    assert fresh == text.replace("old", "new")
    with pytest.raises(ValueError, match="there are no lines"):
        report.replace_generated("before\n", "new")


def test_a_headline_is_one_row() -> None:
    parts = report.stored() | {"memory": []}
    with pytest.raises(ValueError, match="0 rows, not 1"):
        report.headlines(parts)


@pytest.mark.parametrize("arguments", [[], ["--docs", "results.json"]])
def test_results_or_docs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(arguments)
    assert "either --docs" in capsys.readouterr().err
