"""Every option of the optimizers beside torch's: clipping, averages, precision."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.models import timm
from helpers.optimizer_steps import (
    ALL,
    OF_TORCH,
    alike,
    assert_close,
    copies,
    give_gradients,
    parameters,
    same,
    started,
    step,
)
from helpers.optimizers import CLASSES, make


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm"),
        ({"max_grad_norm": "x"}, TypeError, "max_grad_norm"),
        ({"agc": -1.0}, ValueError, "agc"),
        ({"agc": 0.1, "max_grad_norm": 1.0}, ValueError, "together"),
        ({"agc_eps": float("nan")}, ValueError, "agc_eps"),
        ({"agc_eps": None}, TypeError, "agc_eps"),
        ({"ema_decay": 1.0}, ValueError, "ema_decay"),
        ({"gradient_writeback": "all"}, ValueError, "gradient_writeback"),
        ({"state_dtype": torch.float16}, ValueError, "state_dtype"),
        ({"master_weights": "x"}, ValueError, "'split24' or 'split32'"),
        ({"master_weights": True, "stochastic_rounding": True}, ValueError, "together"),
        ({"max_norm": 1.0}, TypeError, "unexpected keyword argument 'max_norm'"),
    ],
    ids=str,
)
@ALL
def test_bad_options(name: str, options: dict[str, Any], error: Any, message: str) -> None:
    p = parameters()
    with pytest.raises(error, match=message):
        make(name, p, **options)
    assert same(p, parameters())


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
@pytest.mark.parametrize("scale", [None, 1024.0])
@OF_TORCH
def test_max_grad_norm(name: str, scale: float | None, max_norm: float) -> None:
    p, q = parameters(), parameters()
    groups = [{"params": p[:2], "lr": 0.03}, {"params": p[2:]}]
    ours = getattr(fusedtrain.optim, name)(groups, lr=0.1, max_grad_norm=max_norm)
    theirs = getattr(torch.optim, name)([{"params": q[:2], "lr": 0.03}, {"params": q[2:]}], lr=0.1)
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=scale or 1.0))
    for seed in range(4):
        give_gradients(p, seed, scale or 1.0)
        give_gradients(q, seed)
        for params in (p, q):
            if seed == 2:
                params[1].grad = None
        norm = nn.utils.clip_grad_norm_(q, max_norm)
        theirs.step()
        if scale is None:
            ours.step()
        else:
            scaler.step(ours)
            scaler.update(scale)
        assert ours.grad_norm is not None
        assert float(ours.grad_norm) == pytest.approx(float(norm), rel=1e-6)
    assert_close(p, q, 64)
    ours.max_grad_norm = None
    theirs.step()
    give_gradients(p, 9)
    give_gradients(q, 9)


def test_max_grad_norm_may_change_between_steps() -> None:
    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = fusedtrain.optim.SGD([p], lr=1.0)
    for max_norm, want in ((None, 2.0), (1.0, 1.0), (0.5, 0.5), (None, 2.0)):
        optimizer.max_grad_norm = max_norm
        p.data.zero_()
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert float(p.detach().norm()) == pytest.approx(want, rel=1e-5)
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.max_grad_norm = -1.0
    assert optimizer.max_grad_norm is None


@pytest.mark.parametrize("factor", [0.01, 0.3])
@pytest.mark.parametrize("lay", ["contiguous", "reversed", "sliced"])
@OF_TORCH
def test_agc_is_timms(name: str, lay: str, factor: float) -> None:
    clip = importlib.import_module(timm().__name__ + ".utils.agc").adaptive_clip_grad
    shapes = [(4, 3, 2, 2), (5, 700), (7,), (), (1, 9), (6, 2, 3), (3, 1, 1, 1), (5, 4)]
    p, q = parameters(shapes=shapes), parameters(shapes=shapes)
    for x in (p[7], q[7]):
        x.data[2] = 0.0  # a unit whose weights count as eps
    for x in p:
        order = list(range(x.dim()))[::-1]
        if lay == "reversed":
            x.data = x.data.permute(order).contiguous().permute(order)
        elif lay == "sliced" and x.dim():
            x.data = torch.stack([x.data, x.data], -1)[..., 1]
    ours = getattr(fusedtrain.optim, name)(p, lr=0.1, agc=factor, agc_eps=1e-2)
    theirs = getattr(torch.optim, name)(q, lr=0.1)
    for seed in range(3):
        give_gradients(p, seed)
        give_gradients(q, seed)
        for x in (p[0], q[0]):
            assert x.grad is not None
            x.grad[1] *= 1e-8  # below timm's least norm
        clip(q, factor, eps=1e-2)
        ours.step()
        theirs.step()
    assert_close(p, q, 64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@ALL
def test_averages_are_those_of_a_loop(name: str, dtype: torch.dtype) -> None:
    """timm's ModelEmaV3 after every step that is not skipped, also where gradients are missing."""
    p = parameters(dtype)
    optimizer = make(name, p, ema_decay=0.75)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    averages = [x.detach().to(wide, copy=True) for x in p]
    for seed in range(8):
        give_gradients(p, seed)
        if seed < 3:  # no gradient yet, but another writer
            p[1].grad = None
        if seed == 2:
            with torch.no_grad():
                p[1].fill_(5.0)
        if seed in (3, 4):
            p[0].grad = p[4].grad = None
        elif seed == 5:
            optimizer.zero_grad()
        skip = seed == 4
        optimizer.found_inf = torch.tensor(float(skip))  # type: ignore[attr-defined]
        optimizer.step()
        if not skip:
            for average, x in zip(averages, p, strict=True):
                average.lerp_(x.detach().to(wide), 0.25)
    # The average of 16-bit parameters takes the weights before they are rounded.
    limit = 8.0 if dtype is not torch.bfloat16 else 2.0**17
    for (x, average), want, weight in zip(
        optimizer.averaged_parameters(), averages, p, strict=True
    ):
        assert x is weight
        assert_close(average, want, limit)


