"""Apex's amp: gradients are unscaled before anybody looks at them, and once; accumulation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain.apex import amp
from fusedtrain.apex.optimizers import FusedSGD
from helpers.amp_runs import (
    BOTH,
    MAKERS,
    backward,
    gradients_alike,
    images,
    loss_of,
    moved_alike,
    network,
    overflowing,
    start,
)

ON_THE_GPU_TOO = True  # the tests make tensors on the default device: see conftest.py

pytestmark = pytest.mark.usefixtures("one_thread")

# --- gradients that are looked at


@BOTH
def test_gradients_of_master_params_are_unscaled(level: str, maker: str) -> None:
    model, optimizer = start(MAKERS[maker], level)
    backward(loss_of(model), optimizer)
    reference = network()
    loss_of(reference).backward()
    gradients_alike(amp.master_params(optimizer), reference)


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD", "fused-LAMB"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_clipping_before_the_step(level: str, maker: str) -> None:
    make = MAKERS[maker]
    model, optimizer = start(make, level, loss_scale="dynamic")
    reference = network().double()
    ref_optimizer = make(reference.parameters())
    x, y = images()
    for _ in range(5):
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.3)
        optimizer.step()
        ref_optimizer.zero_grad()
        nn.functional.cross_entropy(reference(x.double()), y).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        ref_optimizer.step()
        assert norm.item() == pytest.approx(expected.item(), rel=0.03)
    moved_alike(model, reference, 0.05)


def test_looking_at_gradients_changes_nothing() -> None:
    results = []
    for looks in (False, True):
        model, optimizer = start(MAKERS["fused-SGD"], "O1")
        for _ in range(3):
            optimizer.zero_grad()
            backward(loss_of(model), optimizer)
            if looks:
                assert all(p.grad.abs().max() < 100 for p in model.parameters())
            optimizer.step()
        results.append(model.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_hooks_of_the_step_see_unscaled_gradients_and_change_nothing(level: str) -> None:
    results = []
    for hooked in (False, True):
        model, optimizer = start(MAKERS["fused-SGD"], level)
        largest: list[float] = []

        def look(which: Any, *_: Any, largest: list[float] = largest) -> None:
            grads = [p.grad for p in amp.master_params(which) if p.grad is not None]
            largest.append(max(float(g.abs().max()) for g in grads))

        if hooked:
            optimizer.register_step_pre_hook(look)
            optimizer.register_step_post_hook(look)
        for i in range(4):
            optimizer.zero_grad()
            loss = loss_of(model)
            backward(overflowing(loss) if i == 2 else loss, optimizer)
            optimizer.step()
        if hooked:
            assert all(0 < value < 100 for value in largest[:4] + largest[6:])
        results.append(model.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-6, atol=1e-6)


def test_gradients_after_the_step_are_unscaled() -> None:
    model, optimizer = start(MAKERS["fused-SGD"], "O1")
    backward(loss_of(model), optimizer)
    optimizer.step()
    reference = network()
    loss_of(reference).backward()
    gradients_alike(model.parameters(), reference)


def test_gradients_set_by_hand_are_used() -> None:
    model, optimizer = start(lambda p: fusedtrain.optim.SGD(p, lr=1.0), "O2")
    backward(loss_of(model), optimizer)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    for p in amp.master_params(optimizer):
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    for p, old in zip(amp.master_params(optimizer), before, strict=True):
        torch.testing.assert_close(p, old - 0.5)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_were_zeroed_are_added_to_nothing(level: str) -> None:
    """Apex's FusedSGD zeroes them, and one that no backward pass reaches still decays."""
    model, reference = network(), network()
    for m in (model, reference):
        m.register_parameter("unused", nn.Parameter(torch.ones(3)))
    model[1].register_parameter("unused", nn.Parameter(torch.ones(3)))  # float32 under O2, too
    reference[1].register_parameter("unused", nn.Parameter(torch.ones(3)))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    ref_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model[1].unused.grad = torch.ones(3)
    reference[1].unused.grad = torch.ones(3)
    for _ in range(3):
        optimizer.zero_grad()
        assert torch.equal(model[1].unused.grad, torch.zeros(3))
        backward(loss_of(model), optimizer)
        optimizer.step()
        ref_optimizer.zero_grad(set_to_none=False)
        with amp.disable_casts():
            loss_of(reference).backward()
        ref_optimizer.step()
    assert torch.allclose(model[1].unused, reference[1].unused, atol=1e-6)
    assert model[1].unused.max() < 0.98
    assert torch.equal(model.unused, torch.ones_like(model.unused))
    moved = [(m[4].weight.float() - network()[4].weight).flatten() for m in (model, reference)]
    assert (moved[0] - moved[1]).norm() < 0.05 * moved[1].norm()


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
def test_a_backward_pass_outside_scale_loss_adds_to_unscaled_gradients(maker: str) -> None:
    model, optimizer = start(MAKERS[maker], "O1")
    reference = network()
    for m in (model, reference):
        backward(loss_of(model), optimizer) if m is model else loss_of(m).backward()
        with amp.disable_casts():
            loss_of(m).backward()
    gradients_alike(model.parameters(), reference)


# --- accumulation


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD", "fused-Adam"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_accumulation(level: str, maker: str, delay: bool) -> None:
    make = MAKERS[maker]
    model, optimizer = start(make, level, loss_scale="dynamic")
    reference = network().double()
    ref_optimizer = make(reference.parameters())
    x, y = images()
    for _ in range(4):
        for k in range(3):
            part = slice(20 * k, 20 * (k + 1))
            backward(loss_of(model, part) / 3, optimizer, delay_unscale=delay and k < 2)
            (nn.functional.cross_entropy(reference(x[part].double()), y[part]) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        ref_optimizer.step()
        ref_optimizer.zero_grad()
    moved_alike(model, reference, 0.05)


@BOTH
def test_an_overflow_anywhere_in_an_accumulation_skips(level: str, maker: str) -> None:
    model, optimizer = start(MAKERS[maker], level)
    before = copy.deepcopy(model.state_dict())
    for k in range(3):
        loss = loss_of(model)
        backward(overflowing(loss) if k == 0 else loss, optimizer)
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(before[name].to(p.dtype), p), name
    # One overflow, then two passes without.
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 2}
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert not torch.equal(before["0.weight"].to(model[0].weight.dtype), model[0].weight)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
def test_delayed_gradients_follow_a_changed_scale(maker: str) -> None:
    model, optimizer = start(MAKERS[maker], "O1", num_losses=1)
    other = nn.Linear(4, 1)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other, other_optimizer = amp.initialize(other, other_optimizer, opt_level="O1", verbosity=0)
    backward(loss_of(model), optimizer, delay_unscale=True)
    backward(overflowing(other(torch.ones(1, 4)).sum()), other_optimizer)  # halves the scale
    backward(loss_of(model), optimizer)
    reference = network()
    (2 * loss_of(reference)).backward()
    gradients_alike(model.parameters(), reference)


def test_a_step_on_delayed_gradients_is_refused() -> None:
    model, optimizer = start(MAKERS["fused-SGD"], "O2")
    backward(loss_of(model), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="delay_unscale"):
        optimizer.step()
