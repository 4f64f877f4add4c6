"""Defects of other fused optimizers (D1 to D20 of the survey): theirs shown, ours absent.

Where the other project is torch, a test first shows that torch has the defect: when that part
fails, torch has been mended, and the test may be cut down to ours. Apex, DeepSpeed, bitsandbytes
and FlashOptim are not installed: what they do is told in a comment.
Of steps that are skipped: test_optimizer_skips.py; of strides: test_optimizer_strides.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from helpers.observed import Counted
from helpers.optimizer_steps import (
    ALL,
    MENDED,
    assert_same_bits,
    give_gradients,
    memory,
    saved_and_loaded,
    shaped,
    started,
)
from helpers.optimizers import make

# --- D7, D8: float32 states of 16-bit parameters
#
# Apex's FusedAdam keeps float32 moments of 16-bit parameters; torch's load_state_dict makes them
# 16-bit ones, which Apex's kernels then read and write as float32, past their end (D8).


def test_d7_torch_cuts_loaded_states() -> None:
    (p,) = shaped((9,), dtype=torch.bfloat16)
    optimizer = torch.optim.Adam([p])
    give_gradients([p], 0)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.randn(9)
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["exp_avg"].dtype is torch.bfloat16, MENDED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("master_weights", [False, True])
@ALL
def test_d7_d8_float32_states_survive(name: str, master_weights: bool, dtype: torch.dtype) -> None:
    options = {
        "state_dtype": torch.float32,
        "ema_decay": 0.9,
        "master_weights": master_weights,
    }
    runs = [shaped((33, 3), (7,), dtype=dtype) for _ in range(2)]
    first = make(name, runs[0], **options)
    for seed in range(3):
        give_gradients(runs[0], seed)
        first.step()
    for p, q in zip(*runs, strict=True):
        q.data.copy_(p.detach())
    second = make(name, runs[1], **options)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    assert_same_bits(memory(first), memory(second))
    for p in runs[1]:
        states = [v for k, v in second.state[p].items() if v.shape == p.shape]
        assert len(states) >= 1
        assert all(v.dtype is torch.float32 for v in states)
        assert ("master_param" in second.state[p]) == master_weights
    for optimizer, params in ((first, runs[0]), (second, runs[1])):
        give_gradients(params, 5)
        optimizer.step()
    if name in ("SGD", "SGDW", "LARS", "Lion") or not master_weights:
        assert_same_bits(memory(first), memory(second))
    for p, q in zip(*runs, strict=True):
        assert torch.equal(p, q)


# --- D9: master weights
#
# Apex's FusedAdam allocates float32 master weights of bfloat16 parameters and never uses them.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ALL
def test_d9_master_weights_add_up_small_steps(name: str, dtype: torch.dtype) -> None:
    """Each step is far below half an ulp of the parameter."""
    momentum = ("SGD", "SGDW", "LARS", "RMSprop", "RMSpropTF")  # lengthens the step tenfold
    lr = 1e-5 if name in momentum else 1e-4
    runs = []
    for master_weights in (False, True):
        p = nn.Parameter(torch.full((33,), 1.5, dtype=dtype))
        options: dict[str, Any] = {"lr": lr, "weight_decay": 0.0}
        if name.startswith("RMSprop"):
            options["centered"] = False
        optimizer = make(name, [p], master_weights=master_weights, **options)
        for _ in range(40):
            p.grad = torch.ones_like(p)
            optimizer.step()
            if master_weights:
                master = optimizer.state[p]["master_param"]
                assert master.dtype is torch.float32
                assert torch.equal(p, master.to(dtype))
        runs.append(p)
    assert (runs[0] == 1.5).all()
    master = optimizer.state[p]["master_param"]
    assert (master < 1.5 - 1e-4).all()
    assert (master > 1.4).all()


# --- D10: float32 states are not rounded
#
# Apex's capturable Adam casts the new moments to the parameter's dtype before it stores them as
# float32: second moments of small gradients underflow.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdamW", "LAMB", "RMSprop", "Adagrad"])
def test_d10_float32_states_are_not_rounded(name: str, dtype: torch.dtype) -> None:
    half = nn.Parameter(torch.randn(65).to(dtype))
    full = nn.Parameter(half.detach().float())
    options = {"weight_decay": 0.0, "caution": False} if name in ("NAdamW", "LAMB") else {}
    options |= {"weight_decay": 0.0}
    with_half = make(name, [half], state_dtype=torch.float32, **options)
    with_full = make(name, [full], **options)
    for seed in range(3):
        give_gradients([half], seed, scale=1e-4)
        assert half.grad is not None
        full.grad = half.grad.float()
        with_half.step()
        with_full.step()
    for key, value in with_full.state[full].items():
        assert torch.equal(with_half.state[half][key], value), key
        if key in ("exp_avg_sq", "square_avg", "sum"):
            assert (value > 0).all()
            assert (value < 6e-8).any()  # float16 has nothing below


# --- D11: empty tensors
#
# Apex and DeepSpeed launch what is pending from within the loop over chunks: an empty last tensor
# has none, and updates are lost. An empty tensor in the last slot writes out of bounds.


@pytest.mark.parametrize(
    "places",
    [(0,), (1,), (3,), (0, 1, 2, 3), (3, 3, 3), (0, 0), tuple([3] * 120), tuple([1] * 37)],
    ids=lambda places: f"{len(places)} at {places[0]}",
)
@ALL
def test_d11_empty_tensors(name: str, places: tuple[int, ...]) -> None:
    shapes = [(17, 3), (1,), (40000,)]
    plain = shaped(*shapes)
    others = [nn.Parameter(p.detach().clone()) for p in plain]
    with_empty: list[Tensor] = list(others)
    for place in sorted(places, reverse=True):
        with_empty.insert(place, nn.Parameter(torch.empty(0 if place else (2, 0, 3))))
    optimizers = [make(name, plain, ema_decay=0.5), make(name, with_empty, ema_decay=0.5)]
    for seed in range(2):
        give_gradients(plain, seed)
        for p, q in zip(plain, others, strict=True):
            q.grad = p.grad
        for p in with_empty:
            if p.numel() == 0:
                p.grad = torch.empty_like(p)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(plain, others, strict=True):
        assert torch.equal(p, q)


@ALL
def test_d11_nothing_but_empty_tensors(name: str) -> None:
    params = shaped((0,), (3, 0))
    optimizer = make(name, params, max_grad_norm=1.0, ema_decay=0.9)
    scaler = started(fusedtrain.amp.GradScaler("cpu"))
    give_gradients(params, 0)
    scaler.step(optimizer)
    scaler.update()
    assert not optimizer.last_step_skipped
    assert optimizer.grad_norm == 0


# --- D13: no host synchronisation
#
# Apex's clip_grad_norm_ hands a tensor to a float parameter, which waits for the device.


def test_d13_torch_reads_found_inf() -> None:
    (p,) = shaped((9,))
    scaler = started(torch.amp.GradScaler("cpu"))
    give_gradients([p], 0)
    with Counted() as counted:
        scaler.step(torch.optim.SGD([p], fused=False))
    assert counted.reads > 0, MENDED


@pytest.mark.parametrize("hysteresis", [1, 2])
@ALL
def test_d13_no_read(name: str, hysteresis: int) -> None:
    params = shaped((9, 2), (4,), (3, 2))
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": torch.tensor(0.1)}]
    optimizer = make(name, groups, max_grad_norm=1.0, ema_decay=0.9)
    scheduler = fusedtrain.optim.AppliedStepScheduler(
        optimizer, lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
    )
    scaler = started(fusedtrain.amp.GradScaler("cpu", hysteresis=hysteresis))
    for seed in range(3):
        give_gradients(params, seed)
        if seed == 1:
            params[0].grad = None
        with Counted() as counted:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            _ = (optimizer.last_step_skipped, optimizer.grad_norm, optimizer.applied_steps)
        assert counted.reads == 0


# --- D15: the sign of 0
#
# DeepSpeed's FusedLion takes the sign of 0 for -1: parameters without gradient drift.


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_d15_lion_stays_without_gradient(zero: float) -> None:
    (p,) = shaped((65,))
    kept = p.detach().clone()
    optimizer = fusedtrain.optim.Lion([p], lr=0.1)
    for _ in range(3):
        p.grad = torch.full_like(p, zero)
        optimizer.step()
    assert torch.equal(p, kept)


# --- D16: step counts
#
# DeepSpeed's FusedAdam counts in the last parameter's state, once for each dtype.


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdamW", "RMSprop", "Adagrad", "NovoGrad"])
def test_d16_step_counts(name: str) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    params = [nn.Parameter(torch.randn(5).to(d)) for d in dtypes]
    groups = [{"params": params[:2]}, {"params": params[2:3], "lr": 0.1}, {"params": params[3:]}]
    optimizer = make(name, groups)
    want = [0] * 5
    for seed in range(6):
        give_gradients(params, seed)
        for i, p in enumerate(params):
            if (seed + i) % 3 == 0:
                p.grad = None
            else:
                want[i] += 1
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == want
    saved = optimizer.state_dict()["state"]
    assert [float(saved[i]["step"]) for i in range(5)] == want
