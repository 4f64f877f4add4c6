"""Batch norm in training: under activation checkpointing, in 16 bits and under autocast."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedtrain.functional as F
import fusedtrain.nn as fnn
from helpers.batch_norm_modules import (
    Stock,
    drop_path,
    leaf,
    randomized,
    results,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Block(nn.Module):
    def __init__(self, stock: bool, run: Callable[..., Tensor] | None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        norm = randomized(fnn.BatchNormAct2d(3, act_layer=nn.SiLU, drop_layer=drop_path, **options))
        last_norm = randomized(fnn.BatchNormAddAct(3, drop_path=0.4, **options))
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norms = nn.ModuleList([Stock(norm), Stock(last_norm)] if stock else [norm, last_norm])
        self.run = run

    def body(self, x: Tensor) -> Tensor:
        y: Tensor = self.norms[1](self.conv(self.norms[0](x)), x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if self.run is None else self.run(self.body, x)


def _nested(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    def inner(t: Tensor) -> Tensor:
        result: Tensor = checkpoint(function, t, use_reentrant=False)
        return result

    result: Tensor = checkpoint(inner, x, use_reentrant=False)
    return result


RECOMPUTED: dict[str, Callable[..., Any]] = {
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "not reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "nested": _nested,
    "nested, reentrant": lambda f, x: checkpoint(
        lambda t: checkpoint(f, t, use_reentrant=True), x, use_reentrant=True
    ),
    "reentrant in not": lambda f, x: checkpoint(
        lambda t: checkpoint(f, t, use_reentrant=True), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_statistics_move_once_under_checkpoint(kind: str) -> None:
    for options in ({}, {"momentum": None}, {"track_running_stats": False}):
        runs = []
        for run in (None, RECOMPUTED[kind]):
            block = Block(False, run, **options)
            torch.manual_seed(6)
            x = torch.randn(8, 3, 4, 4, requires_grad=True)
            for _ in range(2):
                block(block(x)).square().sum().backward()
            runs.append([x.grad, *(p.grad for p in block.parameters()), *block.buffers()])
        exact = "reentrant" not in kind.removeprefix("not reentrant")  # else sums in another order
        for a, b in zip(*runs, strict=True):
            torch.testing.assert_close(a, b, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-4)
        if not options:
            assert block.norms[0].num_batches_tracked == 4


def test_stock_batch_norm_moves_twice_under_checkpoint() -> None:
    """The reason for the rule above (pytorch#96136)."""
    block = Block(True, RECOMPUTED["not reentrant"])
    block(torch.randn(8, 3, 4, 4, requires_grad=True)).sum().backward()
    assert block.norms[0].norm.num_batches_tracked == 2


def test_a_forward_outside_of_backward_moves_them_each_time() -> None:
    module = fnn.BatchNormAct2d(3)
    for count in range(1, 4):
        module(torch.randn(2, 3, 4, 4, requires_grad=True)).sum().backward()
        assert module.num_batches_tracked == count
    with torch.no_grad():
        module(torch.randn(2, 3, 4, 4))
    assert module.num_batches_tracked == 4


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("kind", ["mixed", "pure"])
def test_16_bit_models(kind: str, dtype: torch.dtype) -> None:
    """float32 or 16-bit weights and statistics: closer to float64 than eager, dtypes as eager's."""
    for training, act in itertools.product((True, False), (nn.ReLU, nn.SiLU)):
        ours = randomized(fnn.BatchNormAct2d(4, act_layer=act)).train(training)
        if kind == "pure":
            ours.to(dtype)
        theirs, exact = Stock(ours), copy.deepcopy(ours).double()
        x, r = torch.randn(5, 4, 6, 3).to(dtype), torch.randn(5, 4, 6, 3).to(dtype)
        fused, eager = results(ours, x, r), results(theirs, x, r)
        truth = results(exact, x.double(), r.double())
        for one, other, want in zip(fused, eager, truth, strict=True):
            assert one.dtype is other.dtype
            limit = 2 * torch.finfo(dtype).eps * (1 + want.abs().max().item())
            torch.testing.assert_close(one.double(), want.double(), rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """Inputs and residuals of every mix of dtypes."""
    conv = nn.Conv2d(4, 4, 1)
    for act, first, added in itertools.product(
        (nn.ReLU, nn.SiLU, nn.Softplus), ("conv", F32, F64), (None, dtype, F32, F64)
    ):
        ours = randomized(fnn.BatchNormAct2d(4, act_layer=act, inplace=False))
        if first is F64:
            ours.double()
        theirs = Stock(ours)
        x = torch.randn(3, 4, 5, 2, dtype=F32 if first == "conv" else first)
        residual = None if added is None else torch.randn(3, 4, 5, 2, dtype=added)
        runs = []
        for module in (ours, theirs):
            inputs = [leaf(t) for t in (x, residual) if t is not None]
            with torch.autocast("cpu", dtype=dtype):
                output = module(conv(inputs[0]) if first == "conv" else inputs[0], *inputs[1:])
            output.square().sum().backward()
            norm = getattr(module, "norm", module)
            runs.append([output.detach(), *(t.grad for t in inputs), norm.weight.grad])
        tolerance = 30 * torch.finfo(dtype).eps if first == "conv" or added is dtype else 1e-4
        for a, b in zip(*runs, strict=True):
            assert a.dtype is b.dtype, (act, first, added)
            limit = tolerance * (1 + b.abs().max().item())
            torch.testing.assert_close(a, b, rtol=0, atol=limit)


@pytest.mark.parametrize("threshold", [20.0, 1.0], ids=["kernel", "eager"])
def test_softplus_under_autocast_of_cuda(monkeypatch: pytest.MonkeyPatch, threshold: float) -> None:
    """Is computed in float32, from the norm's 16 bits, as torch does it."""
    x = torch.randn(3, 4, 5, dtype=BF16)
    options = {"training": True, "activation": "softplus", "beta": 2.0, "threshold": threshold}
    assert F.batch_norm_act(x, None, None, **options).dtype is BF16
    monkeypatch.setattr(
        "fusedtrain._calls.autocasts", lambda input, kind="": kind == "cuda" and input.dtype is BF16
    )
    z = torch_functional.batch_norm(x, None, None, training=True)
    y = F.batch_norm_act(x, None, None, **options)
    assert y.dtype is F32
    torch.testing.assert_close(
        y, torch_functional.softplus(z.float(), 2.0, threshold), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("cpp", [True, False])
@pytest.mark.parametrize("act", [None, nn.ReLU, nn.SiLU])
def test_gradients_of_gradients_under_checkpoint(
    act: Any, cpp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hands out a saved tensor once a backward."""
    if not cpp:
        monkeypatch.setattr("fusedtrain.ops.batch_norm._cpp", None)
    norm = fnn.BatchNormAct2d(3, apply_act=act is not None, act_layer=act or nn.ReLU).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    seconds = []
    for run in (lambda t: checkpoint(norm, t, use_reentrant=False), norm):
        (first,) = torch.autograd.grad(run(x).pow(3).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*seconds)
