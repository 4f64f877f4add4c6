"""The benchmark of whole networks: its contestants, its gate, its cases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import bench_conv_bn as bench
from benchmarks.harness import networks
from benchmarks.harness.cases import Options
from benchmarks.harness.networks import Setup
from fusedtrain.advisor.bench.gate import NotTheJob
from helpers.benchmarks import measured
from helpers.models import torchvision

TRAIN = Setup("train", "none", 4, 9)


def _network(setup: Setup) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4),
        nn.SiLU(), nn.Flatten(), nn.Linear(100, 1000),
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
    "shape": ("inference", _with(7, lambda f: lambda x: f(x)[:, 1:]), "wrong output"),
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


@pytest.mark.parametrize("job", ["train", "inference"])
def test_gate_accepts_right_contestants(job: str) -> None:
    setup = replace(TRAIN, job=job)
    stock = _network(setup)
    for who in ("eager", "fusedtrain") if job == "train" else ("eager",):
        errors = _gate(networks.contestant(who, setup, stock).model, setup)
        kinds = {"output", "gradient", "running statistics"} if job == "train" else {"output"}
        assert errors.keys() == kinds


def test_contestants_share_nothing() -> None:
    stock = _network(TRAIN)
    before = copy.deepcopy(stock.state_dict())
    for who in ("eager", "fusedtrain"):
        model = networks.contestant(who, TRAIN, stock).model
        networks.call(model, TRAIN, *networks.batch_of(TRAIN, "cpu"))()
    assert all(map(torch.equal, before.values(), stock.state_dict().values()))
    assert all(p.grad is None for p in stock.parameters())
    assert all(type(layer).__module__.startswith("torch.nn.") for layer in stock)


@pytest.mark.parametrize(
    ("job", "name"),
    [("inference", "fold_conv_bn"), ("tune", "fold_frozen_norms"), ("train", "convert")],
)
def test_what_is_not_there_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, job: str, name: str
) -> None:
    monkeypatch.setattr(networks, "fusedtrain", SimpleNamespace())
    setup = replace(TRAIN, job=job)
    with pytest.raises(networks.Missing, match=f"has no {name}"):
        networks.contestant("fusedtrain", setup, _network(setup))


def test_saved_bytes() -> None:
    setup = replace(TRAIN, layout="contiguous")
    norm = nn.Sequential(nn.Flatten(), nn.Linear(243, 1000), nn.BatchNorm1d(1000))
    # The input of the norm, its two vectors of statistics, the output of log_softmax, a scalar.
    saved = networks.saved_bytes(norm, setup, *networks.batch_of(setup, "cpu"))
    assert 0 <= saved - 4 * (2 * 4 * 1000 + 2 * 1000) <= 64


# --- networks ---


def test_networks_are_ready() -> None:
    torchvision()
    setup = Setup("tune", "efficientnet_b0", 2, 64)
    network = networks.build(setup, "cpu")
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert network.training
    assert not any(norm.training for norm in norms)
    assert all(norm.momentum != 1.0 for norm in norms)
    images, labels = networks.batch_of(setup, "cpu")
    assert images.is_contiguous(memory_format=torch.channels_last)
    # No dropout: the same twice; and of a size that a trained network has.
    outputs = [network(images) for _ in range(2)]
    assert torch.equal(*outputs)
    assert 1e-3 < float(outputs[0].detach().std()) < 1e3
    assert labels.shape == (2,)
    assert not networks.build(replace(setup, job="inference"), "cpu").training


def test_selection() -> None:
    for device in ("cpu", "cuda"):
        cases = bench.select(Options(device))
        assert {case.op for case in cases} == set(networks.JOBS)
        assert all(case.compiled == (case.op != "tune") for case in cases)
        full = {case.setup for case in bench.select(Options(device, full=True))}
        others = {"contiguous": "channels_last", "channels_last": "contiguous"}
        both = {replace(setup, layout=others[setup.layout]) for setup in full}
        assert full == both > {case.setup for case in cases}
    assert {c.model for c in bench.select(Options(models=("resnet18",)))} == {"resnet18"}
    assert {c.op for c in bench.select(Options(ops=("tune",)))} == {"tune"}
    assert len(bench.select(Options(quick=True))) == len(networks.JOBS)


@pytest.mark.parametrize("job", networks.JOBS)
def test_rows(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "build", lambda setup, device: _network(setup))
    row = measured(bench, bench.Case(replace(TRAIN, job=job)))
    assert (row["job"], row.model, row["batch"]) == (job, "none", 4)
    assert row.ns.keys() == {"fusedtrain", "eager"}
    if job != "inference":
        assert 0 < row["saved"]["fusedtrain"] <= row["saved"]["eager"]
    note = {"train": "converted ", "tune": "folds ", "inference": "folded "}[job]
    assert row["note"].startswith(note)


def test_a_wrong_network_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = networks.contestant

    def wrong(who: str, setup: Setup, stock: nn.Module) -> Any:
        entrant = right(who, setup, stock)
        if who == "fusedtrain":
            entrant.model[7].register_forward_hook(lambda module, inputs, output: 1.02 * output)
        return entrant

    monkeypatch.setattr(networks, "build", lambda setup, device: _network(setup))
    monkeypatch.setattr(networks, "contestant", wrong)
    with pytest.raises(pytest.fail.Exception, match=r"wrong output.*\. Not timed"):
        measured(bench, bench.Case(TRAIN))
