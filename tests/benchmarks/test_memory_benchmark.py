"""The benchmark of memory in training: what it measures, the batch that it finds, its row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks import bench_memory as bench
from benchmarks.harness import networks
from benchmarks.harness.cases import Options
from benchmarks.harness.memory import most_allocated
from benchmarks.harness.networks import Setup
from helpers.benchmarks import measured

MIB = 2**20


def test_bytes_of_a_call() -> None:
    """4 MiB that stay, 8 more that go."""

    def run() -> Tensor:
        kept = torch.empty(MIB)
        torch.empty(2 * MIB)
        return kept

    assert most_allocated(run, "cpu") == (12 * MIB, 4 * MIB)


class Linear(nn.Module):
    """Keeps what `each` says, in float32 numbers a sample."""

    def __init__(self, each: int) -> None:
        super().__init__()
        self.each, self.weight = each, nn.Parameter(torch.ones(1000))

    def forward(self, images: Tensor) -> Tensor:
        large = torch.zeros(len(images), self.each)
        return (large * self.weight[0]).mean(1, keepdim=True) * self.weight.expand(len(images), -1)


def test_the_largest_batch_that_fits() -> None:
    setup = Setup("train", "none", 4, 8, "contiguous")
    eager, ours = Linear(200_000), Linear(120_000)
    limit = bench.bytes_of(eager, setup, "cpu")[0]
    batch = bench.largest(ours, setup, "cpu", limit)
    assert batch == 6
    assert bench.bytes_of(ours, setup, "cpu", batch)[0] <= limit
    assert bench.bytes_of(ours, setup, "cpu", batch + 1)[0] > limit
    assert bench.largest(eager, setup, "cpu", limit) == 4
    assert bench.largest(eager, setup, "cpu", 100 * limit) == 4 * bench.MOST


def _network() -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 3)]
    for _ in range(3):
        parts += [nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1000))


def test_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "build", lambda setup, device: _network())
    row = measured(bench, bench.Case(Setup("train", "none", 4, 32, "contiguous"), compiled=False))
    assert row["kept"]["fusedtrain"] < row["kept"]["store"] < row["kept"]["eager"]
    assert row["peak"]["fusedtrain"] <= row["peak"]["store"]
    assert row["fits"]["fusedtrain"] >= row["fits"]["store"] >= row["fits"]["eager"] == row["batch"]
    assert set(row.ratio) == {"eager", "store"}


def test_both_of_ours_must_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.contestants

    def wrong(*arguments: object) -> dict[str, nn.Module]:
        models = right(*arguments)
        models["store"][-1].register_forward_hook(lambda module, inputs, output: 1.02 * output)
        return models

    monkeypatch.setattr(networks, "build", lambda setup, device: _network())
    monkeypatch.setattr(bench, "contestants", wrong)
    with pytest.raises(pytest.fail.Exception, match=r"store: wrong output.*\. Not timed"):
        measured(bench, bench.Case(Setup("train", "none", 4, 32, "contiguous"), compiled=False))


def test_selection() -> None:
    assert [case.setup for case in bench.select(Options(quick=True))] == [*bench.QUICK]
    assert {case.model for case in bench.select(Options(models=("resnet50",)))} == {"resnet50"}
    assert all(case.compiled for case in bench.select(Options("cuda")))