@ALL
def test_swap_averages(name: str) -> None:
    p = parameters(torch.float32)
    p.append(nn.Parameter(torch.ones(3)))  # never has a gradient
    optimizer = make(name, p, ema_decay=0.9)
    for seed in range(3):
        step(optimizer, p[:-1], seed)
    before, states = copies(p), copy.deepcopy(optimizer.state_dict())
    averages = [a.detach().clone() for _, a in optimizer.averaged_parameters()]
    addresses = [x.data_ptr() for x in p]
    with optimizer.swap_averages():
        assert same(p, averages)
        assert not same(p, before)
    assert same(p, before)

    class Stop(Exception):
        pass

    with pytest.raises(Stop), optimizer.swap_averages():
        raise Stop
    assert same(p, before)
    assert addresses == [x.data_ptr() for x in p]
    assert alike(states, optimizer.state_dict())
    with pytest.raises(RuntimeError, match="ema_decay"), make(name, p).swap_averages():
        pass


def test_ema_decay_may_change_between_steps() -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = fusedtrain.optim.SGD([p], lr=1.0)
    want = 0.0
    for decay in (None, 0.5, 0.9, None, 0.5):
        optimizer.ema_decay = decay
        if "ema" not in optimizer.state[p]:
            want = p.item()
        p.grad = -torch.ones(1)
        optimizer.step()
        if decay is not None:
            want = decay * want + (1 - decay) * p.item()
            assert float(optimizer.state[p]["ema"]) == pytest.approx(want)


@ALL
def test_bfloat16_states(name: str) -> None:
    """They have that dtype, move, and the run stays near that of float32."""
    p, q = parameters(torch.float32), parameters(torch.float32)
    options = {"lr": 0.01, "caution": False} if "caution" in CLASSES[name].busy else {"lr": 0.01}
    if name.startswith("RMSprop"):
        options["centered"] = False  # a difference of two rounded averages
    ours = make(name, p, state_dtype=torch.bfloat16, **options)
    theirs = make(name, q, **options)
    for seed in range(4):
        step(ours, p, seed)
        step(theirs, q, seed)
    for x, y, start in zip(p, q, parameters(torch.float32), strict=True):
        moved = (y - start).detach().norm()
        assert float((x - y).detach().norm()) <= 0.1 * float(moved)
        for key, value in theirs.state[y].items():
            mine = ours.state[x][key]
            if key != "step" and not (name == "NovoGrad" and key.endswith("exp_avg_sq")):
                assert mine.dtype is torch.bfloat16
                assert float((mine.float() - value).norm()) <= 0.05 * float(value.norm()) + 1e-6


def test_stochastic_rounding_has_no_bias() -> None:
    """Steps of an eighth of an ulp: on average they arrive; without it nothing moves."""
    results = {}
    for rounding in (False, True):
        p = nn.Parameter(torch.ones(30000, dtype=torch.bfloat16))
        optimizer = fusedtrain.optim.SGD([p], lr=2.0**-11, stochastic_rounding=rounding)
        for _ in range(16):
            p.grad = torch.ones_like(p)
            optimizer.step()
        results[rounding] = p.detach().double()
    assert (results[False] == 1).all()
    # A step's error is at most half an ulp (2^-9) in standard deviation.
    error = 2.0**-9 * (16 / 30000) ** 0.5
    assert float(results[True].mean()) == pytest.approx(1 - 16 * 2.0**-11, abs=5 * error)
    assert results[True].std() > 0


@ALL
def test_stochastic_rounding_is_repeatable(name: str) -> None:
    results = []
    for seed, threads in ((1, 1), (1, 2), (2, 1)):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(7)
        p = [nn.Parameter(torch.randn(40000, generator=generator).bfloat16())]
        optimizer = make(name, p, stochastic_rounding=True, lr=0.01)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for number in range(2):
                step(optimizer, p, number)
        finally:
            torch.set_num_threads(before)
        results.append(p[0].detach())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    # At most one ulp either way.
    assert ((results[0].float() - results[2].float()).abs() <= 2.0**-6 * 4).all()


@ALL
def test_master_weights_follow_the_run_in_float32(name: str) -> None:
    half = parameters(torch.bfloat16)
    full = [nn.Parameter(p.detach().float()) for p in half]
    ours = make(name, half, master_weights=True, state_dtype=torch.float32)
    theirs = make(name, full)
    for seed in range(5):
        give_gradients(half, seed)
        for p, q in zip(half, full, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        ours.step()
        theirs.step()
    for p, q in zip(half, full, strict=True):
        assert torch.equal(ours.state[p]["master_param"], q)
        assert torch.equal(p, q.bfloat16())


def test_master_weights_notice_that_the_parameter_was_written_to() -> None:
    """As by load_state_dict of the model, a weight constraint, pruning."""
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = fusedtrain.optim.SGD([p], lr=0.1, master_weights=True)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    with torch.no_grad():
        p.fill_(5.0)
    optimizer.step()
    assert (p == 5).all()
