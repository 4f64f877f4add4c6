"""``y = drop(clamp(gain f(x + bias))) + residual`` in plain torch: StyleGAN's op
(arXiv:2106.12423), dropout. 16-bit math is in float32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from .channels import channel_sums, spread
from .dtypes import in_strides_of, widened
from .philox import keep_mask
from .pointwise import Pointwise


def _biased(input: Tensor, bias: Tensor | None, dim: int) -> Tensor:
    z = widened(input)
    return z if bias is None else z + spread(widened(bias)[None], input, dim)


def bias_act(
    input: Tensor, bias: Tensor | None, seed: Tensor | None, residual: Tensor | None, dim: int,
    activation: int, a: float, b: float, gain: float, clamp: float, p: float,
) -> Tensor:  # fmt: skip
    y = Pointwise(activation, a, b).forward(_biased(input, bias, dim)) * gain
    if clamp >= 0:
        y = y.clamp(-clamp, clamp)
    if seed is not None and p > 0:
        y = torch.where(keep_mask(seed, p, input), y * (1 / (1 - p)), 0.0)
    if residual is not None:
        y = y + widened(residual)
    return in_strides_of(y, input)


def bias_act_gradient(
    grad: Tensor, saved: Tensor, bias: Tensor | None, seed: Tensor | None, dim: int,
    activation: int, a: float, b: float, gain: float, clamp: float, p: float,
) -> Tensor:  # fmt: skip
    """Gradient of input; `saved`: the output if the activation `saves_output`, else the input."""
    f, drops = Pointwise(activation, a, b), seed is not None and p > 0
    keep = 1 / (1 - p) if drops else 1.0
    g = widened(grad) * (gain * keep)
    if drops:
        assert seed is not None
        g = torch.where(keep_mask(seed, p, saved), g, 0.0)
    if f.saves_output:
        s = widened(saved)
        if clamp >= 0:
            g = torch.where(s.abs() < clamp * keep, g, 0.0)
        s = s / (gain * keep)
    else:
        s = _biased(saved, bias, dim)
        if clamp >= 0:
            g = torch.where(f.forward(s).abs() < clamp / abs(gain), g, 0.0)
    return f.backward(g, s)


def bias_act_backward(
    grad: Tensor, saved: Tensor, bias: Tensor | None, seed: Tensor | None, dim: int,
    activation: int, a: float, b: float, gain: float, clamp: float, p: float, needs_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of input and bias, the second in the dtype that is computed in."""
    g = bias_act_gradient(grad, saved, bias, seed, dim, activation, a, b, gain, clamp, p)
    sums = g.new_empty(0)
    if needs_bias:
        sums = channel_sums(g.double(), 1, dim).to(g.dtype)
    return in_strides_of(g, saved), sums
