"""The benchmark of Apex's calls: who is wrong is not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import bench_apex as bench
from benchmarks.harness import apex as of
from benchmarks.harness.cases import Options
from fusedtrain.advisor.bench.gate import NotTheJob
from fusedtrain.apex.amp._functions import switch_autocast
from helpers.benchmarks import measured

CASES = [(level, rule, job) for level, rule in (*bench.SCRIPTS, *bench.MORE) for job in of.JOBS]


@pytest.fixture(autouse=True)
def _no_casts() -> Iterator[None]:
    yield
    switch_autocast(frozenset())


def small(who: str, level: str, rule: str, job: str, **options: Any) -> tuple[Any, Any]:
    rules, data = of.RULES[rule], of.gate_data("cpu")
    options = {"lr": rules.gate_lr, "weight_decay": of.DECAY, **options}
    return of.contestant(who, level, rules, job, data, **options), data


def test_bytes_that_must_be_moved() -> None:
    """Gradients twice, weights and states once each way, float16 weights besides."""
    sgd, adam = of.RULES["FusedSGD"], of.RULES["FusedAdam"]
    assert of.bytes_moved("O1", adam, [(5, 2)]) == 10 * (8 + 8 + 16)
    assert of.bytes_moved("O2", sgd, [(5, 2)]) == 10 * (4 + 8 + 8 + 2)
    norm = 2 * 5 * (8 + 8 + 8)
    assert of.bytes_moved("O2", sgd, [(5, 2), (5,), (5,)]) == 10 * 22 + norm


@pytest.mark.parametrize(("level", "rule", "job"), CASES, ids="-".join)
def test_the_gate_lets_all_pass(level: str, rule: str, job: str) -> None:
    for who in of.contestants(level, job):
        entrant, data = small(who, level, rule, job)
        of.check(entrant, of.RULES[rule], job, data)


@pytest.mark.parametrize("who", ["fusedtrain", "own", "masters"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lr": 0.0}, "wrong weight"),
        ({"lr": 0.102}, "wrong weight"),
        ({"weight_decay": 0.0}, "wrong weight"),
        ({"momentum": 0.88}, "wrong weight"),
    ],
    ids=str,
)
def test_the_gate_stops_who_is_wrong(who: str, changed: dict[str, float], message: str) -> None:
    for job in of.JOBS:
        entrant, data = small(who, "O2", "FusedSGD", job, **changed)
        with pytest.raises(NotTheJob, match=message):
            of.check(entrant, of.RULES["FusedSGD"], job, data)


def _wrapped(wrap: Callable[[Any, Callable[[], object]], object]) -> Callable[[Any], None]:
    """Spoils an entrant: ``wrap(entrant, right)`` takes the place of its right call."""

    def spoil(entrant: Any) -> None:
        entrant.call = partial(wrap, entrant, entrant.call)

    return spoil


def _times(factor: float) -> Callable[[Any], None]:
    """Gradients that are off."""
    return _wrapped(lambda entrant, right: ([g.mul_(factor) for g in entrant.grads], right()))


def _no_rounded_copy(entrant: Any, right: Callable[[], object]) -> None:
    kept = entrant.params[0].detach().clone()
    right()
    entrant.params[0].data.copy_(kept)


def _never_skips(entrant: Any, right: Callable[[], object]) -> None:
    for g in entrant.grads:
        g.nan_to_num_(posinf=1.0)
    right()


def _scale_that_stays(entrant: Any) -> None:
    entrant.scale = lambda: 1.0


@pytest.mark.parametrize("who", ["fusedtrain", "own", "masters"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_times(1 / of.GATE_SCALE), "wrong"),
        (_times(-1.0), "wrong"),
        (_times(1.02), "wrong"),
        (_wrapped(_no_rounded_copy), "are not the float32 weights, rounded|wrong weight"),
        (_wrapped(_never_skips), "not skipped"),
        (_scale_that_stays, "did not halve"),
    ],
    ids=["not scaled", "sign", "two percent", "no copy", "no skip", "scale"],
)
def test_the_gate_stops_who_does_less(who: str, spoil: Any, message: str) -> None:
    entrant, data = small(who, "O2", "FusedSGD", "step")
    spoil(entrant)
    with pytest.raises(NotTheJob, match=message):
        of.check(entrant, of.RULES["FusedSGD"], "step", data)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gate_stops_who_does_not_clip(level: str) -> None:
    for who in of.contestants(level, "step"):
        entrant, data = small(who, level, "FusedSGD", "step")
        with pytest.raises(NotTheJob, match="wrong weight"):
            of.check(entrant, of.RULES["FusedSGD"], "clip", data)


def test_a_timed_call_can_be_repeated() -> None:
    """Gradients are the same before each, and stay far from denormal numbers."""
    data = bench._tensors("efficientnet_b0", "cpu", tiny=True)
    for who in of.contestants("O2", "clip"):
        entrant = of.contestant(who, "O2", of.RULES["FusedSGD"], "clip", data, lr=bench.LR)
        before = [w.detach().clone() for w in data.values]
        for _ in range(2):
            entrant.ready()
            gradients = [g.clone() for g in entrant.grads]
            entrant.call()
            assert entrant.scale() == of.SCALE
        entrant.ready()
        assert all(map(torch.equal, gradients, entrant.grads))
        assert min(float(g.abs().min()) for g in gradients) / of.SCALE > 2**-14
        weights = entrant.weights()
        assert not any(map(torch.equal, weights, before))
        assert max(float((a.detach() - b).abs().max()) for a, b in zip(weights, before)) < 1e-3


def test_cases() -> None:
    cases = bench.select(Options())
    assert len(cases) == 8
    assert len(bench.select(Options(full=True))) == 16
    assert {case.model for case in bench.select(Options(quick=True))} == {"efficientnet_b0"}
    ops = {case.op for case in bench.select(Options(ops=("O1+FusedSGD",)))}
    assert ops == {"O1+FusedSGD"}
    assert bench.select(Options(models=("vit_l_16",))) == []


@pytest.mark.parametrize("job", of.JOBS)
def test_rows(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "shapes", lambda model: [(16, 8), (16,), (16,)] * 20)
    row = measured(bench, bench.Case("small", "O2", "FusedSGD", job))
    who = set(of.contestants("O2", job))
    assert row.ns.keys() == who | {"copy"}
    assert row["host_ns"].keys() == row["counts"].keys() == who
    assert row.ratio.keys() == who - {"fusedtrain"}
    assert (row.op, row.numel, row["tensors"]) == ("O2+FusedSGD", 20 * 160, 60)
    assert row["bytes"] == 20 * (128 * 22 + 32 * 24)
    assert row["counts"]["fusedtrain"] > row["counts"]["own"] > 0
