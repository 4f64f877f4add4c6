"""Optimizers under loss scaling."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain.apex import optimizers as of_apex
from helpers import ROOT
from helpers.optimizer_steps import (
    ALL,
    OF_TORCH,
    assert_close,
    give_gradients,
    parameters,
    same,
    started,
    step,
)
from helpers.optimizers import make


def test_several_optimizers_with_one_scaler() -> None:
    """One finds an inf: it alone skips, and the scale backs off once."""
    runs = [parameters(torch.float32) for _ in range(3)]
    optimizers: list[Any] = [
        make("AdamW", runs[0]),
        make("SGD", runs[1]),
        torch.optim.Adagrad(runs[2]),
    ]
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=8.0))
    for params in runs:
        give_gradients(params, 0, 8.0)
    assert runs[1][0].grad is not None
    runs[1][0].grad[0, 0] = float("inf")
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    start = parameters(torch.float32)
    assert [same(params, start) for params in runs] == [False, True, False]
    scaler.step(optimizers[0])
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizers[0])


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, fusedtrain.amp.GradScaler])
def test_a_step_that_raised_leaves_no_scale(kind: Any) -> None:
    """torch's scaler left it on the optimizer, and the next step divided by the scale twice."""
    p = nn.Parameter(torch.ones(3))
    optimizer = fusedtrain.optim.SGD([p], lr=1.0, ema_decay=0.5)
    scaler = started(kind("cpu", init_scale=8.0))
    for refused in (False, True):
        p.grad = torch.full_like(p, 8.0)
        if refused:
            with optimizer.swap_averages(), pytest.raises(RuntimeError, match="swap_averages"):
                scaler.step(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(p, torch.full_like(p, -1.0))


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, fusedtrain.amp.GradScaler])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@OF_TORCH
def test_several_losses_and_accumulation(name: str, unscale: bool, kind: Any) -> None:
    """As an ordinary run of torch without loss scaling."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()]
    models.append(copy.deepcopy(models[0]))
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    ours = getattr(fusedtrain.optim, name)(models[0].parameters(), lr=0.1)
    theirs = getattr(torch.optim, name)(models[1].parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=4.0)
    for _ in range(3):
        for batch in x:
            y = models[0](batch)
            scaler.scale(y.square().mean()).backward(retain_graph=True)
            scaler.scale(y.sum()).backward()
            y = models[1](batch)
            (y.square().mean() + y.sum()).backward()
        if unscale:
            scaler.unscale_(ours)
            nn.utils.clip_grad_norm_(models[0].parameters(), 0.5)
            nn.utils.clip_grad_norm_(models[1].parameters(), 0.5)
            with pytest.raises(RuntimeError, match="already been called"):
                scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    assert_close(list(models[0].parameters()), list(models[1].parameters()), 64)


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "inf"])
@ALL
def test_float16_gradients(name: str, bad: bool, unscale: bool) -> None:
    """Unscaled in the sweep, or beforehand: the same but for rounding to float16."""
    half = parameters(torch.float16)
    full = [nn.Parameter(p.detach().float()) for p in half]
    optimizers = [make(name, half, state_dtype=torch.float32), make(name, full)]
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=256.0))
    for seed in range(2):
        give_gradients(half, seed, 256.0)
        for p, q in zip(half, full, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float() / 256
        if bad:
            assert half[0].grad is not None
            half[0].grad[1, 1] = float("inf")
        if unscale:
            scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        scaler.update(256.0)
        assert bool(optimizers[0].last_step_skipped) == bad
        if bad:
            assert same(half, parameters(torch.float16))
            continue
        optimizers[1].step()
        assert_close([p.float() for p in half], full, 2.0**14)
        for p, q in zip(half, full, strict=True):
            q.data.copy_(p.detach())


@ALL
def test_a_scaler_that_is_not_enabled(name: str) -> None:
    runs = [parameters(), parameters()]
    optimizers = [make(name, run) for run in runs]
    scaler = fusedtrain.amp.GradScaler("cpu", enabled=False)
    assert scaler.scale(torch.ones(())) == 1
    for seed in range(2):
        give_gradients(runs[0], seed)
        scaler.unscale_(optimizers[0])
        assert scaler.step(optimizers[0], lambda: 7) == 7  # a closure, as without a scaler
        scaler.update()
        step(optimizers[1], runs[1], seed)
    assert same(*runs)
    assert scaler.state_dict() == {}


def test_no_closure_may_be_passed_as_none() -> None:
    """As Accelerate does: `scaler.step(optimizer, closure)`."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = fusedtrain.optim.SGD([p], lr=1.0), fusedtrain.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer, None)
    assert torch.equal(p, torch.zeros(2))
    scaler.update()
    p.grad = torch.ones(2)
    started(scaler)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, lambda: 1)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 1)
    assert torch.equal(p, torch.zeros(2))


