"""Layer norm (arXiv:1607.06450) and RMS norm (arXiv:1910.07467) in plain torch, over neighbouring
dimensions of a tensor, with a residual sum before. 16-bit math is in float32, rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dtypes import in_strides_of, wide_of, widened


def new_statistics(input: Tensor, start_dim: int, end_dim: int) -> Tensor:
    """A number for each block of the normalised dimensions, which are kept with size 1; in memory
    in the order of the blocks."""
    shape, strides = input.shape, input.stride()
    n, inner = 1, 1
    for d in range(end_dim, start_dim - 1, -1):
        if shape[d] != 1 and n == 1:
            inner = strides[d]
        n *= shape[d]
    if input.numel() == 0:
        inner = 1
    sizes, steps = list(shape), list(strides)
    for d in range(input.dim()):
        if start_dim <= d <= end_dim:
            sizes[d] = steps[d] = 1
        elif n > 0 and steps[d] >= inner * n:
            steps[d] //= n
    return input.new_empty_strided(sizes, steps, dtype=wide_of(input))


def broadcast(weight: Tensor, input: Tensor, start_dim: int, end_dim: int) -> Tensor:
    """Weight or bias in a shape that broadcasts over the input."""
    behind = [1] * (input.dim() - 1 - end_dim)
    return widened(weight).reshape([*input.shape[start_dim : end_dim + 1], *behind])


def _statistics(
    x: Tensor, start_dim: int, end_dim: int, eps: float, centered: bool
) -> tuple[Tensor | None, Tensor]:
    """Mean (None if not centered) and reciprocal deviation; differentiable."""
    dims = list(range(start_dim, end_dim + 1))
    mean = x.mean(dims, keepdim=True) if centered else None
    distance = x if mean is None else x - mean
    return mean, (distance.square().mean(dims, keepdim=True) + eps).rsqrt()


def row_norm(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    start_dim: int, end_dim: int, eps: float, centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The norm, mean (no elements if not centered), reciprocal deviation, and the sum (no elements
    without a residual)."""
    total, none = input, input.new_empty(0)
    if residual is not None:
        total = in_strides_of(widened(input) + widened(residual), input)
    x = widened(total)
    mean, rstd = _statistics(x, start_dim, end_dim, eps, centered)
    y = (x if mean is None else x - mean) * rstd
    if weight is not None:
        y = y * broadcast(weight, input, start_dim, end_dim)
    if bias is not None:
        y = y + broadcast(bias, input, start_dim, end_dim)
    means = none.to(wide_of(input))
    if mean is not None:
        means = new_statistics(input, start_dim, end_dim).copy_(mean)
    rstds = new_statistics(input, start_dim, end_dim).copy_(rstd)
    return in_strides_of(y, input), means, rstds, none if residual is None else total


def gradients(
    grad: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None,
    mean: Tensor | None, rstd: Tensor, start_dim: int, end_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of input (and residual), weight and bias (flat) in the dtype of the math."""
    dims = list(range(start_dim, end_dim + 1))
    others = [d for d in range(input.dim()) if d not in dims]
    g, x = widened(grad), widened(input)
    norm = (x if mean is None else x - mean) * rstd
    scaled = g if weight is None else g * broadcast(weight, input, start_dim, end_dim)
    grad_input = scaled - norm * (scaled * norm).mean(dims, keepdim=True)
    if mean is not None:
        grad_input = grad_input - scaled.mean(dims, keepdim=True)
    grad_input = grad_input * rstd
    if grad_sum is not None:
        grad_input = grad_input + widened(grad_sum)
    of_weight, of_bias = g * norm, g
    if others:
        of_weight, of_bias = of_weight.sum(others), of_bias.sum(others)
    return grad_input, of_weight.flatten(), of_bias.flatten()


def differentiable_backward(
    grad: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None,
    start_dim: int, end_dim: int, eps: float, centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`gradients` as a function of the input alone: statistics are derived, too."""
    x = widened(input)  # once: each cast rounds its share of the gradient, and the shares cancel
    mean, rstd = _statistics(x, start_dim, end_dim, eps, centered)
    return gradients(grad, grad_sum, x, weight, mean, rstd, start_dim, end_dim)


def row_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, mean: Tensor,
    rstd: Tensor, start_dim: int, end_dim: int, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of input, weight and bias, the last two flat and in the dtype of the math."""
    means = mean if mean.numel() else None
    tensors = (grad, grad_sum, input, weight, means, rstd)
    wide: Any = [None if t is None else t.double() for t in tensors]
    g, more, x, scale, center, inverse = wide
    grad_input, *affine = gradients(g, more, x, scale, center, inverse, start_dim, end_dim)
    none = torch.empty(0, dtype=wide_of(input), device=input.device)
    of_weight, of_bias = (
        t.to(none.dtype) if needed else none.clone()
        for t, needed in zip(affine, (needs_weight, needs_bias), strict=True)
    )
    return in_strides_of(grad_input, input), of_weight, of_bias
