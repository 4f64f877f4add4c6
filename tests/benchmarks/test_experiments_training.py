"""Experiments that train: what they compare is right, and their judges know both answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.experiments import (
    accumulation,
    data_parallel,
    large_batch,
    networks,
    retained_graph,
)
from benchmarks.experiments.experiment import Run
from benchmarks.experiments.models import small_resnet
from helpers.experiments import QUICK, judged, measured

pytestmark = pytest.mark.usefixtures("one_thread")


# --- accumulation ---


@pytest.mark.parametrize("micro", [2, 4])
def test_accumulated_gradient_is_the_batch_s_without_batch_norm(micro: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).double()
    images, labels = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(10, (8,))
    F.cross_entropy(model(images), labels).backward()
    exact = [p.grad for p in model.parameters()]
    model.zero_grad()
    accumulation.accumulate(model, images, labels, micro)
    for param, wanted in zip(model.parameters(), exact, strict=True):
        torch.testing.assert_close(param.grad, wanted, rtol=1e-12, atol=1e-14)


def test_batch_norm_sees_micro_batches() -> None:
    model = small_resnet(QUICK, 4)
    assert accumulation.difference(model, QUICK, 4, frozen=True) < accumulation.SAME
    assert accumulation.difference(model, QUICK, 4, frozen=False) > 0.01


def _accumulated(mb: float, frozen: float, norm: float) -> dict[str, dict[str, float]]:
    runs = {}
    for who in accumulation.OPTIMIZERS:
        runs[accumulation.label_of(1, who)] = {"s": 1.0, "mb": 100.0}
        for micro in accumulation.MICRO[1:]:
            runs[accumulation._alone(micro)] = {"mb": 10.0, "gradients": 2.0}
            runs[accumulation.label_of(micro, who)] = {
                "s": 1.0, "mb": mb, "ratio": 1.2, "low": 1.1, "high": 1.3, "frozen": frozen,
                "norm": norm,
            }  # fmt: skip
    return runs


@pytest.mark.slow
def test_accumulation() -> None:
    assert measured("accumulation")[1][0].holds
    assert judged("accumulation", _accumulated(12.0, 1e-13, 40.0)) == [True, True]
    assert judged("accumulation", _accumulated(30.0, 1.0, 40.0)) == [False, False]


# --- large batches ---


def _accuracies(line: float, sgd: float, lars: float, lamb: float) -> dict[str, dict[str, float]]:
    labels = (large_batch.LINE, large_batch.SGD, large_batch.LARS, large_batch.LAMB)
    return {
        label: {"accuracy": value, "seed0": value - 0.3, "seed1": value + 0.3}
        for label, value in zip(labels, (line, sgd, lars, lamb), strict=True)
    }


@pytest.mark.slow
def test_large_batch() -> None:
    runs, _ = measured("large_batch")
    assert all(0 <= run.numbers["accuracy"] <= 100 for run in runs.values())
    made = _accuracies(90.0, 80.0, 90.2, 70.0)
    assert judged("large_batch", made) == [True, False]
    mixed = {label: dict(numbers) for label, numbers in made.items()}
    mixed[large_batch.LAMB] |= {"seed0": 89.7, "seed1": 85.0}
    assert judged("large_batch", mixed) == [True, None]


def test_verdict_says_so_if_sgd_does_as_well() -> None:
    made = _accuracies(90.0, 90.1, 90.0, 90.0)
    runs = {label: Run(label, numbers) for label, numbers in made.items()}
    words = [verdict.words for verdict in large_batch.EXPERIMENT.judge(runs, QUICK)]
    assert all("SGD needs no help" in text for text in words)


def test_rates_warm_up_and_fall() -> None:
    rates = [large_batch.rate_at(step, 20, 2.0) for step in range(20)]
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert max(rates) == pytest.approx(2.0)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] < 0.05


# --- losses with their graph ---


def test_a_loss_keeps_its_graph_only_without_backward() -> None:
    torch.manual_seed(0)
    model, images = small_resnet(QUICK, 4), torch.randn(4, 3, 8, 8)
    labels = torch.randint(10, (4,))
    graph = retained_graph._graph_megabytes(model, images, labels)
    more = {
        way: retained_graph.growth(model, way, images, labels, QUICK)
        for way in (retained_graph.EVALUATED, retained_graph.TRAINED, retained_graph.ITEM)
    }
    growths, nodes = more[retained_graph.EVALUATED]
    assert growths == pytest.approx([graph] * len(growths), rel=0.05)
    assert nodes > 10
    for way in (retained_graph.TRAINED, retained_graph.ITEM):
        assert max(more[way][0]) < 0.01 * graph
    assert more[retained_graph.TRAINED][1] == nodes
    assert more[retained_graph.ITEM][1] == 0


def _kept(trained: float, evaluated: float, item: float) -> dict[str, dict[str, float]]:
    ways = {retained_graph.TRAINED: trained, retained_graph.EVALUATED: evaluated}
    ways |= {retained_graph.ITEM: item}
    return {
        retained_graph.label_of(way, who): {
            "slope": mb, "low": mb, "high": mb, "graph": 10.0, "nodes": 60.0,
        }
        for way, mb in ways.items()
        for who in (retained_graph.TORCH, retained_graph.OURS)
    }  # fmt: skip


def test_retained_graph() -> None:
    assert judged("retained_graph", _kept(0.0, 10.0, 0.0)) == [False, True, True]
    assert judged("retained_graph", _kept(10.0, 0.0, 10.0)) == [True, False, False]
    assert judged("retained_graph", _kept(4.0, 4.0, 0.0)) == [None, None, True]


# --- data parallel ---


@pytest.mark.slow
def test_ddp_is_one_process_with_the_whole_batch() -> None:
    runs, verdicts = measured("data_parallel")
    assert runs[data_parallel.SYNC].numbers["off"] < 1e6 * data_parallel.SAME
    assert runs[data_parallel.LOCAL].numbers["off"] > 1.0  # the comparison notices other statistics
    assert [verdict.holds for verdict in verdicts] == [True, None]


def _parallel(off: float, ddp: tuple[float, float, float]) -> dict[str, dict[str, float]]:
    speed = {"gain": 1.5, "low": 1.4, "high": 1.6}
    return {
        data_parallel.ONE: {"ms": 1.0, "off": 0.0},
        data_parallel.SYNC: {"ms": 1.0, "off": off, **speed},
        data_parallel.LOCAL: {"ms": 1.0, "off": 1e4, **speed},
        data_parallel.THREADS: {
            "ms": 1.0, **speed, **dict(zip(("ddp", "ddp_low", "ddp_high"), ddp, strict=True)),
        },
    }  # fmt: skip


def test_data_parallel_verdicts() -> None:
    assert judged("data_parallel", _parallel(1e-9, (1.5, 1.4, 1.6))) == [True, True]
    assert judged("data_parallel", _parallel(10.0, (0.7, 0.6, 0.8))) == [False, False]
    assert judged("data_parallel", _parallel(10.0, (1.0, 0.9, 1.1))) == [False, None]


# --- networks ---


def _network(
    gain: tuple[float, float, float], mb: float, recompute: float
) -> dict[str, dict[str, float]]:
    case = networks.cases(QUICK)[0]
    speed = dict(zip(("gain", "low", "high"), gain, strict=True))
    return {
        case.label(networks.EAGER): {"speed": 100.0, "mb": 1000.0},
        case.label(networks.OURS): {"speed": 100.0, "mb": mb, **speed},
        case.label(networks.RECOMPUTE): {"speed": 100.0, "mb": recompute, **speed},
    }


@pytest.mark.slow
def test_networks() -> None:
    runs, _ = measured("networks")
    case = networks.cases(QUICK)[0]
    for who in (networks.EAGER, networks.OURS, networks.RECOMPUTE):
        assert runs[case.label(who)].numbers["speed"] > 0, runs[case.label(who)].note
    assert runs[case.label(networks.COMPILED)].note.startswith("left out of a quick run")
    assert judged("networks", _network((1.1, 1.05, 1.2), 700, 500)) == [True, True, True]
    assert judged("networks", _network((0.9, 0.85, 0.95), 1000, 999)) == [False, False, False]
    assert judged("networks", _network((1.0, 0.9, 1.1), 700, 500)) == [None, True, True]


@pytest.mark.slow
def test_a_network_with_another_loss_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contestant that computes something else gets no numbers, and the claim does not hold."""
    honest = networks.contestant

    def wrong(who: str, stock: nn.Module) -> nn.Module:
        model = honest(who, stock)
        if who == networks.OURS:
            nn.init.constant_(model.fc.bias[:500], 5.0)  # type: ignore[index, union-attr]
        return model

    monkeypatch.setattr(networks, "contestant", wrong)
    case = networks.cases(QUICK)[0]
    runs = {run.label: run for run in networks.measured(case, (networks.OURS,), QUICK, {})}
    run = runs[case.label(networks.OURS)]
    assert not run.numbers
    assert run.note.startswith("refused")
    assert networks.EXPERIMENT.judge(runs, QUICK)[0].holds is False
