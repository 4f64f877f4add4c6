"""Batch norm's node in C++ against the one in Python."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import fusedtrain
import fusedtrain.functional as F
from helpers.autograd_routes import NEEDS_CPP, is_cpp, python_route

pytestmark = NEEDS_CPP


def arguments(dtype: torch.dtype, *needed: str) -> dict[str, Tensor]:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    torch.manual_seed(0)
    tensors = {
        "input": torch.randn(3, 4, 5, 6).to(dtype),
        "residual": torch.randn(3, 4, 5, 6).to(dtype),
        "weight": torch.randn(4, dtype=wide),
        "bias": torch.randn(4, dtype=wide),
        "running_mean": torch.randn(4, dtype=wide),
        "running_var": torch.rand(4, dtype=wide) + 0.5,
        "branch_scale": torch.tensor([0.0, 2.0, 2.0], dtype=wide),
    }
    return {k: t.requires_grad_(k in needed) for k, t in tensors.items()}


def run(
    dtype: torch.dtype, needed: tuple[str, ...], without: tuple[str, ...], **options: Any
) -> Any:
    tensors: dict[str, Any] = arguments(dtype, *needed)
    given = {k: None if k in without else t for k, t in tensors.items()}
    y = F.batch_norm_act(**given, **options)
    cpp = is_cpp(y)
    nodes = y.grad_fn.name(), [t is None for t in y.grad_fn.saved_tensors]
    gradients = torch.autograd.grad(
        y.square().sum(), [t for k, t in tensors.items() if k in needed and k not in without]
    )
    return cpp, nodes, [y.detach(), *gradients, tensors["running_mean"], tensors["running_var"]]


NEEDED = [("input",), ("weight",), ("bias", "residual"), ("input", "residual", "weight", "bias")]
WITHOUT = [
    ("residual", "branch_scale"), ("branch_scale",), ("residual", "weight"), (),
    ("residual", "branch_scale", "bias", "weight"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["identity", "relu", "silu", "leaky_relu"])
def test_same_bits_as_the_python_route(dtype: torch.dtype, training: bool, activation: str) -> None:
    compared = 0
    for needed, without in itertools.product(NEEDED, WITHOUT):
        if set(needed) <= set(without):
            continue
        options: dict[str, Any] = {"training": training, "activation": activation}
        cpp, nodes, ours = run(dtype, needed, without, **options)
        with python_route():
            not_cpp, python_nodes, python = run(dtype, needed, without, **options)
        assert cpp, (needed, without)
        assert not not_cpp
        assert nodes == python_nodes, (needed, without)
        torch.testing.assert_close(ours, python, rtol=0, atol=0)
        compared += 1
    assert compared > 12


def test_second_derivatives_are_those_of_the_python_route() -> None:
    def second() -> list[Tensor]:
        t = arguments(torch.float64, "input", "residual", "weight", "bias")
        y = F.batch_norm_act(**t, training=True, activation="silu")
        of = [t["input"], t["residual"], t["weight"], t["bias"]]
        first = torch.autograd.grad(y.square().sum(), of, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        return [*first, *torch.autograd.grad(total, of)]

    ours = second()
    with python_route():
        python = second()
    torch.testing.assert_close(ours, python, rtol=0, atol=0)


def test_unusual_calls_are_left_to_python() -> None:
    usual = arguments(torch.float32, "input", "weight")
    assert is_cpp(F.batch_norm_act(**usual, training=True))
    unusual: dict[str, dict[str, Any]] = {
        "a residual that is broadcast": {"residual": torch.randn(1, 4, 1, 1)},
        "a residual of another dtype": {"residual": torch.randn(3, 4, 5, 6).double()},
        "a branch scale with a gradient": {"branch_scale": torch.ones(3, requires_grad=True)},
        "strided statistics": {"running_mean": torch.zeros(8)[::2]},
    }
    for what, changes in unusual.items():
        before = [usual[k].clone() for k in ("running_mean", "running_var")]
        y = F.batch_norm_act(**{**usual, **changes}, training=True)
        if what == "strided statistics":
            assert y.grad_fn is not None
            assert y.grad_fn.name() == "BatchNormActBackward"  # they are copied for the op
        for k, t in zip(("running_mean", "running_var"), before, strict=True):
            usual[k].copy_(t)
        with python_route():
            python = F.batch_norm_act(**{**usual, **changes}, training=True)
        torch.testing.assert_close(y, python, rtol=0, atol=0, msg=what)
    for changes in ({"weight": torch.ones(5)}, {"running_mean": None}, {"eps": -1.0}):
        with pytest.raises((RuntimeError, ValueError)):
            F.batch_norm_act(**{**usual, **changes}, training=False)
    with fusedtrain.recompute():
        assert not is_cpp(F.batch_norm_act(**usual, training=True))


def network(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return F.relu(norm(F.silu(x)) * 2).square().sum()


def test_compiled_autograd() -> None:
    norm = fusedtrain.nn.BatchNormAct2d(4).double()
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    of = [x, *norm.parameters()]
    expected = torch.autograd.grad(network(x, norm), of)
    names: list[str] = []

    def compiler(graph: torch.fx.GraphModule) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return torch.compile(graph, backend="aot_eager")

    with compiled_autograd._enable(compiler):
        network(x, norm).backward()
    for name in ("SiluBackward", "ReluBackward", "BatchNormActBackward"):
        assert any(name in target for target in names), names
    torch.testing.assert_close([t.grad for t in of], list(expected), rtol=1e-12, atol=1e-12)


def test_compile_sees_no_break() -> None:
    torch._dynamo.reset()
    norm = fusedtrain.nn.BatchNormAct2d(4)
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    expected = torch.autograd.grad(network(x, norm), [x, *norm.parameters()])
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(x, norm), [x, *norm.parameters()])
    torch.testing.assert_close(ours, expected)
