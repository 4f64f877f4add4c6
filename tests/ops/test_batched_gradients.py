"""Gradients of many gradients at once, for every public function: torch.autograd.grad with
is_grads_batched=True, jacobian(vectorize=True), torch.func.vmap over the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedtrain
from fusedtrain import functional as F
from fusedtrain.reference import ACTIVATIONS
from helpers.activations import public

# torch warns where an op has no batching rule.
pytestmark = pytest.mark.filterwarnings("error::UserWarning")

Case = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]
IMAGE, ROWS = (2, 4, 6, 6), (4, 6)


def seeded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        return function(*tensors)

    return run


def drops() -> Tensor:
    return torch.tensor([0.0, 2.0], dtype=torch.float64)


def norm(activation: str, training: bool) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        mean, var = weight.detach() * 0, weight.detach() * 0 + 1
        return F.batch_norm_act(
            x, mean, var, weight, bias, training, activation=activation, residual=residual,
            branch_scale=None if residual is None else drops(),
        )  # fmt: skip

    return run


def in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: function(x * 1, inplace=True)


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*tensors: Tensor) -> Tensor:
        with fusedtrain.recompute():
            return function(*tensors)

    return run


def overwriting(x: Tensor, weight: Tensor) -> Tensor:
    return F.batch_norm_act(
        x * 1, None, None, weight, None, True, activation="leaky_relu", overwrite_input=True
    )


def cases() -> dict[str, Case]:
    named: dict[str, Case] = {
        name: (public(row), (ROWS,)) for name, row in ACTIVATIONS.items() if not row.tensors
    }
    named |= {
        "prelu": (F.prelu, (IMAGE, (4,))),
        "star_relu": (F.star_relu, (IMAGE, (1,), (1,))),
        "gated": (F.gated, (IMAGE, IMAGE)),
        "gated, spread": (F.gated, (IMAGE, (2, 4, 1, 1))),
        "residual_add": (lambda r, x, s: F.residual_add(r, x, s, drops(), 1), (IMAGE, IMAGE, (4,))),
        "residual_add, scale": (lambda r, x, s: F.residual_add(r, x, s), (ROWS, ROWS, (6,))),
        "residual_add, drops": (lambda r, x: F.residual_add(r, x, None, drops()), (IMAGE, IMAGE)),
        "dropout": (seeded(F.dropout), (ROWS,)),
        "bias_act_dropout": (seeded(lambda x, b: F.bias_act_dropout(x, b, p=0.5)), (ROWS, (6,))),
        "overwrite_input": (overwriting, (IMAGE, (4,))),
        "max_pool2d": (lambda x: F.max_pool2d(x, 2), (IMAGE,)),
        "max_pool2d, overlapping": (lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE,)),
        "relu, save": (lambda x: F.relu(x, save="q1"), (ROWS,)),
        "silu, in place, save": (lambda x: F.silu(x * 1, True, save="q4"), (ROWS,)),
    }
    for name in ("glu", "swiglu", "geglu", "reglu", "bilinear_glu"):
        function = getattr(F, name)
        named[name] = (function, (ROWS,))
        if name != "glu":
            named[f"{name}, apart"] = (function, (ROWS, ROWS))
            named[f"{name}, dim"] = (
                partial(function, dim=1, gate_last=True), (IMAGE,),
            )  # fmt: skip
    for act in ("linear", "relu", "lrelu", "tanh", "sigmoid", "elu", "selu", "softplus", "swish"):
        named[f"bias_act, {act}"] = (
            lambda x, b, act=act: F.bias_act(x, b, dim=1, act=act, clamp=1.5), (IMAGE, (4,)),
        )  # fmt: skip
    for act in ("identity", "relu", "silu", "elu"):
        for training in (True, False):
            named[f"norm, {act}, {training}"] = (norm(act, training), (IMAGE, (4,), (4,)))
            named[f"norm, {act}, {training}, residual"] = (
                norm(act, training), (IMAGE, (4,), (4,), IMAGE),
            )  # fmt: skip
    for name in ("silu", "mish", "quick_gelu", "hardswish", "gelu"):
        named[f"{name}, save"] = (partial(getattr(F, name), save="q8"), (ROWS,))
    for name in ("elu", "silu", "relu", "relu_squared"):
        named[f"{name}, in place"] = (in_place(getattr(F, name)), (ROWS,))
    for name in ("silu", "swiglu", "max_pool2d", "norm, relu, True"):
        named[f"recomputed {name}"] = (recomputed(named[name][0]), named[name][1])
    return named


CASES = cases()


def batched(y: Tensor, leaves: list[Tensor], grads: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, grads, is_grads_batched=True, retain_graph=True)


def mapped(y: Tensor, leaves: list[Tensor], grads: Tensor) -> Any:
    return torch.func.vmap(lambda g: torch.autograd.grad(y, leaves, g, retain_graph=True))(grads)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", CASES)
def test_batched_gradients(name: str, last: bool) -> None:
    function, shapes = CASES[name]
    generator = torch.Generator().manual_seed(5)
    leaves = []
    for shape in shapes:
        leaf = torch.randn(shape, generator=generator, dtype=torch.float64)
        if last and leaf.dim() == 4:
            leaf = leaf.contiguous(memory_format=torch.channels_last)
        leaves.append(leaf.requires_grad_())
    y = function(*leaves)
    grads = torch.randn((3, *y.shape), generator=generator, dtype=y.dtype)
    alone = [torch.autograd.grad(y, leaves, g, retain_graph=True) for g in grads]
    want = [torch.stack(columns) for columns in zip(*alone, strict=True)]
    for how in (batched, mapped):
        torch.testing.assert_close(list(how(y, leaves, grads)), want)
    if last:
        return
    jacobian = torch.autograd.functional.jacobian(function, tuple(leaves), vectorize=True)
    products = [torch.tensordot(grads, j, dims=y.dim()) for j in jacobian]
    torch.testing.assert_close(products, want)


def test_all_functions_are_tested() -> None:
    public = {n for n, f in vars(F).items() if callable(f) and not n.startswith("_")}
    ours = {n for n in public if getattr(F, n).__module__.startswith("fusedtrain")}
    tested = " ".join(CASES) + " batch_norm_act"
    # normalize_images takes bytes: no gradient; gelu_tanh is gelu's.
    assert {n for n in ours if n not in tested} == {"normalize_images"}