def test_a_scale_of_ones_own_multiplies() -> None:
    """As torch has it: who sets ``grad_scale`` has scaled the gradients so."""
    p, q = parameters(), parameters()
    ours, theirs = make("Adam", p), make("Adam", q)
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=4.0))
    give_gradients(p, 0, 4.0 * 8.0)
    ours.grad_scale = torch.tensor(8.0)
    scaler.step(ours)
    assert not hasattr(ours, "grad_scale")
    step(theirs, q, 0)
    assert_close(p, q)


def after_a_step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], kind: Any,
                 bad: bool, seed: int = 0) -> list[torch.Tensor]:  # fmt: skip
    """The gradients that a step under a scaler leaves."""
    scaler = started(kind("cpu", init_scale=1024.0))
    give_gradients(params, seed, 1024.0)
    if bad:
        assert params[0].grad is not None
        params[0].grad[1, 1] = float("inf")
    scaler.step(optimizer)
    return [p.grad for p in params if p.grad is not None]


SCALERS = pytest.mark.parametrize("kind", [torch.amp.GradScaler, fusedtrain.amp.GradScaler])


@SCALERS
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "inf"])
@pytest.mark.parametrize("name", of_apex.__all__)
def test_after_a_step_of_apexs_gradients_are_unscaled(name: str, bad: bool, kind: Any) -> None:
    """As under torch's scaler without us, whatever the device has decided of the step, which is the
    one of unscaled gradients, or leaves no trace."""
    p, q, r = (parameters(torch.float32) for _ in range(3))
    optimizer, plain = (getattr(of_apex, name)(params, lr=0.1) for params in (p, r))
    gradients = after_a_step(optimizer, p, kind, bad)
    expected = after_a_step(torch.optim.SGD(q, lr=0.1), q, torch.amp.GradScaler, bad)
    assert bool(optimizer.last_step_skipped) == bad
    if name == "FusedLAMB" and not bad:
        norm = optimizer.grad_norm
        assert norm > 1
        expected = [grad / norm for grad in expected]
        assert_close(gradients, expected)
    else:
        assert same(gradients, expected)
    if bad:
        assert same(p, r)
    for seed in range(bad, 2):
        step(plain, r, seed)
    after_a_step(optimizer, p, kind, False, seed=1)
    assert same(p, r)


@pytest.mark.parametrize("name", of_apex.__all__)
def test_without_a_scale_apexs_leave_gradients_but_clipped_ones(name: str) -> None:
    p = parameters(torch.float32)
    optimizer = getattr(of_apex, name)(p, lr=0.1)
    give_gradients(p, 0)
    expected = [x.grad.clone() for x in p if x.grad is not None]
    versions = [x.grad._version for x in p if x.grad is not None]
    optimizer.step()
    if name == "FusedLAMB":
        expected = [grad / optimizer.grad_norm for grad in expected]
    else:
        assert versions == [x.grad._version for x in p if x.grad is not None]
    assert_close([x.grad for x in p], expected)
    other = getattr(of_apex, name)(p, lr=0.1, gradient_writeback="none")
    left = after_a_step(other, p, fusedtrain.amp.GradScaler, False)
    give_gradients(p, 0, 1024.0)
    assert same(left, [x.grad for x in p if x.grad is not None])


