"""Scaled and unscaled gradients: read, clipped, added up, skipped, given to closures."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex import amp
from fusedtrain.apex.optimizers import FusedSGD
from helpers.amp_runs import (
    BOTH,
    EVERY,
    FP16,
    MAKERS,
    Twins,
    backward,
    fail_in_the_middle,
    gradients_alike,
    loss_of,
    moved_alike,
    network,
    overflowing,
    saved_scale,
    start,
)

ON_THE_GPU_TOO = True  # the tests make tensors on the default device: see conftest.py

pytestmark = pytest.mark.usefixtures("one_thread")


def plain_gradients(passes: int = 1) -> nn.Module:
    reference = network()
    with amp.disable_casts():
        for _ in range(passes):
            loss_of(reference).backward()
    return reference


def frozen_sgd(params: Any, **options: Any) -> Any:
    """Steps of it change nothing."""
    return fusedtrain.optim.SGD(params, lr=0.0, **options)


@pytest.mark.parametrize("clip", [None, 1e6], ids=["", "clipped"])
@pytest.mark.parametrize("skipped", [False, True], ids=["", "skipped"])
def test_gradients_written_back_are_unscaled_once(skipped: bool, clip: float | None) -> None:
    options = {"gradient_writeback": "unscaled", "max_grad_norm": clip}
    model, optimizer = start(lambda p: frozen_sgd(p, **options), "O1")
    loss, last = loss_of(model), list(model.parameters())[-1]
    if skipped:  # one infinite gradient
        loss = loss + last.float().flatten()[0] * float("inf")
    backward(loss, optimizer)
    optimizer.step()
    assert bool(optimizer.last_step_skipped) == skipped
    reference = plain_gradients()
    if skipped:
        for p in (last, list(reference.parameters())[-1]):
            assert p.grad is not None
            p.grad.flatten()[0] = 0.0
    gradients_alike(model.parameters(), reference)


@BOTH
def test_a_step_and_scale_loss_within_scale_loss_are_refused(level: str, maker: str) -> None:
    model, optimizer = start(MAKERS[maker], level, loss_scale=1024.0)
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        with pytest.raises(RuntimeError, match="within another"):
            backward(loss_of(model), [optimizer])
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match="after the with statement"):
            optimizer.step()
    gradients_alike(amp.master_params(optimizer), plain_gradients())
    with pytest.raises(RuntimeError, match="within another"):
        backward(loss_of(model), [optimizer, optimizer])
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    gradients_alike(amp.master_params(optimizer), plain_gradients())


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
def test_zero_grad_between_scale_loss_and_its_backward_pass(maker: str) -> None:
    model, optimizer = start(MAKERS[maker], "O1", loss_scale=1024.0)
    backward(loss_of(model), optimizer)
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        optimizer.zero_grad()
        scaled_loss.backward()
    gradients_alike(model.parameters(), plain_gradients())


@pytest.mark.parametrize("kind", [torch.optim.SGD, fusedtrain.optim.SGD])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_set_by_hand_are_used(level: str, kind: Any) -> None:
    model, optimizer = start(lambda p: kind(p, lr=1.0), level, loss_scale=1024.0)
    backward(loss_of(model), optimizer)
    masters = list(amp.master_params(optimizer))
    before = [p.detach().clone() for p in masters]
    for p in masters:
        p.grad = torch.full_like(p, 0.5)
    masters[0].grad = None
    optimizer.step()
    for p, old, moved in zip(masters, before, [0.0, *[0.5] * 4], strict=True):
        torch.testing.assert_close(p, old - moved)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_of_gradients() -> None:
    """The scale is in neither of two derivatives, also where gradients add up."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    reference = copy.deepcopy(model)
    model, optimizer = amp.initialize(
        model, MAKERS["torch-SGD"](model.parameters()), verbosity=0, loss_scale=1024.0
    )

    def of_gradients(some: nn.Module) -> Tensor:
        return torch.stack([p.grad.square().sum() for p in some.parameters() if p.grad is not None])

    for create_graph in (False, True):
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        with amp.disable_casts():
            loss_of(reference).backward(create_graph=create_graph)
    gradients_alike(model.parameters(), reference)
    penalty, expected = of_gradients(model).sum(), of_gradients(reference).sum()
    torch.testing.assert_close(penalty, expected, rtol=0.03, atol=0.0)
    optimizer.zero_grad()
    backward(penalty, optimizer)
    reference.zero_grad()
    with amp.disable_casts():
        expected.backward()
    gradients_alike(model.parameters(), reference)


