"""Activations that torch lacks: forward and backward. The table of activations.py has both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dtypes import widened


def quick_gelu(input: Tensor) -> Tensor:
    return input * torch.sigmoid(1.702 * input)


def relu_squared(input: Tensor) -> Tensor:
    return torch.square(F.relu(input))


def hard_mish(input: Tensor) -> Tensor:
    return 0.5 * input * (input + 2).clamp(min=0, max=2)


def _squareplus_root(x: Tensor, b: float) -> Tensor:
    """sqrt(x^2 + b), whose square does not overflow."""
    far = 1e18  # beyond it, x^2 + b is x^2
    return torch.where(x.abs() > far, x.abs(), torch.sqrt(x.clamp(-far, far).square() + b))


def _squareplus(x: Tensor, b: float) -> Tensor:
    """Computes a form that does not cancel for x < 0."""
    if b == 0:
        return 0.5 * x + 0.5 * x.abs()
    root = _squareplus_root(x, b)
    return torch.where(x < 0, 0.5 * b / (root + x.abs()), 0.5 * root + 0.5 * x)


def squareplus(input: Tensor, b: float) -> Tensor:
    if b < 0:
        raise ValueError(f"squareplus: b must be at least 0, not {b}")
    if not input.is_floating_point():  # booleans and complex numbers have no sign
        return 0.5 * (input + torch.sqrt(input * input + b))
    return _squareplus(widened(input), b).to(input.dtype)


def quick_gelu_backward(grad: Tensor, input: Tensor) -> Tensor:
    x = widened(input).clamp(-1e3, 1e3)  # outside, the slope is 0 or 1
    s = torch.sigmoid(1.702 * x)
    return (widened(grad) * (s * (1 + 1.702 * x * (1 - s)))).to(grad.dtype)


def relu_squared_backward(grad: Tensor, input: Tensor) -> Tensor:
    x = widened(input)
    return (widened(grad) * (2 * x)).to(grad.dtype).masked_fill(input <= 0, 0)


def hard_mish_backward(grad: Tensor, input: Tensor) -> Tensor:
    x = widened(input)
    slope = torch.where(x > 0, 1.0, x + 1).masked_fill(x < -2, 0)
    return (widened(grad) * slope).to(grad.dtype)


def squareplus_backward(grad: Tensor, input: Tensor, b: float) -> Tensor:
    x = widened(input).clamp(-1e18, 1e18)
    if b == 0:
        slope = 0.5 + 0.5 * x.sign()
    else:
        slope = _squareplus(x, b) / _squareplus_root(x, b)
    return (widened(grad) * slope).to(grad.dtype)
