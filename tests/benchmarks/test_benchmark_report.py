"""The report: tables, Markdown, charts and what is slower, of all kinds of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import report
from benchmarks.harness.rows import load, make_row
from benchmarks.harness.store import FAMILIES
from helpers.benchmarks import STEADY, cells, times, write

N = 2**20
Rivals = dict[str, list[float]]


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Path]:
    """Writes a results file from (op, pass, numel, ns of fusedtrain, ns of the rivals)."""

    def file(*rows: tuple[str, str, int, list[float], Rivals], name: str = "results.json") -> Path:
        infos: list[dict[str, Any]] = [{}]  # one of another kind
        for op, pass_name, numel, ours, rivals in rows:
            copies = {"copy": [0.5 * t for t in ours], "copy_fresh": ours}
            infos.append(
                make_row(
                    "activations", "cpu", {"fusedtrain": ours, **rivals, **copies}, op=op,
                    dtype="float32", numel=numel, copied=8 * numel,
                    moved={"forward": 8, "forward+backward": 20}[pass_name] * numel,
                    **{"pass": pass_name},
                )
            )  # fmt: skip
        return write(tmp_path / name, infos)

    return file


def test_every_family_has_a_report() -> None:
    for family in FAMILIES:
        names = [column.name for column in report.report_of(family).columns]
        assert report.report_of(family).marked in [*names, "ms"]
    assert len({report.report_of(family).name for family in FAMILIES}) == len(FAMILIES)
    assert report.MAIN in FAMILIES


@pytest.mark.parametrize("name", ["amd-epyc", "intel-r-xeon-r-processor"])
def test_stored_results_are_readable(name: str, capsys: Any) -> None:
    path = Path(report.__file__).with_name("results") / f"{name}.json"
    rows = report.read([path])
    assert report.main([str(path), "--markdown"]) == 0
    text = capsys.readouterr().out
    for family, of_family in rows.items():
        for row in of_family:
            of = report.report_of(family)
            assert all(isinstance(c.cell(line), str) for line in of.lines(row) for c in of.columns)
            assert of.label(row)
    assert ("swiglu" in text) == (name == "amd-epyc")


def test_table(results: Callable[..., Path], capsys: Any) -> None:
    path = results(
        ("mish", "forward", N, STEADY, {"eager": times(3), "compile": times(1.25)}),
        ("mish", "forward+backward", N, STEADY, {"eager": times(4)}),
        ("silu", "forward", 2**10, STEADY, {"eager": times(1)}),
    )
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "float32, 2^20 elements" in text
    assert torch.__version__ in text
    # 2 tensors of 4 MiB in 1 ms; the copy moves the same bytes in the same time.
    assert cells(text, "│ mish │ forward ") == [
        *("mish", "forward", "1 ms", "8.4", "100", "50", "3.00x", "3.00-3.00", "1.25x", "")
    ]
    assert "1 ms" in text
    assert "21.0" in text
    assert "Slower than a rival beyond noise (> 5%): 0 rows" in text
    assert "3.46x (geometric mean of 2)" in text
    assert "+0.0 us per call (silu" in text


def test_markdown(results: Callable[..., Path], capsys: Any) -> None:
    path = results(
        ("mish", "forward", N, STEADY, {"eager": times(3), "compile": times(1.25)}),
        ("mish", "forward+backward", N, STEADY, {"eager": times(4)}),
        ("silu", "forward", N, STEADY, {"eager": times(1)}),
        ("silu", "forward", 2**10, STEADY, {"eager": times(1)}),
    )
    assert report.main([str(path), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table[0] == "| op | pass | time | GB/s (% copy) | vs eager | vs compile |"
    assert table[2:] == [
        "| mish | forward | 1 ms | 8.4 (100 %) | 3.00x | 1.25x |",
        "| mish | forward+backward | 1 ms | 21.0 (250 %) | 4.00x |  |",
        "| silu | forward | 1 ms | 8.4 (100 %) | 1.00x |  |",
    ]
    assert report.main([str(path), "--markdown", "--numel", "1024"]) == 0
    assert "mish" not in capsys.readouterr().out


def test_chart(results: Callable[..., Path], tmp_path: Path) -> None:
    one = results(
        ("mish", "forward", N, STEADY, {"eager": times(3), "compile": times(1)}),
        ("mish", "forward+backward", N, STEADY, {"eager": times(4), "compile": times(2)}),
    )
    other = results(("silu", "forward", 2**10, STEADY, {"eager": times(1)}), name="other.json")
    drawn = tmp_path / "charts" / "bars.svg"
    assert report.main([str(one), str(other), "--svg", str(drawn)]) == 0
    assert drawn.read_text().startswith("<svg ")
    words = drawn.read_text()
    assert ">4.00<" in words
    assert ">mish<" in words


def test_no_rows(results: Callable[..., Path]) -> None:
    assert report.main([str(results())]) == 2


@pytest.mark.parametrize(
    ("numel", "ours", "slower"),
    [
        pytest.param(N, [1.2e6] * 20, True, id="surely slower"),
        pytest.param(N, [1.04e6] * 20, False, id="within 5 percent"),
        pytest.param(N, [0.9e6] + [1.2e6] * 19, True, id="one outlier"),
        pytest.param(N, [0.9e6] * 8 + [1.3e6] * 12, False, id="noise"),
        pytest.param(2**10, [4e3] * 20, False, id="small, 3 us more"),
        pytest.param(2**10, [8e3] * 20, True, id="small, 7 us more"),
    ],
)
def test_slower_rows_are_flagged(
    results: Callable[..., Path],
    capsys: Any,
    numel: int,
    ours: list[float],
    slower: bool,
) -> None:
    eager = [1e6 if numel == N else 1e3] * 20
    path = results(("relu", "forward", numel, ours, {"eager": eager}))
    assert report.main([str(path), "--fail-slower"]) == int(slower)
    text = capsys.readouterr().out
    assert ("SLOWER" in text) == slower
    assert ("  relu forward float32" in text) == slower
    assert report.main([str(path)]) == 0


def test_rows_of_a_busy_machine_are_marked(results: Callable[..., Path], capsys: Any) -> None:
    path = results(
        ("relu", "forward", N, times(3), {"eager": times(3)}),  # its copy is 3 times silu's
        ("silu", "forward", N, STEADY, {"eager": STEADY}),
        ("mish", "forward", 2**10, [1e3] + [3e3] * 8, {"eager": STEADY}),
        ("gelu", "forward", 2**23, times(8), {"eager": STEADY}),  # the only one of its size
    )
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "4 rows, 2 noisy" in text
    lines = {op: x for x in text.splitlines() for op in ("relu", "silu", "mish") if f"│ {op}" in x}
    assert [op for op, line in lines.items() if "noisy" in line] == ["mish", "relu"]
    assert report.main([str(path), "--markdown"]) == 0
    text = capsys.readouterr().out
    marked = [line.split("|")[1].strip() for line in text.splitlines() if " \\* |" in line]
    assert marked == ["relu"]


# --- the batch norms of networks ---

LARGE, SMALL = (32, 96, 56, 56), (8, 512, 7, 7)


def norm_row(
    op: str, layout: str, model: str, shape: tuple[int, ...], rivals: dict[str, float]
) -> dict[str, Any]:
    """From ms of the rivals."""
    size = 4 * torch.Size(shape).numel()
    samples = {"fusedtrain": STEADY, "copy": times(0.25), "copy_fresh": times(0.5)}
    return make_row(
        "batch_norm", "cpu", samples | {who: times(t) for who, t in rivals.items()}, op=op,
        dtype="float32", numel=size // 4, moved=8 * size, copied=2 * size, shape=list(shape),
        layout=layout, model=model, **{"pass": "forward+backward"},
    ) | {"allocator": "kept"}  # fmt: skip


STANDARD = norm_row("bn_silu", "channels_last", "", LARGE, {"eager": 2.0, "compile": 3.0})
FIRST, LAST = (8, 64, 112, 112), SMALL


def test_table_of_batch_norms(tmp_path: Path, capsys: Any) -> None:
    slower = norm_row("bn_relu", "contiguous", "resnet50", FIRST, {"eager": 0.5})
    other = norm_row("bn_add_relu", "contiguous", "resnet50", LAST, {"eager": 8.0})
    path = write(tmp_path / "r.json", [STANDARD, slower, other])
    assert report.main([str(path), "--fail-slower"]) == 1
    text = capsys.readouterr().out
    assert "float32, 32 x 96 x 56 x 56 (" in text
    assert "float32, the batch norms of resnet50, batch 8 (" in text
    assert "freed memory kept" in text
    # 8 tensors of 38.5 MB in 1 ms; the new copy moved 2 in half of that.
    assert cells(text, "│ bn_silu") == [
        *("bn_silu channels_last", "forward+backward", "1 ms", "308.3", "200", "100"),
        *("2.00x", "2.00-2.00", "3.00x", ""),
    ]
    assert text.index("bn_relu 64x112x112") < text.index("bn_add_relu 512x7x7")
    assert "SLOWER" in text
    assert "  bn_relu 64x112x112 contiguous forward+backward float32" in text


def test_markdown_of_batch_norms(tmp_path: Path, capsys: Any) -> None:
    layers = [
        norm_row("bn_relu", "contiguous", "resnet50", FIRST, {"eager": 2.0}),
        norm_row("bn_add_relu", "contiguous", "resnet50", LAST, {"eager": 8.0}),
    ]
    path = write(tmp_path / "r.json", [STANDARD, *layers])
    assert report.main([str(path), "--markdown"]) == 0
    table = [x for x in capsys.readouterr().out.splitlines() if x.startswith("|")]
    assert table[2] == (
        "| bn_silu channels_last | forward+backward | 1 ms | 308.3 (200 %) | 2.00x | 3.00x |"
    )
    assert table[5] == (
        "| resnet50, batch 8 | float32 | contiguous | forward+backward | 2 | 4.00x | "
        "2.00x (bn_relu 64x112x112) |"
    )
    assert len(table) == 6


def test_chart_of_batch_norms(tmp_path: Path) -> None:
    layer = norm_row("bn", "contiguous", "resnet50", SMALL, {"eager": 2.0})
    for name, rows in (("bars", [STANDARD, layer]), ("layers", [layer])):
        path = write(tmp_path / "r.json", rows)
        assert report.main([str(path), "--svg", str(tmp_path / f"{name}.svg")]) == 0
        chart = tmp_path / f"{name}-batch-norm.svg"
        assert chart.read_text().startswith("<svg ")
    assert not (tmp_path / "bars.svg").exists()


def test_rows_of_another_day_keep_their_date(tmp_path: Path) -> None:
    """A run of a family has one date, also across midnight."""
    dates = ["2026-11-21T23:50:00+00:00", "2026-11-22T03:10:00+00:00", "2026-11-25T00:00:00+00:00"]
    infos = [STANDARD | {"date": date} for date in dates]
    rows = load([write(tmp_path / "r.json", [infos[1], infos[2], infos[0]])])
    assert [row.date for row in rows] == [dates[0], dates[2], dates[0]]


def test_one_family_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", [STANDARD])
    assert report.main([str(path), "--family", "batch_norm"]) == 0
    assert report.main([str(path), "--family", "activations"]) == 2
    (row,) = load([path])
    assert replace(row, ratio={}).strongest() is None