# --- closures


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
@pytest.mark.parametrize("level", ["O1", FP16])
def test_closures(level: str, maker: str) -> None:
    twins = Twins(level, maker, loss_scale="dynamic")
    model, optimizer = twins.model, twins.optimizer
    overflows = [False, True, True, False, False]
    calls = iter(overflows)
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses.append(loss_of(model))
        backward(overflowing(losses[-1]) if next(calls) else losses[-1], optimizer)
        return losses[-1]

    # A fused step of amp is skipped, others call the closure again.
    skips = level == "O1" and maker == "fused-SGD"
    for skipped in overflows if skips else [False] * 3:
        before = [p.detach().clone() for p in model.parameters()]
        assert optimizer.step(closure) is losses[-1]
        assert all(map(torch.equal, before, model.parameters())) == skipped
        if not skipped:
            twins.plain_optimizer.zero_grad()
            loss_of(twins.plain).backward()
            twins.plain_optimizer.step()
    assert next(calls, None) is None
    assert saved_scale(optimizer) == {"loss_scale": 2.0**14, "unskipped": 2}
    moved_alike(model, twins.plain, 0.02 if level == "O1" else 0.04)


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
def test_a_closure_that_always_overflows(maker: str) -> None:
    model, optimizer = start(MAKERS[maker], FP16)
    next(model.parameters()).data.fill_(float("nan"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        return torch.zeros(())

    with pytest.raises(RuntimeError, match="not finite at a loss scale"):
        optimizer.step(closure)


# --- who owns a parameter


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_and_its_model_are_freed(level: str) -> None:
    import gc
    import weakref

    model, optimizer = start(MAKERS["fused-SGD"], level)
    backward(loss_of(model), optimizer)
    optimizer.step()
    of_optimizer, of_weight = weakref.ref(optimizer), weakref.ref(model[0].weight)
    del optimizer
    gc.collect()
    assert of_optimizer() is None
    assert of_weight() is not None
    del model
    gc.collect()
    assert of_weight() is None


def test_gradients_in_the_scripts_own_memory_stay_there() -> None:
    for maker in ("torch-SGD", "fused-SGD"):
        model, optimizer = start(MAKERS[maker], "O1")
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        parts = flat.split([p.numel() for p in model.parameters()])
        for p, part in zip(model.parameters(), parts, strict=True):
            p.grad = part.view_as(p)
        for _ in range(2):
            backward(loss_of(model), optimizer)
        gradients_alike(model.parameters(), plain_gradients(2))
        expected = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert flat.abs().max() > 0
        assert torch.equal(flat, expected)
        with pytest.raises(KeyError):
            fail_in_the_middle(loss_of(model), optimizer)
        assert torch.equal(flat, expected)
        assert all(p.grad._base is flat for p in model.parameters())


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_bfloat16(level: str, maker: str) -> None:
    twins = Twins(level, maker, cast_model_type=torch.bfloat16, loss_scale="dynamic")
    for i in range(4):
        twins.train(overflows=i == 1, clip=0.5)
    assert twins.model[0].weight.dtype == torch.bfloat16
    moved_alike(twins.model, twins.plain, 0.3 if level == "O3" else 0.1)


@pytest.mark.cpu_only
def test_o1_on_a_device_without_autocast_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(frozen_sgd, "O1")
    loss = loss_of(model)
    monkeypatch.setattr(amp._amp_state, "devices", frozenset({"cuda"}))
    with pytest.raises(RuntimeError, match="the model is on cpu, but was on cuda"):
        backward(loss, optimizer)
    monkeypatch.undo()


def test_zero_grad_lets_go_of_gradients() -> None:
    model, optimizer = start(frozen_sgd, "O1")
    backward(loss_of(model), optimizer)
    kept = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    assert [reference() for reference in kept] == [None] * len(kept)


def test_averages_are_those_of_the_model_under_o2() -> None:
    model, optimizer = start(lambda p: fusedtrain.optim.SGD(p, lr=0.5, ema_decay=0.5), "O2")
    for _ in range(3):
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        optimizer.step()
    low, (master, average) = model[4].weight, optimizer.averaged_parameters()[3]
    trained, value = low.detach().clone(), master.detach().clone()
    with optimizer.swap_averages():
        assert torch.equal(low, average.half())
        assert not torch.equal(low, trained)
    assert torch.equal(low, trained)
    assert torch.equal(master, value)


# --- gradients that are looked at


@EVERY
def test_gradients_of_master_params_are_unscaled(level: str, maker: str) -> None:
    model, optimizer = start(MAKERS[maker], level)
    backward(loss_of(model), optimizer)
    gradients_alike(amp.master_params(optimizer), plain_gradients())


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
@pytest.mark.parametrize(
    ("level", "zeroed"),  # a step of O2 drops gradients of masters
    [("O0", True), ("O1", True), ("O1", False), ("O2", True), (FP16, True), (FP16, False)],
)
@pytest.mark.parametrize("delay", [False, True], ids=["", "delayed"])
def test_accumulation(level: str, zeroed: bool, maker: str, delay: bool) -> None:
    """Gradients add up over the passes of a step, and over steps where they are not zeroed."""
    # At 65536 a sum of all would overflow in float16.
    scale = {"init_scale": 1024.0} if level == FP16 else {"max_loss_scale": 1024.0}
    twins = Twins(level, maker, loss_scale="dynamic", **scale)
    for i in range(4):
        for k in range(3):
            # FP16_Optimizer ends all passes by another call.
            twins.backward(slice(20 * k, 20 * (k + 1)), delay and (k < 2 or level == FP16))
        if level == FP16:
            twins.optimizer.update_master_grads()
            assert [len(group) for group in twins.optimizer.inspect_master_grad_data()] == [5]
        if i == 0:  # later on the rounded weights are others
            gradients_alike(amp.master_params(twins.optimizer), twins.plain)
        twins.step()
        if zeroed:
            twins.zero_grad()
    moved_alike(twins.model, twins.plain, 0.05)


@EVERY
def test_an_overflow_anywhere_in_an_accumulation_skips(level: str, maker: str) -> None:
    model, optimizer = start(MAKERS[maker], level)
    before = [p.detach().clone() for p in model.parameters()]
    for k in range(3):
        loss = loss_of(model)
        backward(overflowing(loss) if k == 0 else loss, optimizer)
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    # One overflow, then two passes without; FP16_Optimizer sees the infs in the masters' gradients.
    scale = {"loss_scale": 2.0**15, "unskipped": 2}
    expected = {"loss_scale": 2.0**13, "unskipped": 0} if level == FP16 else scale
    assert saved_scale(optimizer) == expected
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
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
