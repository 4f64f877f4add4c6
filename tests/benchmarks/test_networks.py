"""Benchmarks of whole networks: gate, contestants, memory, rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import bench_conv_bn, bench_host, bench_memory
from benchmarks.harness import networks
from benchmarks.harness.networks import Setup
from fusedtrain.advisor.bench.gate import NotTheJob
from helpers.benchmarks import measured

TRAIN = Setup("train", "none", 4, 32)


def _network(setup: Setup) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4),
        nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 1000),
    )  # fmt: skip
    return network.train(setup.job == "train")


# --- the gate ---


def _gate(model: nn.Module, setup: Setup) -> dict[str, float]:
    gate = networks.Gate(_network(setup), setup, "cpu")
    gate.check("fusedtrain", model)
    return gate.errors["fusedtrain"]


class _Layer(nn.Module):
    """A function in the place of a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input)


def _with(place: int, make: Callable[[Any], Callable[[Tensor], Tensor]]) -> Any:
    def change(network: Any) -> None:
        network.append(_Layer(lambda x: x))
        layer = network[place]
        layer.forward = make(layer.forward)

    return change


MISTAKES: dict[str, tuple[str, Any, str]] = {
    "2 percent": ("inference", _with(4, lambda f: lambda x: 1.02 * f(x)), "wrong output"),
    "no activation": ("inference", _with(2, lambda f: lambda x: x), "wrong output"),
    "nan": ("inference", _with(2, lambda f: lambda x: torch.nan * f(x)), "wrong output"),
    "shape": ("inference", _with(8, lambda f: lambda x: f(x)[:, 1:]), "wrong output"),
    "forward": ("train", _with(4, lambda f: lambda x: 1.02 * f(x)), "wrong output"),
    "backward": (
        "train",
        _with(4, lambda f: lambda x: 1.02 * f(x) - 0.02 * f(x).detach()),
        "wrong gradient",
    ),
    "no gradient": ("train", _with(0, lambda f: lambda x: f(x).detach()), "wrong gradient"),
    "statistics": ("train", lambda n: setattr(n[1], "momentum", 0.11), "wrong running"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_gate_refuses_a_wrong_contestant(mistake: str) -> None:
    job, change, message = MISTAKES[mistake]
    setup = replace(TRAIN, job=job)
    network = _network(setup)
    change(network)
    with pytest.raises(NotTheJob, match=message):
        _gate(network, setup)


# --- networks and rows ---


CASES: dict[str, tuple[Any, Any]] = {
    **{job: (bench_conv_bn, bench_conv_bn.Case(replace(TRAIN, job=job))) for job in networks.JOBS},
    "memory": (bench_memory, bench_memory.Case(replace(TRAIN, layout="contiguous"))),
    "host": (bench_host, bench_host.Case("train", "contiguous", bench_host.BOTH, 1.0, "none")),
}


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(networks, "build", lambda setup, device: _network(setup))
    yield
    networks.stock_of.cache_clear()


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("kind", CASES)
def test_rows(kind: str) -> None:
    row = measured(*CASES[kind])
    assert row.model == "none"
    assert set(row.ratio) == {"eager", *["store"] * (kind == "memory")}
    if kind in networks.JOBS:
        assert (row["job"], row["batch"]) == (kind, 4)
        note = {"train": "converted ", "tune": "folds ", "inference": "folded "}[kind]
        assert row["note"].startswith(note)
    if kind in ("train", "tune"):
        assert 0 < row["saved"]["fusedtrain"] <= row["saved"]["eager"]
    if kind == "memory":
        kept, peak, fits = (row[name] for name in ("kept", "peak", "fits"))
        assert kept["fusedtrain"] < kept["store"] < kept["eager"]
        assert peak["fusedtrain"] <= peak["store"]
        assert fits["fusedtrain"] >= fits["store"] >= fits["eager"] == row["batch"]


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("train", "fusedtrain"),
        ("memory", "store"),
        ("memory", "fusedtrain"),
        ("host", "fusedtrain"),
    ],
)
def test_a_wrong_network_is_not_timed(
    kind: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = networks.Gate.check

    def check(gate: networks.Gate, who: str, model: Any) -> None:
        if who == wrong:
            model[8].register_forward_hook(lambda module, inputs, output: 1.02 * output)
        right(gate, who, model)

    monkeypatch.setattr(networks.Gate, "check", check)
    with pytest.raises(pytest.fail.Exception, match=r"wrong output.*\. Not timed"):
        measured(*CASES[kind])
