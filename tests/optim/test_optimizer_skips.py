"""Defects of other fused optimizers (see test_optimizer_defects.py) in steps that are skipped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from helpers.optimizer_cases import in_layout
from helpers.optimizer_steps import (
    ALL,
    MENDED,
    assert_close,
    assert_same_bits,
    give_gradients,
    memory,
    shaped,
    started,
)
from helpers.optimizers import make

# --- D1: a first step that is skipped


def first_step_skipped_then_no_gradient(optimizer: torch.optim.Optimizer, p: Tensor) -> None:
    p.grad = torch.full_like(p, float("inf"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    p.grad = torch.zeros_like(p)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()


@pytest.mark.usefixtures("memory_is_full_of_nan")
def test_d1_torch_leaves_momentum_uninitialised() -> None:
    (p,) = shaped((33,))
    first_step_skipped_then_no_gradient(torch.optim.SGD([p], momentum=0.9, fused=True), p)
    assert p.isnan().all(), MENDED


@pytest.mark.usefixtures("memory_is_full_of_nan")
@ALL
def test_d1_first_step_skipped(name: str) -> None:
    (p,) = shaped((33,))
    kept = p.detach().clone()
    first_step_skipped_then_no_gradient(make(name, [p], weight_decay=0.0), p)
    assert torch.equal(p, kept)


@pytest.mark.parametrize("name", ["SGD", "LARS"])
def test_d1_the_first_applied_step_is_not_dampened(name: str) -> None:
    """The buffer starts with the whole gradient at the first step that counts."""
    pair = [nn.Parameter(torch.ones(9)) for _ in range(2)]
    optimizers = [make(name, [p]) for p in pair]
    for _ in range(2):
        pair[0].grad = torch.full_like(pair[0], float("nan"))
        optimizers[0].found_inf = torch.tensor(1.0)
        optimizers[0].step()
    optimizers[0].found_inf = torch.tensor(0.0)
    for seed in range(3):
        for p, optimizer in zip(pair, optimizers, strict=True):
            give_gradients([p], seed)
            optimizer.step()
    assert torch.equal(pair[0], pair[1])


# --- D2: sums of found_inf


def test_d2_torch_skips_only_at_exactly_1() -> None:
    (p,) = shaped((9,))
    optimizer = torch.optim.Adam([p], fused=True)
    p.grad = torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.tensor(2.0)
    optimizer.step()
    assert p.isnan().all(), MENDED
    assert optimizer.state[p]["step"] == -1, MENDED


@pytest.mark.parametrize("found_inf", [1.0, 2.0, 17.0, 0.5, float("inf"), float("nan")])
@ALL
def test_d2_every_found_inf_but_0_skips(name: str, found_inf: float) -> None:
    (p,) = shaped((9,))
    optimizer = make(name, [p])
    give_gradients([p], 0)
    optimizer.step()
    before = memory(optimizer)
    p.grad = torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.tensor(found_inf)
    optimizer.step()
    assert_same_bits(before, memory(optimizer))
    assert optimizer.last_step_skipped
    assert optimizer.skipped_steps == 1
    optimizer.found_inf = torch.tensor(0.0)
    give_gradients([p], 1)
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert not torch.equal(p, before["0"])


# D3 (ShardedGradScaler does not reduce found_inf): test_optimizer_ranks.py.


# --- D5: a loss scale below 1


def scaled_below_1(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, p: Tensor
) -> None:
    """The gradient is finite, and infinite once it is divided by the scale."""
    scaler.scale(torch.zeros(()))  # creates the scale
    p.grad = torch.full_like(p, 1e36)
    scaler.step(optimizer)


def test_d5_torch_looks_at_the_scaled_gradient() -> None:
    (p,) = shaped((9,))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-10)
    scaled_below_1(torch.optim.Adam([p], fused=True), scaler, p)
    assert not p.isfinite().all(), MENDED


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, fusedtrain.amp.GradScaler])
@ALL
def test_d5_a_scale_below_1(name: str, kind: type[torch.amp.GradScaler]) -> None:
    (p,) = shaped((9,))
    optimizer = make(name, [p])
    kept = p.detach().clone()
    scaler = kind("cpu", init_scale=2.0**-10)
    scaled_below_1(optimizer, scaler, p)
    assert torch.equal(p, kept)
    assert optimizer.last_step_skipped
    scaler.update()
    if kind is fusedtrain.amp.GradScaler:
        assert scaler.get_scale() == 2.0**-11


# --- D6: gradients after a step


@pytest.mark.parametrize(("fused", "left"), [(False, 0.5), (True, 512.0)])
def test_d6_torch_leaves_scaled_or_unscaled_gradients(fused: bool, left: float) -> None:
    (p,) = shaped((2,))
    optimizer = torch.optim.SGD([p], fused=fused)
    scaler = started(torch.amp.GradScaler("cpu", init_scale=1024.0))
    p.grad = torch.tensor([512.0, float("inf")])
    scaler.step(optimizer)
    assert p.grad[0] == left, MENDED


@pytest.mark.parametrize(
    ("layout", "mode", "skipped"),
    [  # every two of the three
        (layout, mode, (i + k) % 2 == 1)
        for i, layout in enumerate(("contiguous", "transposed", "sliced"))
        for k, mode in enumerate(("none", "unscaled", "zero"))
    ],
)
@ALL
def test_d6_gradients_after_a_step(name: str, layout: str, mode: str, skipped: bool) -> None:
    params = shaped((7, 11), (0,), (5,))
    # LAMB has a clipping norm of its own.
    optimizer = make(name, params, gradient_writeback=mode, max_grad_norm=1.0)
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=1024.0))
    give_gradients(params, 0, scale=1024.0)
    assert params[0].grad is not None
    params[0].grad = in_layout(params[0].grad, layout)
    if skipped:
        params[0].grad[3, 4] = float("inf")
    grads = [p.grad for p in params]
    before = [p.grad.clone() for p in params if p.grad is not None]
    scaler.step(optimizer)
    assert bool(optimizer.last_step_skipped) == skipped
    norm = torch.cat([(g / 1024).flatten() for g in before]).norm()
    for p, kept, grad in zip(params, before, grads, strict=True):
        assert p.grad is grad
        if mode == "zero":
            assert (p.grad == 0).all()
        elif mode == "none" or skipped:
            assert torch.equal(p.grad, kept if mode == "none" else kept / 1024)
        else:
            eps = 0.0 if name == "LAMB" else 1e-6
            assert_close(p.grad, kept / 1024 / (norm + eps), 8)


# --- D18, D19: a skipped step
#
# bitsandbytes zeroes the moments of elements whose gradient is not finite and goes on (D18). Apex's
# reversible Adam and DeepSpeed's CPU rollback invert the update: not to the bit, and Apex only one
# element of four (D19).


@pytest.mark.parametrize(
    ("where", "bad"),
    [((0, 0), float("nan")), ((1, 20000), float("inf")), ((2, -1), -float("inf"))],
    ids=str,
)
@ALL
def test_d18_one_bad_number_skips_all(name: str, where: tuple[int, int], bad: float) -> None:
    params = shaped((17,), (40000,), (5,))
    optimizer = make(name, params, ema_decay=0.9)
    scaler = started(fusedtrain.amp.GradScaler("cpu"))
    give_gradients(params, 0, scale=65536)
    scaler.step(optimizer)
    scaler.update()
    before = memory(optimizer)
    give_gradients(params, 1, scale=65536)
    grad = params[where[0]].grad
    assert grad is not None
    grad[where[1]] = bad
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits(before, memory(optimizer))
    assert optimizer.last_step_skipped
    assert scaler.get_scale() == 32768
    counts = [float(count) for _, count in optimizer.nonfinite_gradients()]
    assert counts == [float(i == where[0]) for i in range(3)]


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
PATTERNS = [
    ((1, 0, 0, 0), F32), ((1, 1, 0, 0), F64), ((0, 1, 0, 0), BF16), ((0, 1, 1, 0), F32),
    ((1, 0, 1, 0), BF16), ((0, 0, 0, 1), F64),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "dtype"), PATTERNS, ids=str)
@ALL
def test_d19_a_skipped_step_never_was(
    name: str, dtype: torch.dtype, pattern: tuple[int, ...]
) -> None:
    """Every bit of the run is that of one without the bad step."""
    runs = [shaped((33,), (7, 3), dtype=dtype)]
    runs.append([nn.Parameter(p.detach().clone()) for p in runs[0]])
    options = {"ema_decay": 0.9, "master_weights": True, "state_dtype": torch.float32}
    if dtype is torch.float64:
        options["state_dtype"] = None
    optimizers = [make(name, params, **options) for params in runs]
    scaler = started(fusedtrain.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6))
    for seed, skip in enumerate(pattern):
        give_gradients(runs[0], seed, scale=8.0)
        give_gradients(runs[1], seed, scale=8.0)
        if skip:
            assert runs[0][1].grad is not None
            runs[0][1].grad[2, 1] = float("inf")
        scaler.step(optimizers[0])
        scaler.update(8.0)
        if not skip:
            scaler.step(optimizers[1])
            scaler.update(8.0)
    assert_same_bits(memory(optimizers[1]), memory(optimizers[0]))
    assert optimizers[0].skipped_steps == sum(pattern)
    assert optimizers[0].applied_steps == len(pattern) - sum(pattern)
