"""Apex's amp: opt levels, loss scales, several models, optimizers and losses. What FP16_Optimizer
has in common with amp is tested here and in test_amp_gradients.py, as one more level."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex import amp
from helpers.amp_runs import (
    BOTH,
    EVERY,
    FP16,
    LEVELS,
    MAKERS,
    ApexScale,
    Twins,
    backward,
    fail_in_the_middle,
    gradients_alike,
    images,
    initialized,
    loss_of,
    moved_alike,
    network,
    overflowing,
    saved_scale,
    scaler_of,
    start,
    wait_for_the_device,
)

ON_THE_GPU_TOO = True  # the tests make tensors on the default device: see conftest.py

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, SKIPPED = 12, (2, 5, 6)
# Difference from float64 after the same steps: of a loss, and of all weights as a share of the
# way that training took them.
ACCURACY = {
    "O0": (1e-5, 1e-3), "O1": (5e-3, 0.04), "O2": (5e-3, 0.04), "O3": (1e-2, 0.1),
    FP16: (5e-3, 0.04),
}  # fmt: skip


# O3 keeps states in float16, where the squares that Adam and LAMB average are 0.
@pytest.mark.parametrize(
    ("level", "maker"),
    [(lv, name) for lv in ACCURACY for name in MAKERS if lv != "O3" or name.endswith("SGD")],
)
@pytest.mark.parametrize("clip", [None, 0.3], ids=["", "clipped"])
def test_levels_against_float64(level: str, maker: str, clip: float | None) -> None:
    twins = Twins(level, maker, loss_scale="dynamic")
    of_loss, of_weight = ACCURACY[level]
    losses = []
    for i in range(STEPS):
        loss, expected, *norms = twins.train(i in SKIPPED, clip)
        assert abs(loss - expected) <= of_loss
        losses.append(loss)
        if norms and i in SKIPPED:
            assert norms[0] == -1 if level == FP16 else not math.isfinite(norms[0])
        elif norms:
            assert norms[0] == pytest.approx(norms[1], rel=0.03)
        if level == FP16:
            assert twins.optimizer.overflow == (i in SKIPPED)
    assert losses[-1] < losses[0] - 0.03
    moved_alike(twins.model, twins.plain, of_weight)
    assert scaler_of(twins.optimizer).loss_scale() == 2.0**13
    masters = amp.master_params(twins.optimizer)
    for master, p in zip(masters, twins.model.parameters(), strict=True):
        assert torch.equal(master.to(p.dtype), p)


def test_dtypes_of_each_level() -> None:
    x, _ = images()
    for level in LEVELS:
        model, optimizer = start(MAKERS["fused-SGD"], level)
        conv, norm = model[0], model[1]
        half = torch.float16 if level in ("O2", "O3") else torch.float32
        assert conv.weight.dtype == half
        assert norm.weight.dtype == (torch.float16 if level == "O3" else torch.float32)
        assert norm.running_var.dtype == norm.weight.dtype
        masters = list(amp.master_params(optimizer))
        assert {p.dtype for p in masters} == {half if level == "O3" else torch.float32}
        assert (masters[0] is conv.weight) == (level != "O2")
        assert model(x).dtype == (torch.float16 if level == "O1" else torch.float32)
        model, _ = start(MAKERS["fused-SGD"], level, cast_model_outputs=torch.bfloat16)
        assert model(x).dtype == torch.bfloat16


@EVERY
def test_history_of_the_scale_is_apex_rule(level: str, maker: str) -> None:
    choose = random.Random(7)
    options = {"init_scale": 2.0**15, "scale_window": 5} if level == FP16 else {}
    model, optimizer = start(
        MAKERS[maker], level, max_loss_scale=2.0**17, min_loss_scale=2.0**12, **options
    )
    scaler = scaler_of(optimizer)
    scaler._growth_interval = 5  # Apex's 2000 would take as many steps
    oracle = ApexScale(options.get("init_scale", 2.0**16), window=5)
    oracle.low, oracle.high = 2.0**12, 2.0**17
    applied = 0
    for _ in range(60):
        overflow = choose.random() < 0.25
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        backward(overflowing(loss_of(model)) if overflow else loss_of(model), optimizer)
        optimizer.step()
        oracle.update(overflow)
        same = all(map(torch.equal, before, amp.master_params(optimizer)))
        assert same == overflow
        if level == FP16:
            assert (optimizer.inspect_master_grad_data() is None) == overflow
        applied += not overflow
        assert (scaler.loss_scale(), scaler._unskipped) == (oracle.scale, oracle.unskipped)
        optimizer.zero_grad()
    assert 0 < applied < 60
    assert saved_scale(optimizer) == {"loss_scale": oracle.scale, "unskipped": oracle.unskipped}


# --- several models, optimizers, losses


@BOTH
@pytest.mark.parametrize("num_losses", [1, 3])
def test_three_losses_two_optimizers(level: str, maker: str, num_losses: int) -> None:
    make = MAKERS[maker]
    models = [network(1), network(2)]
    references = [copy.deepcopy(m).double() for m in models]
    optimizers = [make(m.parameters()) for m in models]
    ref_optimizers = [make(m.parameters()) for m in references]
    models, optimizers = amp.initialize(
        models, optimizers, opt_level=level, verbosity=0, num_losses=num_losses
    )
    assert isinstance(models, list)
    assert isinstance(optimizers, list)
    x, y = images()

    def losses(first: nn.Module, second: nn.Module, x: Tensor) -> list[Tensor]:
        a, b = first(x).to(x.dtype), second(x).to(x.dtype)
        both = nn.functional.cross_entropy(a + b, y)
        return [nn.functional.cross_entropy(a, y), nn.functional.cross_entropy(b, y), both]

    owners = ([0], [1], [0, 1])
    for i in range(4):
        three = losses(models[0], models[1], x)
        for k in range(3):
            loss = overflowing(three[k]) if (i, k) == (1, 1) else three[k]
            chosen = [optimizers[o] for o in owners[k]]
            options = {"loss_id": k} if num_losses == 3 else {}
            with amp.scale_loss(loss, chosen, **options) as scaled_loss:
                scaled_loss.backward(retain_graph=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected = losses(references[0], references[1], x.double())
        sum(expected).backward()
        for o, optimizer in enumerate(ref_optimizers):
            if (i, o) != (1, 1):  # its second model overflowed
                optimizer.step()
            optimizer.zero_grad()
    for i, (model, reference) in enumerate(zip(models, references, strict=True)):
        moved_alike(model, reference, 0.05, seed=i + 1)
    scales = [s["loss_scale"] for s in amp.state_dict().values()]
    assert scales == ([2.0**16, 2.0**15, 2.0**16] if num_losses == 3 else [2.0**15])


def test_two_optimizers_of_one_loss_both_skip() -> None:
    models = [network(1), network(2)]
    optimizers = [
        MAKERS["fused-SGD"](models[0].parameters()),
        MAKERS["torch-SGD"](models[1].parameters()),
    ]
    models, optimizers = amp.initialize(models, optimizers, opt_level="O2", verbosity=0)
    before = [copy.deepcopy(m.state_dict()) for m in models]
    loss = overflowing(loss_of(models[0])) + loss_of(models[1])  # infs in the first alone
    backward(loss, optimizers)
    for optimizer in optimizers:
        optimizer.step()
    for model, old in zip(models, before, strict=True):
        for name, p in model.named_parameters():
            assert torch.equal(p, old[name].to(p.dtype))


# --- small print


@EVERY
@pytest.mark.parametrize("scale", ["128.0", 1])
def test_static_scale(level: str, maker: str, scale: Any) -> None:
    twins = Twins(level, maker, loss_scale=scale)
    assert scaler_of(twins.optimizer).loss_scale() == float(scale)
    twins.backward()
    masters = list(amp.master_params(twins.optimizer))
    gradients_alike(masters, twins.plain)
    twins.step()
    for _ in range(3):
        twins.train()
    moved_alike(twins.model, twins.plain, 0.04)
    twins.zero_grad()
    # Apex does not look for infs under a static scale.
    backward(overflowing(loss_of(twins.model)), twins.optimizer)
    twins.optimizer.step()
    assert not all(p.isfinite().all() for p in masters)
    if scale != 1:  # the loss is returned as it is
        assert saved_scale(twins.optimizer) == {"loss_scale": 128.0, "unskipped": 5}


def test_parameters_without_gradient_and_frozen_ones() -> None:
    model = network()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    model[0].weight.requires_grad_(False)
    optimizer = fusedtrain.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    frozen = model[0].weight.detach().clone()
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert frozen.dtype == torch.float16
    assert torch.equal(model[0].weight, frozen)
    assert torch.equal(model.unused, torch.ones(3).half())


@EVERY
def test_groups_added_later(level: str, maker: str) -> None:
    model, plain = network(), network()
    plain_optimizer = MAKERS[maker](plain[:2].parameters())
    model, optimizer = initialized(model, MAKERS[maker](model[:2].parameters()), level)
    inner = optimizer.optimizer if level == FP16 else optimizer
    for step in range(4):
        if step == 1:
            for optimizer_, some in ((inner, model), (plain_optimizer, plain)):
                optimizer_.add_param_group({"params": list(some.parameters())[3:], "lr": 0.02})
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        optimizer.step()
        plain_optimizer.zero_grad()
        with amp.disable_casts():
            loss_of(plain).backward()
        plain_optimizer.step()
    assert optimizer.param_groups[1]["lr"] == 0.02
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2]
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    moved_alike(model, plain, 0.02)


@BOTH
def test_schedulers_and_channels_last(level: str, maker: str) -> None:
    model = network().to(memory_format=torch.channels_last)
    optimizer = MAKERS[maker](model.parameters())
    early = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    twins = Twins("O0", maker)
    twins.model, twins.optimizer = initialized(model, optimizer, level)
    late = torch.optim.lr_scheduler.StepLR(twins.optimizer, 1, 0.5)
    lr = optimizer.param_groups[0]["lr"]
    for _ in range(3):
        twins.plain_optimizer.param_groups[0]["lr"] = twins.optimizer.param_groups[0]["lr"]
        twins.train()
        early.step()
        late.step()
    assert twins.optimizer.param_groups[0]["lr"] == pytest.approx(lr * 0.25**3)
    moved_alike(twins.model, twins.plain, 0.05)


def test_models_are_copied_and_pickled() -> None:
    model, optimizer = start(MAKERS["fused-SGD"], "O2")
    backward(loss_of(model), optimizer)
    x, _ = images()
    model.eval()
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        assert {type(p) for p in other.parameters()} == {nn.Parameter}
    optimizer.step()
    assert not torch.equal(model(x), expected)


def test_an_exception_in_the_backward_pass_leaves_what_was_there() -> None:
    for maker in ("torch-SGD", "fused-SGD"):
        model, optimizer = start(MAKERS[maker], "O1")
        backward(loss_of(model), optimizer)
        kept = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(KeyError):
            fail_in_the_middle(loss_of(model), optimizer)
        for p, grad in zip(model.parameters(), kept, strict=True):
            assert torch.equal(p.grad, grad)


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
def test_a_grad_scaler_steps_the_optimizer_too(maker: str) -> None:
    model, optimizer = start(MAKERS[maker], "O1")
    scaler = fusedtrain.amp.GradScaler(torch.get_default_device().type)
    before = model[0].weight.detach().clone()
    for overflows in (True, False):
        loss = loss_of(model)
        scaler.scale(overflowing(loss) if overflows else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(model[0].weight, before) == overflows
    assert scaler.get_scale() == 2.0**15
    assert (model[0].weight - before).abs().max() < 0.1


def test_disabled_does_nothing() -> None:
    model, reference = network(), network()
    optimizer = MAKERS["torch-SGD"](model.parameters())
    same_model, same_optimizer = amp.initialize(model, optimizer, enabled=False)
    assert same_model is model
    assert same_optimizer is optimizer
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    loss_of(reference).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("level", ["O2", FP16])
def test_what_is_printed(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in (True, False):
        model = network()
        optimizer = MAKERS["fused-SGD"](model.parameters())
        model, optimizer = initialized(model, optimizer, level, verbose)
        selected = "Selected optimization level O2" in capsys.readouterr().out
        assert selected == (verbose and level != FP16)
        backward(overflowing(loss_of(model)), optimizer)
        wait_for_the_device()
        optimizer.step()
        text = capsys.readouterr().out
        if verbose:
            assert "Skipping step, loss scaler 0 reducing loss scale to 32768.0" in text
        else:
            assert text == ""


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_second_initialize_takes_the_parameters_over(
    maker: str, gone: bool, delayed: bool
) -> None:
    model, first = start(MAKERS[maker], "O1")
    backward(loss_of(model), first, delay_unscale=delayed)
    if gone:
        first = None
        gc.collect()
    second = MAKERS["fused-Adam"](model.parameters())
    model, second = amp.initialize(model, second, opt_level="O1", verbosity=0)
    reference = network()
    loss_of(reference).backward()
    if not (gone and delayed):  # gradients of the first are unscaled
        gradients_alike(model.parameters(), reference)
    second.zero_grad()
    backward(loss_of(model), second)
    gradients_alike(model.parameters(), reference)
    if not gone:
        with pytest.raises(RuntimeError, match=r"later amp\.initialize"):
            backward(loss_of(model), first)
