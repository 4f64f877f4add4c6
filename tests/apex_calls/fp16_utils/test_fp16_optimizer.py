"""FP16_Optimizer: masters, scales, accumulation, clipping, closures, checkpoints."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex.fp16_utils import FP16_Optimizer, network_to_half
from fusedtrain.apex.optimizers import FusedSGD
from helpers.amp_runs import (
    ApexScale,
    gradients_alike,
    images,
    moved_alike,
    network,
    overflowing,
    wait_for_the_device,
)

ON_THE_GPU_TOO = True  # the tests make tensors on the default device: see conftest.py

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = {"torch": torch.optim.SGD, "fused": FusedSGD}
ARGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def start(kind: str, **options: Any) -> tuple[nn.Module, FP16_Optimizer]:
    model = network_to_half(network())
    return model, FP16_Optimizer(KINDS[kind](model.parameters(), **ARGS), verbose=False, **options)


def loss_of(model: nn.Module, part: slice = slice(None)) -> Tensor:
    x, y = images()
    output = model(x[part])
    return nn.functional.cross_entropy(
        output if output.dtype is torch.double else output.float(), y[part]
    )


def reference() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network().double()
    model.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    return model, torch.optim.SGD(model.parameters(), **ARGS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_against_float64(kind: str, options: dict[str, Any], clip: float | None) -> None:
    model, optimizer = start(kind, **options)
    truth, plain = reference()
    for i in range(8):
        bad = i in (2, 5) and optimizer.dynamic_loss_scale
        loss = loss_of(model)
        optimizer.zero_grad()
        optimizer.backward(overflowing(loss) if bad else loss)
        if clip is not None:
            norm = optimizer.clip_master_grads(clip)
            assert (norm == -1) == bad
        optimizer.step()
        assert optimizer.overflow == bad
        plain.zero_grad()
        loss_of(truth).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(truth.parameters(), clip)
        if not bad:
            plain.step()
    moved_alike(model, truth, 0.04)
    assert optimizer.loss_scale == (2.0**14 if optimizer.dynamic_loss_scale else 128)
    assert model[1][0].weight.dtype == torch.float16
    assert model[1][1].weight.dtype == torch.float32
    for master, p in zip(
        optimizer.all_fp32_from_fp16_params, optimizer.all_fp16_params, strict=True
    ):
        assert torch.equal(master.half(), p)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("zeroed", [True, False])
def test_gradients_add_up_until_they_are_zeroed(kind: str, update: bool, zeroed: bool) -> None:
    # At 65536 the sum of three overflows in float16.
    options = {"init_scale": 1024.0}
    model, optimizer = start(kind, dynamic_loss_scale=True, dynamic_loss_args=options)
    truth, plain = reference()
    for i in range(3):
        if zeroed:
            optimizer.zero_grad()
            plain.zero_grad()
        for k in range(3):
            part = slice(20 * k, 20 * (k + 1))
            optimizer.backward(loss_of(model, part), update_master_grads=update)
            loss_of(truth, part).backward()
        if not update:
            optimizer.update_master_grads()
        grads = optimizer.inspect_master_grad_data()
        assert grads is not None
        assert [len(group) for group in grads] == [5]
        if i == 0:  # later on the rounded weights are others
            params = [p for group in optimizer.param_groups for p in group["params"]]
            gradients_alike(params, truth)
        optimizer.step()
        plain.step()
    moved_alike(model, truth, 0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_follows_the_rule(kind: str) -> None:
    model, optimizer = start(
        kind, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**12, "scale_window": 3}
    )
    oracle = ApexScale(2.0**12, window=3)
    for overflow in (0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0):
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(overflowing(loss) if overflow else loss)
        optimizer.step()
        oracle.update(bool(overflow))
        assert optimizer.loss_scale == oracle.scale
        assert (optimizer.inspect_master_grad_data() is None) == bool(overflow)


@pytest.mark.parametrize("kind", KINDS)
def test_closures_are_called_again_after_an_overflow(kind: str) -> None:
    model, optimizer = start(kind, dynamic_loss_scale=True)
    truth, plain = reference()
    bad = [False, True, True, False, False]
    calls = iter(bad)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(overflowing(loss) if next(calls) else loss)
        return loss

    for _ in range(3):
        assert optimizer.step(closure).isfinite()
        plain.zero_grad()
        loss_of(truth).backward()
        plain.step()
    assert next(calls, None) is None
    assert optimizer.loss_scale == 2.0**14
    moved_alike(model, truth, 0.04)
    model[1][4].weight.data.fill_(float("nan"))
    calls = iter([False] * 10_000)
    with pytest.raises(RuntimeError, match="not finite at a loss scale"):
        optimizer.step(closure)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_continue_bit_for_bit(kind: str) -> None:
    model, optimizer = start(kind, dynamic_loss_scale=True)

    def train(model: nn.Module, optimizer: FP16_Optimizer, steps: int) -> None:
        for i in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model)
            optimizer.backward(overflowing(loss) if i == 1 else loss)
            optimizer.step()

    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 3)
    file.seek(0)
    saved = torch.load(file)  # tensors and numbers only
    resumed, other = start(kind, dynamic_loss_scale=True)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(resumed, other, 3)
    for a, b in zip(model.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert other.loss_scale == optimizer.loss_scale == 2.0**14
    for a, b in zip(
        optimizer.all_fp32_from_fp16_params, other.all_fp32_from_fp16_params, strict=True
    ):
        assert torch.equal(a, b)
    weight = other.all_fp16_params[0]
    with torch.no_grad():
        weight.fill_(0.3)  # a checkpoint has what others have written to the model
    assert torch.equal(other.state_dict()["fp32_from_fp16"][0][0], weight.float())


def test_mistakes() -> None:
    _, optimizer = start("fused")
    _, smaller = start("fused")
    saved = copy.deepcopy(smaller.state_dict())
    saved["fp32_from_fp16"][0].pop()
    with pytest.raises(ValueError, match="fp32_from_fp16"):
        optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="serialized using state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match=r"Received torch\.float64"):
        FP16_Optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2).double())], lr=0.1))
    sparse = nn.Embedding(4, 2, sparse=True).half()
    wrapped = FP16_Optimizer(torch.optim.SGD(sparse.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="sparse gradient"):
        wrapped.backward(sparse(torch.tensor([1])).float().sum())


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = start("fused", dynamic_loss_scale=True)
    optimizer.verbose = True
    optimizer.backward(overflowing(loss_of(model)))
    wait_for_the_device()
    optimizer.step()
    assert "Skipping step, loss scaler 0 reducing loss scale to 32768.0" in capsys.readouterr().out


def _refuse(grad: Tensor) -> Tensor:
    raise KeyError


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_pass_that_raises_leaves_no_gradients(kind: str) -> None:
    model, optimizer = start(kind, static_loss_scale=64.0)
    hook = model[1][2].register_forward_hook(lambda *args: args[2].register_hook(_refuse) and None)
    with pytest.raises(KeyError):
        optimizer.backward(loss_of(model))
    assert all(p.grad is None for p in model.parameters())
    hook.remove()
    optimizer.backward(loss_of(model))
    truth, _ = reference()
    loss_of(truth).backward()
    gradients_alike((p for g in optimizer.param_groups for p in g["params"]), truth)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_is_dropped_after_an_overflow(kind: str) -> None:
    model, optimizer = start(kind, dynamic_loss_scale=True)
    before = model[1][4].weight.detach().clone()
    optimizer.backward(overflowing(loss_of(model)))
    optimizer.backward(loss_of(model))  # adds to infs and NaNs
    assert optimizer.overflow
    optimizer.step()
    assert torch.equal(model[1][4].weight, before)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    optimizer.step()
    assert not torch.equal(model[1][4].weight, before)


def test_parameters_by_group() -> None:
    model = network_to_half(network())
    groups = [{"params": model[1][:2].parameters()}, {"params": model[1][2:].parameters()}]
    optimizer = FP16_Optimizer(fusedtrain.optim.SGD(groups, **ARGS), verbose=False)
    conv, norm, linear = model[1][0], model[1][1], model[1][4]
    assert [[id(p) for p in group] for group in optimizer.fp16_groups] == [
        [id(conv.weight)], [id(linear.weight), id(linear.bias)],
    ]  # fmt: skip
    assert [[p.dtype for p in group] for group in optimizer.fp32_from_fp16_groups] == [
        [torch.float32], [torch.float32] * 2,
    ]  # fmt: skip
    assert [[id(p) for p in group] for group in optimizer.fp32_from_fp32_groups] == [
        [id(norm.weight), id(norm.bias)], [],
    ]  # fmt: skip
    optimizer.param_groups = optimizer.param_groups[:1]
    assert len(optimizer.optimizer.param_groups) == 1
    optimizer.state = optimizer.state


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_added_to_the_inner_optimizer(kind: str) -> None:
    model, (truth, _) = network_to_half(network()), reference()
    optimizer = FP16_Optimizer(
        KINDS[kind](model[1][:2].parameters(), **ARGS), static_loss_scale=128.0
    )
    plain = torch.optim.SGD(truth[:2].parameters(), **ARGS)
    for step in range(4):
        if step == 1:
            optimizer.optimizer.add_param_group({"params": model[1][4].parameters()})
            plain.add_param_group({"params": truth[4].parameters()})
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        optimizer.step()
        plain.zero_grad()
        loss_of(truth).backward()
        plain.step()
    assert [len(group) for group in optimizer.fp32_from_fp16_groups] == [1, 2]
    moved_alike(model, truth, 0.02)
