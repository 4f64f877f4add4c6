"""Optimizers are called as torch's are: closures, hooks, rates in tensors; and what is refused.

conformance/test_optimizers.py has torch's own table; test_compiled_steps.py torch.compile.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from helpers.optimizer_steps import (
    ALL,
    OF_TORCH,
    alike,
    copies,
    give_gradients,
    parameters,
    same,
    started,
    step,
)
from helpers.optimizers import make


@OF_TORCH
def test_differentiable_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="does not support `differentiable`"):
        getattr(fusedtrain.optim, name)(parameters(), differentiable=True)


@ALL
def test_a_closure(name: str) -> None:
    """As for LBFGS: zeroes, computes, calls backward; its value is returned, whatever it is."""
    runs = [parameters(), parameters()]
    optimizers = [make(name, run) for run in runs]

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizers[0].zero_grad()
        loss = torch.stack([p.square().sum() for p in runs[0]]).sum()
        loss.backward()
        return loss

    for _ in range(3):
        with torch.no_grad():
            value = optimizers[0].step(closure)
        assert isinstance(value, Tensor)
        assert value.requires_grad
        for p in runs[1]:
            p.grad = 2 * p.detach()
        assert optimizers[1].step() is None
    assert same(runs[0], runs[1])
    marker = object()
    assert optimizers[0].step(lambda: marker) is marker


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@ALL
def test_a_learning_rate_that_is_a_tensor(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    p, q = parameters(), parameters()
    rate = torch.full(shape, 0.125, dtype=dtype)
    ours, theirs = make(name, p, lr=rate), make(name, q, lr=0.125)
    for seed, value in enumerate((0.125, 0.25, 0.03125)):
        rate.fill_(value)
        theirs.param_groups[0]["lr"] = value
        if name == "NAdamW":  # "corrected" decay refers to the rate that it was made with
            ours.defaults["lr"] = theirs.defaults["lr"]
        step(ours, p, seed)
        step(theirs, q, seed)
        assert ours.param_groups[0]["lr"] is rate
    assert same(p, q)
    ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.5
    step(ours, p, 9)
    step(theirs, q, 9)
    assert same(p, q)


@ALL
def test_hooks_around_the_step(name: str) -> None:
    p = parameters()
    optimizer = make(name, p)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append((o, copies(p))))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append((o, copies(p))))
    step(optimizer, p, 0)
    assert [o for o, _ in seen] == [optimizer, optimizer]
    assert same(seen[0][1], parameters())
    assert same(seen[1][1], p)
    give_gradients(p, 1)
    started(fusedtrain.amp.GradScaler("cpu")).step(optimizer)
    assert len(seen) == 4


def memory(optimizer: torch.optim.Optimizer, params: list[Any]) -> list[Any]:
    """Values that must be as they were after an error."""
    grads = [None if p.grad is None else p.grad.clone() for p in params]
    return [copies(params), grads, copy.deepcopy(optimizer.state_dict())]


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("kind", ["sparse", "complex", "float8", "expanded"])
@ALL
def test_what_is_not_supported_raises_and_changes_nothing(name: str, kind: str, when: str) -> None:
    p: list[Any] = parameters(shapes=[(3, 5), (7,), (4, 2)])
    if kind == "complex":
        p[1] = nn.Parameter(torch.randn(7, dtype=torch.complex64))
    elif kind == "float8":
        p[1] = nn.Parameter(torch.ones(7).to(torch.float8_e4m3fn))
    elif kind == "expanded":
        p[1] = nn.Parameter(torch.ones(()).expand(7))
    optimizer = make(name, p, ema_decay=0.9, gradient_writeback="zero")
    if when == "later":
        give_gradients([p[0], p[2]], 0)
        optimizer.step()
    give_gradients([p[0], p[2]], 1)
    if kind == "sparse":
        p[1].grad = torch.eye(7)[0].to(p[1].dtype).to_sparse()
    else:
        p[1].grad = torch.ones(7).to(p[1].dtype)
    before = memory(optimizer, p)
    words = {"sparse": "sparse gradients", "complex": "complex", "float8": "float8",
             "expanded": "one place in memory"}  # fmt: skip
    with pytest.raises(RuntimeError, match=words[kind]):
        optimizer.step()
    assert alike(before, memory(optimizer, p))
    p[1].grad = None
    optimizer.step()
