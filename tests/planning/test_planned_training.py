"""Training under a plan: scaled losses, averages, released gradients, two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedtrain
from fusedtrain import MemoryPlan, plan_memory, planning
from fusedtrain._graph.forward import rewritten_of
from fusedtrain.planning._meter import Running
from helpers.norm_models import UNet
from helpers.planned_networks import EXAMPLES, Attention, Convolutions
from helpers.rank_processes import results_of_two_ranks

STEPS = 3
Trained = list[Tensor]


def scaled(model: nn.Module, batches: Tensor) -> Trained:
    """Autocast, a loss scale of which one step overflows, clipping and averages."""
    optimizer = fusedtrain.optim.AdamW(
        model.parameters(), lr=1e-2, max_grad_norm=0.5, ema_decay=0.9
    )
    scaler = fusedtrain.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    losses = []
    for number, x in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        scaler.scale(loss * (torch.inf if number == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    averages = [state["ema"] for state in optimizer.state.values()]
    return [*losses, *model.parameters(), *averages]


def released(model: nn.Module, batches: Tensor) -> Trained:
    optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with optimizer.release_gradients(model):
        for x in batches:
            loss = model(x).float().square().mean()
            loss.backward()
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            losses.append(loss.detach())
    return [*losses, *model.parameters()]


def in_parallel(rank: int, model: nn.Module, batches: Tensor) -> Trained:
    """Gradients that are averaged while backward goes on; the plan travels with the model."""
    model = copy.deepcopy(model)  # torch.multiprocessing hands both ranks the same memory
    ranks = DistributedDataParallel(model)
    optimizer = fusedtrain.optim.SGD(ranks.parameters(), lr=0.1)
    losses = []
    for x in batches:
        loss = ranks(x.chunk(2)[rank]).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "attention":
        return Attention(), torch.randint(50, (STEPS, 4, 24))
    model = Convolutions() if name == "convolutions" else UNet(4)
    return model, torch.randn(STEPS, 4, 3, 32, 32)


@cache
def plan_of(name: str, autocast: bool = False) -> MemoryPlan:
    model, batches = network(name)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plan = plan_memory(model, batches[0], 0.75 if name == "skips" else 0.7)
    assert plan.recomputed
    return plan


@pytest.mark.parametrize("name", ["convolutions", "attention", "skips"])
@pytest.mark.parametrize("train", [scaled, released])
def test_training_has_the_bits_of_store(
    name: str, train: Callable[[nn.Module, Tensor], Trained]
) -> None:
    plan = plan_of(name, train is scaled)
    results = []
    for memory in ("store", plan):
        model, batches = network(name)
        fusedtrain.convert(model, memory=memory)
        torch.manual_seed(1)
        results.append(train(model, batches))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_store(tmp_path: Path) -> None:
    results = []
    for memory in ("store", plan_of("skips")):
        model, batches = network("skips")
        fusedtrain.convert(model, memory=memory)
        folder = tmp_path / str(len(results))
        folder.mkdir()
        results.append(results_of_two_ranks(in_parallel, folder, model, batches))
    for rank in range(2):
        for ours, theirs in zip(results[0][rank], results[1][rank], strict=True):
            assert torch.equal(ours, theirs)


def test_the_time_is_that_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = EXAMPLES["convolutions"]()
    now = [0.0]

    def timed(model: nn.Module, running: Running) -> None:
        step(model, running)
        rewritten = rewritten_of(model)
        planned = rewritten is not None and isinstance(rewritten.recomputes, MemoryPlan)
        now[0] += 0.005 if planned else 0.003

    step = planning._step
    monkeypatch.setattr(planning, "_step", timed)
    monkeypatch.setattr(planning.time, "perf_counter", lambda: now[0])
    plan = plan_memory(model, x, 0.8)
    assert plan.recomputed
    assert plan.milliseconds == pytest.approx(3.0)
    assert plan.extra_milliseconds == pytest.approx(2.0)
    assert "67% more time (2.0 ms a step, and 3.0 ms by convert alone)" in str(plan)
