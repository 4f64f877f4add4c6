"""The report of optimizer steps, of Apex's calls, of whole networks and of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.bench_apex import REPORT as APEX
from benchmarks.bench_memory import REPORT as MEMORY
from benchmarks.harness.apex import RIVALS
from benchmarks.harness.networks import Setup
from benchmarks.harness.rows import load, make_row
from benchmarks.harness.tables import Limits
from helpers.benchmarks import STEADY, cells, times, write

# --- the AMP step ---


def step_row(op: str, job: str, ours: list[float], theirs: dict[str, list[float]]) -> Any:
    who = ["fusedtrain", *theirs]
    return make_row(
        "amp_step", "cpu", {"fusedtrain": ours, **theirs, "copy": STEADY}, model="resnet50", op=op,
        job=job, dtype="float32", numel=1_000_000, tensors=161, moved=32_000_000, copied=8_000_000,
        host_ns=dict.fromkeys(who, 5e4), counts=dict.fromkeys(who, 7),
    )  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Path]:
    """Writes a results file from (op, job, ns of fusedtrain, ns of the rivals)."""
    return lambda *rows: write(tmp_path / "results.json", [step_row(*row) for row in rows])


def test_table(results: Callable[..., Path], capsys: Any) -> None:
    path = results(
        ("adamw", "ema", times(4), {"foreach": times(12), "fused": times(6)}),
        ("adamw", "check", times(4), {"fused": times(4)}),
    )
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "resnet50, float32: 1.0 M parameters in 161 tensors" in text
    # 32 bytes of a million parameters in 4 ms; the copy moved 8 MB in 1 ms.
    assert cells(text, "│ ema") == [
        *("adamw", "ema", "4", "32", "8.0", "100", "50 / 50", "7 / 7 ops", "1.50x fused"),
        *("1.50-1.50", "fused 1.50x, foreach 3.00x", ""),
    ]
    assert text.index("│ check") < text.index("│ ema")
    assert "1.22x (geometric mean of 2), from 1.00x to 1.50x" in text


def test_markdown(results: Callable[..., Path], capsys: Any) -> None:
    path = results(("adamw", "ema", times(4), {"fused": times(6)}), ("lars", "check", STEADY, {}))
    assert report.main([str(path), "--markdown"]) == 0
    table = [x for x in capsys.readouterr().out.splitlines() if x.startswith("|")]
    assert len(table) == 4
    assert {line.count("|") for line in table} == {12}
    assert table[2].startswith("| adamw | ema | 4 | 32 | 8.0 | 100 |")


def test_slower_than_the_strongest_rival(results: Callable[..., Path], capsys: Any) -> None:
    path = results(("adamw", "ema", times(4), {"fused": times(3), "foreach": times(9)}))
    assert report.main([str(path), "--fail-slower"]) == 1
    text = capsys.readouterr().out
    assert "SLOWER" in text
    assert "adamw ema float32 resnet50: 0.75x fused" in text
    path = results(("adamw", "ema", times(4), {"fused": times(3.9)}))
    assert report.main([str(path), "--fail-slower"]) == 0


def test_chart(results: Callable[..., Path], tmp_path: Path) -> None:
    path = results(("adamw", "ema", times(4), {"fused": times(6)}), ("lars", "check", STEADY, {}))
    assert report.main([str(path), "--svg", str(tmp_path / "bars.svg")]) == 0
    assert (tmp_path / "bars-amp-step.svg").read_text().startswith("<svg ")
    assert not (tmp_path / "bars.svg").exists()


# --- Apex's calls ---


def apex_file(path: Path, **factors: float) -> Path:
    """A file with one row, from times over those of fusedtrain."""
    samples = {who: times(factor) for who, factor in {"fusedtrain": 1.0, **factors}.items()}
    info = make_row(
        "apex", "cpu", {**samples, "copy": STEADY}, model="resnet50", op="O2+FusedSGD", job="clip",
        dtype="float16+float32", numel=1_000_000, tensors=161, moved=22_000_000, copied=8_000_000,
        host_ns=dict.fromkeys(samples, 5e4), counts=dict.fromkeys(samples, 7),
    )  # fmt: skip
    return write(path, [info])


def test_table_and_chart_of_apex(tmp_path: Path, capsys: Any) -> None:
    path = apex_file(
        tmp_path / "r.json", own=0.98, max_grad_norm=0.6, fused=1.5, foreach=3, masters=4
    )
    assert report.main([str(path), "--fail-slower", "--svg", str(tmp_path / "bars.svg")]) == 0
    text = capsys.readouterr().out
    line = cells(text, "│ O2+FusedSGD")
    assert line[:2] == ["O2+FusedSGD", "clip"]
    assert line[2] == "1 / 0.98 / 1.5 / 3 / 4"
    assert line[3] == "22.0 (275 %)"
    assert line[6:9] == ["0.98x (0.98-0.98)", "1.50x (1.50-1.50)", "0.60x"]
    assert "Apex's calls / own step: 1.02x (geometric mean of 1)" in text
    assert (tmp_path / "bars-apex.svg").read_text().startswith("<svg ")
    assert report.main([str(path), "--markdown"]) == 0
    header, _, row = (x for x in capsys.readouterr().out.splitlines() if x.startswith("|"))
    assert header.count("|") == row.count("|") == 10


@pytest.mark.parametrize(("own_ratio", "fused_ratio"), [(0.9, 1.5), (1.0, 0.9)])
def test_slower_than_promised(
    tmp_path: Path, capsys: Any, own_ratio: float, fused_ratio: float
) -> None:
    path = apex_file(
        tmp_path / "r.json", own=own_ratio, max_grad_norm=0.6, fused=fused_ratio, foreach=3
    )
    assert report.main([str(path), "--fail-slower"]) == 1
    text = capsys.readouterr().out
    assert "SLOWER" in text
    assert ("clip: 0.90x own" in text) == (own_ratio == 0.9)
    assert ("clip: 0.90x fused" in text) == (fused_ratio == 0.9)


def test_strongest_is_one_of_torchs(tmp_path: Path) -> None:
    path = apex_file(tmp_path / "r.json", own=0.98, max_grad_norm=0.5, fused=2, foreach=1.8)
    (row,) = load([path])
    assert row.strongest(RIVALS) == "foreach"
    assert APEX.means(row)["vs the strongest rival"] == pytest.approx(1.8)
    assert replace(row, ratio={"own": 0.9}).strongest(RIVALS) is None


# --- whole networks ---

RESNET = Setup("inference", "resnet50", 8, 224)
EFFICIENTNET = Setup("train", "efficientnet_b0", 32, 96, optimizer="AdamW")


def net_file(path: Path, *rows: tuple[Setup, float, dict[str, float]]) -> Path:
    infos = []
    for setup, ours, rivals in rows:
        saved = {} if setup.job == "inference" else {"fusedtrain": 40_000_000, "eager": 100_000_000}
        samples = {who: times(factor) for who, factor in {"fusedtrain": ours, **rivals}.items()}
        infos.append(
            make_row(
                "conv_bn", "cpu", samples, **vars(setup), saved=saved, note="folded 53 norms",
                errors={"output": 1e-6},
            )
        )  # fmt: skip
    return write(path, infos)


def test_rows_of_networks_are_in_order(tmp_path: Path) -> None:
    path = net_file(tmp_path / "r.json", (RESNET, 2, {"eager": 3}), (EFFICIENTNET, 4, {"eager": 6}))
    rows = report.read([path])["conv_bn"]
    assert [row["job"] for row in rows] == ["train", "inference"]
    assert rows[0].ratio == {"eager": pytest.approx(1.5)}
    assert rows[0]["saved"] == {"fusedtrain": 40_000_000, "eager": 100_000_000}
    assert (rows[0].model, rows[0]["optimizer"], rows[0]["batch"]) == (
        *("efficientnet_b0", "AdamW", 32),
    )


def test_table_of_networks(tmp_path: Path, capsys: Any) -> None:
    path = net_file(
        tmp_path / "r.json",
        (RESNET, 4, {"eager": 8, "compile": 6}),
        (EFFICIENTNET, 4, {"eager": 3}),
    )
    assert report.main([str(path), "--fail-slower"]) == 1
    text = capsys.readouterr().out
    assert "│ inference" in text
    assert "1.50x compile" in text
    assert "compile 1.50x, eager 2.00x" in text
    assert "100.0 -> 40.0" in text
    assert "SLOWER" in text
    assert "  train efficientnet_b0 32 x 96² channels_last float32 AdamW: 0.75x eager" in text


def test_markdown_of_networks(tmp_path: Path, capsys: Any) -> None:
    path = net_file(tmp_path / "r.json", (RESNET, 4, {"eager": 8, "compile": 6}))
    assert report.main([str(path), "--markdown"]) == 0
    table = [x for x in capsys.readouterr().out.splitlines() if x.startswith("|")]
    assert table[2] == (
        "| inference | resnet50 8 x 224² channels_last float32 | 4 |  | 1.50x compile | "
        "1.50-1.50 | compile 1.50x, eager 2.00x | folded 53 norms |"
    )
    assert {line.count("|") for line in table} == {9}


def test_chart_of_networks(tmp_path: Path) -> None:
    path = net_file(tmp_path / "r.json", (RESNET, 4, {"eager": 8}), (EFFICIENTNET, 4, {"eager": 3}))
    assert report.main([str(path), "--svg", str(tmp_path / "bars.svg")]) == 0
    assert (tmp_path / "bars-conv-bn.svg").read_text().startswith("<svg ")


# --- memory ---


def test_memory(tmp_path: Path, capsys: Any) -> None:
    info = make_row(
        "memory", "cpu", dict.fromkeys(("fusedtrain", "store", "eager"), STEADY),
        model="resnet18", batch=4, pixels=64, layout="contiguous", dtype="float32",
        kept={"eager": 10**8, "store": 8 * 10**7, "fusedtrain": 5 * 10**7},
        peak={"eager": 2 * 10**8, "store": 10**8, "fusedtrain": 10**8},
        fits={"eager": 4, "store": 5, "fusedtrain": 6},
    )  # fmt: skip
    path = write(tmp_path / "r.json", [info])
    assert report.main([str(path), "--svg", str(tmp_path / "bars.svg")]) == 0
    text = capsys.readouterr().out
    assert "kept bytes, of eager's: 0.50x" in text
    assert "largest batch, of eager's: 1.50x" in text
    assert cells(text, "│ fusedtrain") == [
        *("", "fusedtrain", "50.0", "0.50x", "100.0", "0.50x", "6", "1.50x", "1.00x", "1.00x", ""),
    ]
    assert ">1.50<" in (tmp_path / "bars-memory.svg").read_text()
    assert report.main([str(path), "--markdown"]) == 0
    assert "| resnet18 4 x 64² contiguous float32 | eager |" in capsys.readouterr().out
    (row,) = load([path])
    for ratio, slower in ((0.8, "store"), (0.95, None)):
        assert MEMORY.loses_to(replace(row, ratio={"store": ratio}), Limits()) == slower
