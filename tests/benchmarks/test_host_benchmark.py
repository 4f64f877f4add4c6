"""The benchmark of host time: its gate, its cases, its targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import bench_host as bench, report
from benchmarks.harness import calls
from benchmarks.harness.calls import CALLS, check
from benchmarks.harness.cases import LAYOUTS, Options, Work
from benchmarks.harness.rows import Row
from fusedtrain.advisor.bench.gate import NotTheJob
from fusedtrain.advisor.bench.norms import Contestant
from helpers.benchmarks import measured, mistakes


def gate(op: str, layout: str, spoil: Callable[[Any], Any] | None = None) -> None:
    """Checks both, or fusedtrain's, which is eager's after `spoil`."""
    contest = CALLS[op].contest(Work(), layout)
    if spoil is not None:
        right: Any = contest.functions["eager"]
        wrong: Any = spoil(getattr(right, "function", right))
        if hasattr(right, "norm"):
            wrong = Contestant(right.norm, wrong)
        contest = replace(contest, functions={"fusedtrain": wrong})
    for who in contest.functions:
        check(CALLS[op], contest, who)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", CALLS)
def test_right_ones_pass(op: str, layout: str) -> None:
    gate(op, layout)


@pytest.mark.parametrize("mistake", mistakes(torch.relu))
@pytest.mark.parametrize("op", ["bn_relu", "silu", "glu", "gate", "bias_gelu_dropout"])
def test_wrong_ones_do_not(op: str, mistake: str) -> None:
    with pytest.raises(NotTheJob):
        gate(op, "contiguous", lambda right: mistakes(right)[mistake])


def test_wrong_from_the_second_call_on() -> None:
    def stale(right: Any) -> Any:
        seen: list[Tensor] = []

        def function(x: Tensor) -> Tensor:
            seen.append(x)
            return right(x) * (1.02 if len(seen) > 1 else 1.0)

        return function

    with pytest.raises(NotTheJob, match="wrong output"):
        gate("bn_relu", "contiguous", stale)


def test_stale_statistics_from_the_third_call_on() -> None:
    contest = CALLS["bn_relu"].contest(Work(), "contiguous")
    right, calls = contest.functions["eager"], iter(range(9))

    def function(x: Tensor) -> Tensor:
        y: Tensor = right.function(x)
        if next(calls) == 2:
            right.norm.running_mean.data.mul_(0.9)  # unseen by autograd
        return y

    wrong = replace(contest, functions={"fusedtrain": Contestant(right.norm, function)})
    with pytest.raises(NotTheJob, match="wrong running_mean"):
        check(CALLS["bn_relu"], wrong, "fusedtrain")


def test_gradients_where_there_must_be_none() -> None:
    def recording(right: Any) -> Any:
        return torch.enable_grad()(right)

    with pytest.raises(NotTheJob, match="requires a gradient where it must not"):
        gate("silu", "contiguous", recording)


def test_wrong_without_gradients() -> None:
    def spoil(right: Any) -> Any:
        return lambda x: right(x) * (1.0 if torch.is_grad_enabled() else 1.02)

    with pytest.raises(NotTheJob, match="output without gradients"):
        gate("silu", "contiguous", spoil)


def test_wrong_layout() -> None:
    def other(right: Any) -> Any:
        return lambda x: right(x).contiguous()

    gate("silu", "contiguous", other)
    with pytest.raises(NotTheJob, match="strides"):
        gate("silu", "channels_last", other)


def test_cases() -> None:
    cases = bench.select(Options())
    assert {case.op for case in cases} == {*CALLS, "adamw step", "sgd step", "train"}
    assert {case.model for case in cases} == {"", "resnet50", "efficientnet_b0"}
    targets = {(case.op, case.pass_name): case.target for case in cases}
    assert targets["bn_silu", "forward+backward"] == targets["gate", "forward"] == 1.0
    assert (targets["silu", "no gradients"], targets["silu", "forward+backward"]) == (1.0, 1.35)
    assert (targets["adamw step", "clip"], targets["train", "forward+backward"]) == (0.6, 0.95)
    assert {c.op for c in bench.select(Options(quick=True))} == {"bn_relu", "silu", "adamw step"}
    assert {c.model for c in bench.select(Options(models=("resnet50",)))} == {"resnet50"}
    assert len(bench.select(Options(ops=("gate",)))) == 6


def test_rows() -> None:
    threads = torch.get_num_threads()
    rows = [measured(bench, case) for case in bench.select(Options(quick=True))]
    assert torch.get_num_threads() == threads
    assert all(row.threads == 1 for row in rows)
    assert [row["pass"] for row in rows] == [*calls.PASSES, *calls.PASSES, "clip"]
    assert [list(row.ratio) for row in rows] == [["eager"]] * 6 + [["fused"]]
    counts = [row["counts"] for row in rows]
    assert counts[0]["fusedtrain"] < counts[0]["eager"]
    assert counts[3] == {"fusedtrain": 1, "eager": 1}


def test_a_network(monkeypatch: Any) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 1000),
    )  # fmt: skip
    monkeypatch.setattr(bench.networks, "build", lambda setup, device: network)
    case = next(case for case in bench.select(Options()) if case.model == "resnet50")
    row = measured(bench, case)
    assert set(row.ratio) == {"eager"}
    assert row.model == "resnet50"


def _row(ours: float, at_most: float, high: float) -> Row:
    return Row(
        dtype="float32", device="cpu", device_type="cpu", backend="default", torch="2", date="2026",
        threads=1, ns={"fusedtrain": ours, "eager": 1000.0}, ns_min={}, ratio={"eager": 1e3 / ours},
        ratio_interval={"eager": [0.1, high]}, family="host", op="silu",
        extra={"at_most": at_most, "pass": "forward", "counts": {"fusedtrain": 1, "eager": 2}},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "at_most", "high", "met", "slower"),
    [
        (990.0, 1.0, 1.1, True, False),
        (1300.0, 1.35, 0.8, True, False),
        (590.0, 0.6, 1.8, True, False),
        (700.0, 0.6, 1.5, False, True),
        (1300.0, 1.0, 0.8, False, True),
        (1300.0, 1.0, 1.1, False, False),  # not surely
        (1030.0, 1.0, 0.99, False, False),  # within the tolerance
    ],
)
def test_targets(ours: float, at_most: float, high: float, met: bool, slower: bool) -> None:
    row = _row(ours, at_most, high)
    assert (report.loses_to(row) is not None) is slower
    assert f"\n  targets met: {int(met)} of 1\n" in report.summary([row])
    assert report.cells(row)["launches"] == "1 (eager 2)"
