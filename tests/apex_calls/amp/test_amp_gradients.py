"""Scaled and unscaled gradients, at every moment at which somebody may look at them or step."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex import amp
from helpers.amp_runs import (
    BOTH,
    MAKERS,
    backward,
    fail_in_the_middle,
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


def plain_gradients(passes: int = 1) -> nn.Module:
    reference = network()
    with amp.disable_casts():
        for _ in range(passes):
            loss_of(reference).backward()
    return reference


def frozen_sgd(params: Any, **options: Any) -> Any:
    """Steps of it change nothing."""
    return fusedtrain.optim.SGD(params, lr=0.0, **options)


@pytest.mark.parametrize("zero", ["model", "by hand", "in place"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_plain_backward_pass_after_a_step_is_not_unscaled(level: str, zero: str) -> None:
    model, optimizer = start(frozen_sgd, level, loss_scale=1024.0)
    backward(loss_of(model), optimizer)
    optimizer.step()
    if zero == "by hand":
        for p in model.parameters():
            p.grad = None
    else:
        model.zero_grad(set_to_none=zero == "model")
    with amp.disable_casts():
        loss_of(model).backward()
    gradients_alike(model.parameters(), plain_gradients())


def test_zeros_in_place_are_followed_by_the_next_pass() -> None:
    model, optimizer = start(frozen_sgd, "O1", loss_scale=1024.0)
    for stepped in (False, True, False):
        backward(loss_of(model), optimizer)
        if stepped:
            optimizer.step()
        model.zero_grad(set_to_none=False)
    backward(loss_of(model), optimizer)
    gradients_alike(model.parameters(), plain_gradients())


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
def test_looking_while_a_backward_pass_runs(level: str, maker: str) -> None:
    model, optimizer = start(MAKERS[maker], level, loss_scale=1024.0)
    backward(loss_of(model), optimizer, delay_unscale=True)
    norms: list[Tensor] = []

    def look(p: Tensor) -> None:
        assert p.grad is not None
        norms.append(p.grad.norm())

    params = list(model.parameters())
    for p in params:
        p.register_post_accumulate_grad_hook(look)
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
        look(params[0])
    assert len(norms) == len(params) + 1
    gradients_alike(amp.master_params(optimizer), plain_gradients(2))


@BOTH
def test_a_backward_pass_that_raises_leaves_no_gradients(level: str, maker: str) -> None:
    model, optimizer = start(MAKERS[maker], level)
    with pytest.raises(KeyError):
        fail_in_the_middle(loss_of(model), optimizer)
    assert all(p.grad is None for p in model.parameters())
    backward(loss_of(model), optimizer)
    gradients_alike(amp.master_params(optimizer), plain_gradients())


def test_scale_loss_within_itself_is_refused() -> None:
    model, optimizer = start(MAKERS["fused-SGD"], "O1")
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        with pytest.raises(RuntimeError, match="within another"):
            backward(loss_of(model), [optimizer])
        scaled_loss.backward()
    gradients_alike(model.parameters(), plain_gradients())
    with pytest.raises(RuntimeError, match="within another"):
        backward(loss_of(model), [optimizer, optimizer])
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    gradients_alike(model.parameters(), plain_gradients())


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
def test_zero_grad_between_scale_loss_and_its_backward_pass(maker: str) -> None:
    model, optimizer = start(MAKERS[maker], "O1", loss_scale=1024.0)
    backward(loss_of(model), optimizer)
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        optimizer.zero_grad()
        scaled_loss.backward()
    gradients_alike(model.parameters(), plain_gradients())


@BOTH
def test_a_step_within_scale_loss_is_refused(level: str, maker: str) -> None:
    model, optimizer = start(MAKERS[maker], level, loss_scale=1024.0)
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match="after the with statement"):
            optimizer.step()
    gradients_alike(amp.master_params(optimizer), plain_gradients())


@pytest.mark.parametrize("how", ["set", "delete"])
@BOTH
def test_a_gradient_dropped_by_hand_moves_nothing(level: str, maker: str, how: str) -> None:
    model, optimizer = start(MAKERS[maker], level, loss_scale=1024.0)
    backward(loss_of(model), optimizer)
    masters = list(amp.master_params(optimizer))
    before = [p.detach().clone() for p in masters]
    if how == "set":
        masters[0].grad = None
    else:
        del masters[0].grad
    optimizer.step()
    assert [torch.equal(p, q) for p, q in zip(masters, before, strict=True)] == [
        True, *[False] * (len(masters) - 1)
    ]  # fmt: skip


# --- closures


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
def test_closures_under_o1(maker: str) -> None:
    model, optimizer = start(MAKERS[maker], "O1", loss_scale="dynamic")
    reference = network()
    ref_optimizer = MAKERS[maker](reference.parameters())
    calls: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(loss, optimizer)
        calls.append(loss)
        return loss

    for _ in range(3):
        assert optimizer.step(closure) is calls[-1]
        ref_optimizer.zero_grad()
        with amp.disable_casts():
            loss_of(reference).backward()
        ref_optimizer.step()
    moved_alike(model, reference, 0.02)


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
def test_closures_that_overflow(maker: str) -> None:
    model, optimizer = start(MAKERS[maker], "O1", loss_scale="dynamic")
    before = copy.deepcopy(model.state_dict())
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(overflowing(loss) if calls <= 2 else loss, optimizer)
        return loss

    while calls < 3:  # a fused step is skipped, others call the closure again
        assert torch.equal(model[0].weight, before["0.weight"])
        optimizer.step(closure)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**14, "unskipped": 1}
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert all(p.isfinite().all() for p in model.parameters())


# --- who owns a parameter


def test_a_copied_model_is_of_no_optimizer() -> None:
    model, optimizer = start(MAKERS["fused-SGD"], "O1", loss_scale=1024.0)
    twin = copy.deepcopy(model)
    twin_optimizer = MAKERS["fused-SGD"](twin.parameters())
    amp.initialize(twin, twin_optimizer, opt_level="O1", loss_scale=1024.0, verbosity=0)
    for m, o in ((model, optimizer), (twin, twin_optimizer)):
        backward(loss_of(m), o)
        gradients_alike(m.parameters(), plain_gradients())


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
def test_an_optimizer_twice_in_a_list_is_refused(maker: str) -> None:
    model = network()
    optimizer = MAKERS[maker](model.parameters())
    with pytest.raises(RuntimeError, match=r"through amp\.initialize once"):
        amp.initialize(model, [optimizer, optimizer], opt_level="O2", verbosity=0)
    assert model[0].weight.dtype == torch.float32
    images_in, _ = images()
    assert model(images_in).dtype == torch.float32


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
    model, optimizer = start(
        MAKERS[maker], level, cast_model_type=torch.bfloat16, loss_scale="dynamic"
    )
    reference = network()
    plain = MAKERS["torch-SGD"](reference.parameters())
    for i in range(4):
        loss = loss_of(model)
        optimizer.zero_grad()
        backward(overflowing(loss) if i == 1 else loss, optimizer)
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
        optimizer.step()
        plain.zero_grad()
        loss_of(reference).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        if i != 1:
            plain.step()
    assert model[0].weight.dtype == torch.bfloat16
    moved_alike(model, reference, 0.3 if level == "O3" else 0.1)


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
