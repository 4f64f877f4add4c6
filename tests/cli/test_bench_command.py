"""``fusedtrain bench``: its rows, the gate of each family, what stops it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch
from torch import nn

from fusedtrain.advisor.bench import (
    FAMILIES,
    Entry,
    Options,
    Result,
    _match,
    amp_step,
    conv,
    measure,
)
from fusedtrain.advisor.bench.clock import Effort
from fusedtrain.cli import bench, main
from fusedtrain.cli._exit import Exit
from fusedtrain.cli._roofline import roofline
from helpers.commands import Page, assert_png, fusedtrain, parsed

BRIEF = Effort(min_rounds=3, max_rounds=3, seconds=0.0, sample_ns=1.0)
QUICK = Options(quick=True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_run(tmp_path: Path) -> None:
    run = fusedtrain(
        "bench", "activations", "amp-step", "--quick", "--threads", "1", "--json",
        "--plot", "roof.png", "--html", "report.html", folder=tmp_path,
    )  # fmt: skip
    assert run.returncode == Exit.DONE, run.stderr
    result = parsed(run)
    assert result["facts"]["threads"] == "1"
    assert result["partial"] is None
    assert result["copy_gb_per_s"] > 0.1
    assert result["matmul_operations_per_s"] > 1e8
    ops = [(row["family"], row["op"], row["part"]) for row in result["rows"]]
    assert ops == [
        ("activations", "mish", "forward+backward"),
        ("activations", "silu", "forward+backward"),
        ("amp-step", "adamw", "step"),
    ]
    for row in result["rows"]:
        low, high = row["ratio_interval"]["eager"]
        assert low <= row["ratio"]["eager"] <= high
        speed = row["bytes"] / row["ns"]["fusedtrain"]
        assert row["gb_per_s"]["fusedtrain"] == pytest.approx(speed)
        assert row["percent_of_copy"] > 0
    assert result["rows"][0]["bytes"] == 5 * 4 * 2**16
    assert set(result["rows"][2]["ns"]) == {"fusedtrain", "eager", "torch fused"}
    # Stages are on stderr, the results alone on stdout.
    assert "bench: mish" in run.stderr
    assert_png(tmp_path / "roof.png")
    page = Page((tmp_path / "report.html").read_text())
    assert [row[0] for row in page.rows] == ["op", "mish", "silu", "op", "adamw"]
    assert page.images[0].startswith("data:image/png;base64,")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_gated_and_timed(family: str) -> None:
    options = replace(QUICK, size=2**14)
    for entry in FAMILIES[family](options):
        result = measure(entry, "cpu", BRIEF)
        assert not result.wrong, (str(entry), result.wrong)
        assert not result.left_out
        assert result.rounds == 3
        assert result.operations > 0
        assert result.ratio.keys() >= {"eager"}


def test_operations_of_grouped_convolutions() -> None:
    """Backward has as many for each of its two gradients as forward, whatever the groups."""
    x = torch.randn(2, 32, 14, 14, requires_grad=True)
    for groups in (1, 4, 32):
        weight = torch.randn(32, 32 // groups, 5, 5, requires_grad=True)

        def step(weight: torch.Tensor = weight, groups: int = groups) -> None:
            output = torch.conv2d(x, weight, None, 1, 2, 1, groups)
            torch.autograd.grad(output, (x, weight), torch.ones_like(output))

        assert _match.count_operations(step) == 3 * 2 * 25 * (32 // groups) * x.numel()


def test_more_rows_without_quick() -> None:
    for entries in FAMILIES.values():
        quick, all_of_them = (list(entries(o)) for o in (QUICK, Options()))
        assert len(all_of_them) > len(quick)
        assert len(set(map(str, all_of_them))) == len(all_of_them)


def test_a_size_that_no_memory_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "activations", "--device", "cpu", "--size", "2^60"]) == Exit.USAGE
    assert "this machine has" in capsys.readouterr().err


def test_wrong_numbers_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fusedtrain.advisor.bench import activations

    monkeypatch.setattr(activations, "ours", lambda op: lambda x: x * 1.0)
    assert main(["bench", "activations", "--quick", "--json"]) == Exit.FOUND
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all("wrong forward" in row["wrong"] and "ns" not in row for row in rows)
    assert main(["bench", "activations", "--quick"]) == Exit.FOUND
    assert "WRONG, not timed: mish forward+backward 2^16" in capsys.readouterr().out


@pytest.mark.parametrize("job", [conv.TRAIN, conv.TUNE, conv.INFERENCE])
def test_the_gate_of_networks(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_two_percent(model: nn.Module, x: torch.Tensor) -> nn.Module:
        with torch.no_grad():
            model[0].weight.mul_(1.02)
            model[3].weight.mul_(1.02)
        return model

    changes = {**conv._CHANGES, job: off_by_two_percent}
    monkeypatch.setattr(conv, "_CHANGES", changes)
    entry = next(e for e in conv.entries(QUICK) if e.part == job)
    assert "wrong" in measure(entry, "cpu", BRIEF).wrong


def test_shapes_have_as_many_parameters() -> None:
    for count in (1, 1000, 2**16, 2**22 + 1):
        assert sum(torch.Size(shape).numel() for shape in amp_step.shapes(count)) == count


def test_operations() -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3)
    products = 2 * 4 * 3 * 9 * 8 * 8  # of a multiplication and an addition each
    count = _match.count_operations(lambda: nn.functional.conv2d(x, weight, padding=1).relu())
    assert count == 2 * products + 2 * 4 * 8 * 8
    y = torch.randn(10)
    assert _match.count_operations(lambda: (y * 2).view(5, 2).clone()) == 10
    assert _match.count_operations(lambda: torch._foreach_add_([y, y], 1.0)) == 20


def _result(ratio: float) -> Result:
    entry = Entry("activations", "mish", "forward", "2^16", lambda: pytest.fail("not to be made"))
    who = {"fusedtrain": 1e6, "eager": ratio * 1e6, "copy": 1e6}
    return Result(
        entry, who, (1e6, 1e6), {"eager": ratio}, {"eager": (ratio - 0.01, ratio + 0.01)},
        dict.fromkeys(who, 1.0), 100.0, 10.0, 10.0, 8,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "words", "code"),
    [
        (0.8, [], Exit.DONE),
        (0.8, ["--fail-slower"], Exit.FOUND),
        (0.96, ["--fail-slower"], Exit.DONE),
        (1.5, ["--fail-slower"], Exit.DONE),
    ],
)
def test_fail_slower(
    ratio: float, words: list[str], code: Exit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measure", lambda entry, device, effort: _result(ratio))
    assert main(["bench", "activations", "--quick", *words]) == code


def test_what_was_measured_before_ctrl_c_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = iter([_result(1.5)])

    def interrupted(entry: Entry, device: str, effort: Effort) -> Result:
        for result in results:
            return result
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupted)
    plot = tmp_path / "roof.png"
    assert main(["bench", "--quick", "--json", "--plot", str(plot)]) == Exit.STOPPED
    report = json.loads(capsys.readouterr().out)
    assert report["partial"] == "stopped after 1 rows"
    assert len(report["rows"]) == 1
    assert report["matmul_operations_per_s"] is None
    assert_png(plot)


def test_a_roofline_has_points_of_every_family() -> None:
    rows = [
        replace(_result(1.5), entry=replace(_result(1.5).entry, family=family), operations=2.0e6)
        for family in FAMILIES
    ]
    figure = roofline(rows, 10.0, 1e9, "a device")
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == [*FAMILIES, "eager torch"]


def test_rows_without_operations_make_no_roofline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        bench, "measure", lambda entry, device, effort: replace(_result(1.5), operations=0.0)
    )
    plot = tmp_path / "roof.png"
    assert main(["bench", "activations", "--quick", "--plot", str(plot)]) == Exit.DONE
    assert "there is nothing to draw" in capsys.readouterr().err
    assert not plot.exists()


def test_sizes() -> None:
    size = bench.Size()
    for text, count in (("64", 64), ("2^22", 2**22), ("4M", 2**22), ("64k", 2**16), ("1G", 2**30)):
        assert size.convert(text, None, None) == count
    for text in ("", "M", "2^", "2^x", "1.5M", "-4"):
        with pytest.raises(click.BadParameter):
            size.convert(text, None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_no_such_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda"]) == Exit.USAGE
    assert "torch sees no CUDA device" in capsys.readouterr().err