@SCALERS
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "inf"])
@ALL
def test_after_a_step_of_ours_gradients_are_as_backward_left_them(
    name: str, bad: bool, kind: Any
) -> None:
    """The statement of docs/optimizers.md under its first example."""
    text = (ROOT / "docs/optimizers.md").read_text()
    first = text.split("```python")[1].split("Arguments, defaults")[0]
    assert "After `scaler.step`, `.grad` is still scaled and unclipped" in first
    p, q = parameters(torch.float32), parameters(torch.float32)
    left = after_a_step(make(name, p, max_grad_norm=0.5), p, kind, bad)
    give_gradients(q, 0, 1024.0)
    if bad:
        assert q[0].grad is not None
        q[0].grad[1, 1] = float("inf")
    assert same(left, [x.grad for x in q if x.grad is not None])
    unscaled = after_a_step(make(name, p, gradient_writeback="unscaled"), p, kind, bad)
    assert same(unscaled, [x / 1024 for x in left])


class Simulated:
    """The loss scale in plain Python."""

    def __init__(self, hysteresis: int, low: float, high: float) -> None:
        self.scale, self.good, self.left = 256.0, 0, hysteresis
        self.hysteresis, self.low, self.high = hysteresis, low, high

    def update(self, bad: bool) -> float:
        if bad:
            self.good = 0
            self.left = max(self.left - 1, 0)
            if self.left == 0:
                self.scale /= 2
        else:
            self.left = self.hysteresis
            self.good += 1
            if self.good == 3:
                self.good, self.scale = 0, self.scale * 4
        self.scale = min(max(self.scale, self.low), self.high)
        return self.scale


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("hysteresis", "low", "high"),
    [(1, 0.0, float("inf")), (1, 64.0, 2048.0), (2, 0.0, float("inf")), (3, 128.0, 1024.0)],
)
def test_the_scale_over_time(hysteresis: int, low: float, high: float, seed: int) -> None:
    choose = random.Random(seed)
    p = nn.Parameter(torch.ones(3))
    optimizer = make("SGD", [p])
    options = {"init_scale": 256.0, "growth_factor": 4.0, "growth_interval": 3}
    options |= {"hysteresis": hysteresis, "min_scale": low or None}
    options |= {"max_scale": None if high == float("inf") else high}
    scaler = started(fusedtrain.amp.GradScaler("cpu", **options))
    simulated = Simulated(hysteresis, low, high)
    for number in range(60):
        bad = choose.random() < 0.45
        p.grad = torch.full_like(p, float("nan") if bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == simulated.update(bad)
        if number % 7 == 3:
            scaler = pickle.loads(pickle.dumps(scaler))
        elif number % 7 == 5:
            saved = scaler.state_dict()
            scaler = fusedtrain.amp.GradScaler("cpu", **{**options, "init_scale": 2.0})
            if number % 2:
                started(scaler)
            scaler.load_state_dict(saved)
        started(scaler)
        assert scaler.get_scale() == simulated.scale


def test_the_scalers_state_dict_is_torchs() -> None:
    ours, theirs = (
        kind("cpu", init_scale=64.0) for kind in (fusedtrain.amp.GradScaler, torch.amp.GradScaler)
    )
    assert ours.state_dict() == theirs.state_dict()
    theirs.load_state_dict(fusedtrain.amp.GradScaler("cpu", hysteresis=2).state_dict())
    with_hysteresis = fusedtrain.amp.GradScaler("cpu", hysteresis=2)
    with_hysteresis.load_state_dict(theirs.state_dict())
