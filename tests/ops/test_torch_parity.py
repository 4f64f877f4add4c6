"""Functions that torch.nn.functional has too behave as torch's: keywords, gradients at the special
values, expanded tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusedtrain import functional as F
from fusedtrain.reference import ACTIVATIONS
from helpers.activations import DTYPES, NAMES
from helpers.backends import Kernels

TORCH = torch.nn.functional
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "name", ["gelu", "sigmoid", "logsigmoid", "tanh", "softplus", "hardshrink", "softshrink"]
)
def test_out_has_no_gradient(name: str) -> None:
    x, out = torch.randn(3, 4, requires_grad=True), torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        getattr(F, name)(x, *ACTIVATIONS[name].arguments, out=out)
    assert not out.any()


def special(dtype: torch.dtype) -> Tensor:
    """Special values, and every kink of a formula with both neighbours."""
    tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    values = [NAN, INF, -INF, 0.0, -0.0, tiny, -tiny, tiny / 4, -tiny / 4, huge, -huge]
    tensor = torch.tensor(values, dtype=dtype)
    kinks = torch.tensor([-40, -6, -3, -2, -1, -0.5, 0.5, 1, 2, 3, 6, 20, 40], dtype=dtype)
    up = torch.nextafter(kinks, torch.full_like(kinks, INF))
    return torch.cat([tensor, kinks, up, torch.nextafter(kinks, torch.full_like(kinks, -INF))])


def torchs(name: str, x: Tensor, grad: float, copies: int) -> Tensor:
    """A single element goes through the tail of torch's loop, copies go through its vectors."""
    row, gradients = ACTIVATIONS[name], []
    for one in x:
        leaf = one.repeat(copies).requires_grad_()
        y = row.eager(leaf)
        gradients.append(torch.autograd.grad(y, leaf, torch.full_like(y, grad))[0][0])
    return torch.stack(gradients)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_at_special_values(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    """Gradients are those of torch's vectors or of its tail. The two differ at NaN."""
    for grad in (1.0, 0.0, NAN):
        check_gradients(ops, name, dtype, grad)


def check_gradients(ops: Kernels, name: str, dtype: torch.dtype, grad: float) -> None:
    row, x = ACTIVATIONS[name], special(dtype)
    if not ops.kernel:
        x = x[:11]  # torch's own forward rounds hardsigmoid to 1 a step before the kink
    if name == "star_relu":
        x = x[
            x != torch.finfo(dtype).max
        ]  # the slope is infinite, torch multiplies in another order
    if grad != grad and name == "hard_mish":
        x = x[~(x < -2)]  # 0 like hardswish's; the composed reference has 0 * NaN
    arguments = row.arguments_for(x)
    moved = [a.to(ops.device) if isinstance(a, Tensor) else a for a in (x, *arguments)]
    saved = ops(name, *moved) if row.saves == "output" else moved[0]
    gradient = ops(f"{name}_backward", torch.full_like(saved, grad), saved, *moved[1:])
    gradient = (gradient[0] if isinstance(gradient, tuple) else gradient).cpu()
    eps = torch.finfo(dtype).eps
    # In float64, torch's hardsigmoid and hardswish have 1/6 rounded to float32.
    # At a threshold of 20, softplus' slope is 1 - 2e-9.
    eps = max(eps, 1e-8) if name in ("hardsigmoid", "hardswish", "softplus") else eps
    same = torch.zeros(len(x), dtype=torch.bool)
    for copies in (1, 64):
        theirs = torchs(name, x, grad, copies)
        same |= torch.isclose(gradient, theirs, rtol=16 * eps, atol=16 * eps, equal_nan=True)
    # A limit instead of torch's NaN: where the input is infinite, or torch's formula overflows.
    limits = (x.abs() > 1e4) & gradient.isfinite() & theirs.isnan()
    same |= limits
    off = torch.stack([x, gradient, theirs])[:, ~same]
    assert same.all(), f"times {grad}: input, our gradient, eager torch's: {off.t().tolist()}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threshold_writes_over_expanded_tensors(dtype: torch.dtype) -> None:
    results = []
    for function in (F.threshold, TORCH.threshold):
        base = torch.tensor([[1.0], [-2.0], [0.2]], dtype=dtype)
        x = base.expand(3, 4)
        assert function(x, 0.5, 2.0, inplace=True) is x
        results.append(base)
    assert torch.equal(*results)
    # Torch modifies this one and raises in backward.
    leaf = torch.ones(3, 1, dtype=dtype, requires_grad=True)
    x = (leaf * -1).expand(3, 4)
    with pytest.raises(RuntimeError, match="memory location"):
        F.threshold(x, 0.5, 2.0, inplace=True)
    assert (x == -1).all()
