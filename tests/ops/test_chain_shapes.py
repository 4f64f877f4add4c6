"""Pointwise chains on every small shape: empty, 0-dim, one element; values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedtrain import functional as F

TORCH = torch.nn.functional
SHAPES = [
    (), (0,), (1,), (0, 4), (4, 0), (1, 1), (2, 0, 4), (0, 2, 4), (2, 4, 0), (0, 4, 2, 2),
    (2, 0, 2, 2), (2, 4, 0, 2), (1, 1, 1, 1), (2, 2, 1, 1),
]  # fmt: skip
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda t: t, "relu": torch.relu, "silu": TORCH.silu, "elu": TORCH.elu,
    "sigmoid": torch.sigmoid,
}  # fmt: skip
DIMS = [(shape, dim) for shape in SHAPES for dim in range(len(shape))]


def check(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *shapes: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(7)
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    results = []
    for function in (ours, theirs):
        inputs = [t.clone().requires_grad_() for t in leaves]
        y = function(*inputs)
        grads = torch.autograd.grad(y, inputs, torch.full_like(y, 2.0))
        results.append((y.detach(), *grads))
    torch.testing.assert_close(*results)


def along(vector: Tensor, x: Tensor, dim: int) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = vector.numel()
    return vector.reshape(shape)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("shape", "dim"), DIMS, ids=str)
def test_residual_add(shape: tuple[int, ...], dim: int, drops: bool) -> None:
    rows = torch.arange(shape[0], dtype=torch.float64) if drops else None

    def theirs(residual: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        y = x * along(scale, x, dim)
        return residual + (y if rows is None else y * along(rows, x, 0))

    check(lambda r, x, s: F.residual_add(r, x, s, rows, dim), theirs, shape, shape, (shape[dim],))
    if rows is not None:
        check(
            lambda r, x: F.residual_add(r, x, None, rows),
            lambda r, x: r + x * along(rows, x, 0), shape, shape,
        )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_residual_add_alone(shape: tuple[int, ...]) -> None:
    check(F.residual_add, torch.add, shape, shape)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("shape", "dim"), DIMS, ids=str)
def test_bias_and_activation(shape: tuple[int, ...], dim: int, act: str) -> None:
    def theirs(x: Tensor, bias: Tensor) -> Tensor:
        return ACTS[act](x + along(bias, x, dim))

    check(lambda x, b: F.bias_act_dropout(x, b, act, dim=dim), theirs, shape, (shape[dim],))
    check(
        lambda x, b: F.bias_act_dropout(x, b, act, 1.0, dim=dim),
        lambda x, b: theirs(x, b) * 0, shape, (shape[dim],),
    )  # fmt: skip
    name = {"identity": "linear", "silu": "swish"}.get(act, act)
    check(
        lambda x, b: F.bias_act(x, b, dim=dim, act=name, gain=1.0, clamp=0.5),
        lambda x, b: theirs(x, b).clamp(-0.5, 0.5), shape, (shape[dim],),
    )  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_a_bias(shape: tuple[int, ...], act: str) -> None:
    check(lambda x: F.bias_act_dropout(x, None, act), ACTS[act], shape)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated(shape: tuple[int, ...], act: str) -> None:
    def theirs(x: Tensor, gate: Tensor) -> Tensor:
        return x * ACTS[act](gate)

    check(lambda x, g: F.gated(x, g, act), theirs, shape, shape)
    if len(shape) > 1:
        spread = (*shape[:2], *[1] * (len(shape) - 2))
        check(lambda x, g: F.gated(x, g, act), theirs, shape, spread)


@pytest.mark.parametrize("gate_last", [False, True])
@pytest.mark.parametrize(("shape", "dim"), DIMS, ids=str)
def test_packed_gates(shape: tuple[int, ...], dim: int, gate_last: bool) -> None:
    def theirs(x: Tensor) -> Tensor:
        half = x.size(dim) // 2
        first, second = x.narrow(dim, 0, half), x.narrow(dim, half, half)
        return first * TORCH.silu(second) if gate_last else TORCH.silu(first) * second

    def ours(x: Tensor) -> Tensor:
        return F.swiglu(x, dim=dim, gate_last=gate_last)

    if shape[dim] % 2:
        with pytest.raises(RuntimeError, match="must be even"):
            ours(torch.randn(shape))
    else:
        check(ours, theirs, shape)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropout(shape: tuple[int, ...], p: float) -> None:
    x = torch.ones(shape, requires_grad=True)
    y = F.dropout(x, p)
    (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.shape == x.shape
    assert torch.equal(y.detach(), g)
    kept = 1 / (1 - p) if p < 1 else 0.0
    assert ((g == 0) | (g == kept)).all()
