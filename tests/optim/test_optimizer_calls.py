"""Optimizers are made and called as torch's are: its own table of arguments and errors, closures,
hooks, torch.compile; and what is refused.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import types
import unittest
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
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
from helpers.optimizers import OF_TORCH as NAMES, make


@cache
def options_of_torch() -> dict[str, Any]:
    """torch's own table: for each optimizer the arguments that it tests, and the errors."""
    kept = sys.modules.get("expecttest")
    if importlib.util.find_spec("expecttest") is None:
        # torch's test-suite needs it, and its table does not.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    try:
        module = importlib.import_module("torch.testing._internal.common_optimizers")
    finally:
        if kept is None:
            sys.modules.pop("expecttest", None)
        # The import forbids the whole process to set flags of torch.backends (which is a wrapper
        # of the module that holds the switch).
        held = torch.backends.flags_frozen.__globals__
        held["__allow_nonbracketed_mutation_flag"] = True
    return {i.optim_cls.__name__: i for i in module.optim_db if i.optim_cls.__name__ in NAMES}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@OF_TORCH
def test_options_of_torchs_table(name: str, dtype: torch.dtype) -> None:
    items = options_of_torch()[name].optim_inputs_func(device="cpu")
    assert len(items) >= 5
    for item in items:
        p, q = parameters(dtype), parameters(dtype)
        ours = getattr(fusedtrain.optim, name)(p, **copy.deepcopy(item.kwargs))
        theirs = getattr(torch.optim, name)(q, **copy.deepcopy(item.kwargs))
        for seed in range(6):
            step(ours, p, seed)
            step(theirs, q, seed)
        assert_close(p, q)
        assert not same(p, parameters(dtype)), item.desc
        assert ours.param_groups[0].keys() == theirs.param_groups[0].keys(), item.desc


def outcome(module: Any, name: str, item: Any) -> tuple[type, str]:
    """Class and message of the exception or warning."""
    mistake = item.optimizer_error_input
    params = parameters() if mistake.params is None else copy.deepcopy(mistake.params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            getattr(module, name)(params, **copy.deepcopy(mistake.kwargs))
        except Exception as error:
            return type(error), str(error)
    raise AssertionError("nothing was raised")


@OF_TORCH
def test_errors_of_torchs_table(name: str) -> None:
    items = options_of_torch()[name].optim_error_inputs_func(device="cpu", dtype=torch.float32)
    assert len(items) >= 7
    for item in items:
        ours, theirs = outcome(fusedtrain.optim, name, item), outcome(torch.optim, name, item)
        assert ours == theirs
        assert issubclass(ours[0], item.error_type)


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable"])
@OF_TORCH
def test_flags_are_accepted(name: str, flag: str) -> None:
    flags = {flag: True}
    if not flags.keys() <= getattr(torch.optim, name)(parameters()).defaults.keys():
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            getattr(fusedtrain.optim, name)(parameters(), **flags)
        return
    p, q = parameters(), parameters()
    ours = getattr(fusedtrain.optim, name)(p, **flags)
    theirs = getattr(torch.optim, name)(q)
    for seed in range(3):
        step(ours, p, seed)
        step(theirs, q, seed)
    assert_close(p, q)


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


@ALL
def test_under_torch_compile(name: str) -> None:
    runs = [parameters(torch.float32), parameters(torch.float32)]
    optimizers = [make(name, run) for run in runs]

    def train(params: list[Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([p.sin().sum() for p in params]).sum()
        loss.backward()
        optimizer.step()
        return loss

    torch._dynamo.reset()
    compiled = torch.compile(train, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(runs[0], optimizers[0]), train(runs[1], optimizers[1]))
    assert same(runs[0], runs[1])
    assert not same(runs[0], parameters(torch.float32))
