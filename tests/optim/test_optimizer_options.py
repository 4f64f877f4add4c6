"""Options of the optimizers beside torch's: wrong ones, changes between steps, rounding.

test_optimizer_numbers.py has the numbers of all of them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.optimizer_steps import (
    ALL,
    alike,
    copies,
    give_gradients,
    parameters,
    same,
    step,
)
from helpers.optimizers import make


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
