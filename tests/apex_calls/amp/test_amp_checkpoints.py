"""Apex's amp: what is saved and loaded, before, after and amid everything else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain.apex import amp
from helpers.amp_runs import (
    FP16,
    MAKERS,
    backward,
    initialized,
    loss_of,
    network,
    overflowing,
    start,
)
from helpers.optimizer_steps import alike, saved_and_loaded

ON_THE_GPU_TOO = True  # the tests make tensors on the default device: see conftest.py

pytestmark = pytest.mark.usefixtures("one_thread")


def train(model: nn.Module, optimizer: Any, overflows: bool = False) -> None:
    for i in range(4):
        loss = loss_of(model)
        optimizer.zero_grad()
        backward(overflowing(loss) if overflows and i == 1 else loss, optimizer)
        optimizer.step()


@pytest.mark.parametrize("order", ["model first", "optimizer first", "before initialize"])
@pytest.mark.parametrize(
    "maker", ["torch-Adam", "torch-SGD", "fused-SGD", "fused-Adam", "fused-LAMB"]
)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", FP16])
def test_a_checkpoint_goes_on_bit_for_bit(level: str, maker: str, order: str) -> None:
    before = order == "before initialize" and level != FP16  # which loads masters at last
    model, optimizer = start(MAKERS[maker], level)
    train(model, optimizer, overflows=level != "O0")
    parts = {"model": model, "optimizer": optimizer, "amp": amp}
    saved = saved_and_loaded({name: part.state_dict() for name, part in parts.items()})
    train(model, optimizer)

    other = network(seed=3)
    other_optimizer = MAKERS[maker](other.parameters())
    if before:
        other.load_state_dict(saved["model"])
        other_optimizer.load_state_dict(saved["optimizer"])
    other, other_optimizer = initialized(other, other_optimizer, level)
    loads = [(other, "model"), (other_optimizer, "optimizer")]
    if order == "optimizer first" and level != FP16:
        loads.reverse()
    for target, name in () if before else loads:
        target.load_state_dict(saved[name])
    if level != FP16:
        amp.load_state_dict(saved["amp"])
    train(other, other_optimizer)
    pairs = zip(amp.master_params(optimizer), amp.master_params(other_optimizer), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    assert alike(other.state_dict(), model.state_dict())
    if level == FP16:
        assert other_optimizer.loss_scale == optimizer.loss_scale == 2.0**15


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD", "fused-Adam"])
@pytest.mark.parametrize("how", ["in place", "data"])
@pytest.mark.parametrize("steps", [False, True], ids=["read", "step"])
def test_masters_follow_what_is_written_to_the_model(maker: str, how: str, steps: bool) -> None:
    model, optimizer = start(MAKERS[maker], "O2", loss_scale=64.0)
    train(model, optimizer)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    weight, masters = model[0].weight, list(amp.master_params(optimizer))
    with torch.no_grad():
        masters[-1].add_(1.0)  # of a script that writes to masters: the next step takes it
    kept = [master.detach().clone() for master in masters[1:]]
    if how == "data":
        weight.data = torch.full_like(weight, 0.3)
    else:
        with torch.no_grad():
            weight.fill_(0.3)
    if steps:
        optimizer.step()
    else:
        next(amp.master_params(optimizer))  # reading follows, too
        assert all(map(torch.equal, masters[1:], kept))
    assert torch.equal(next(amp.master_params(optimizer)), weight.float())
    assert torch.equal(weight, torch.full_like(weight, 0.3))
    if maker.startswith("fused"):
        weights = fusedtrain.optim.float32_state_dict(model, optimizer)
        assert torch.equal(weights["0.weight"], weight.float())


def test_a_moving_average_made_of_a_copy_is_not_lost() -> None:
    """timm's ModelEma writes into what state_dict of its copy returns."""
    model, optimizer = start(MAKERS["fused-SGD"], "O2", loss_scale=64.0)
    average = copy.deepcopy(model)
    train(model, optimizer)
    with torch.no_grad():
        for mean, value in zip(average.state_dict().values(), model.state_dict().values()):
            mean.copy_(value)
    assert model.state_dict()["0.weight"].dtype == torch.float32
    for p, q in zip(average.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
