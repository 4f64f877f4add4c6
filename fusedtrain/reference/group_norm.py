"""Group norm, modulation and activation in plain torch: the truth of `ops/group_norm.py`.

    z = (x - mean) / sqrt(var + eps) * weight + bias          arXiv:1803.08494, equation 1
    y = activation(z * (1 + scale) + shift)

Mean and variance cover the elements of a sample whose channels are in one group. `weight` and
`bias` are [C]; `scale` and `shift` [N, C] are the modulation of AdaGN (arXiv:2105.05233) and DiT
(arXiv:2212.09748).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dtypes import wide_of, widened
from .pointwise import Pointwise


class Affine(NamedTuple):
    """The vectors of a norm: [C], [C], [N, C], [N, C]."""

    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None


def per_sample_and_channel(values: Tensor, input: Tensor) -> Tensor:
    return values.reshape([*values.shape] + [1] * (input.dim() - 2))


def eager(input: Tensor, groups: int, affine: Affine, eps: float, activation: Pointwise) -> Tensor:
    """The norm in eager torch, which torch.compile and torch.func see instead of a kernel."""
    return activation.forward(modulated(input, groups, affine, eps))


def modulated(input: Tensor, groups: int, affine: Affine, eps: float) -> Tensor:
    return scaled(F.group_norm(input, groups, affine.weight, affine.bias, eps), affine)


def scaled(z: Tensor, affine: Affine) -> Tensor:
    *_, scale, shift = affine
    if scale is not None:
        z = z * (1 + per_sample_and_channel(scale, z))
    return z if shift is None else z + per_sample_and_channel(shift, z)


def joined(affine: Affine, wide: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Factor and offset of each channel [C], or sample and channel [N, C]."""
    weight, bias, scale, shift = (t if t is None or t.dtype is wide else t.to(wide) for t in affine)
    if scale is not None:
        factor = scale + 1
        weight = factor if weight is None else weight * factor
        bias = None if bias is None else bias * factor
    if shift is not None:
        bias = shift if bias is None else bias + shift
    return weight, bias


def group_norm_act(
    input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, eps: float, activation: int, a: float, b: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and the vectors [4, N, C] that backward takes: mean, invstd, factor, offset."""
    samples, channels = input.shape[:2]
    x = input.double().reshape(samples, groups, input.numel() // max(samples * groups, 1))
    mean = x.mean(2, keepdim=True)
    invstd = ((x - mean).square().mean(2, keepdim=True) + eps).rsqrt()
    shape = (samples, groups, channels // groups)
    statistics = torch.stack([t.expand(shape).reshape(samples, channels) for t in (mean, invstd)])
    vectors = torch.empty((4, samples, channels), dtype=wide_of(input), device=input.device)
    vectors[:2] = statistics
    factor, offset = joined(Affine(weight, bias, scale, shift), vectors.dtype)
    vectors[2] = 1.0 if factor is None else factor
    vectors[3] = 0.0 if offset is None else offset
    return group_norm_act_apply(input, vectors, activation, a, b), vectors


def group_norm_act_apply(
    input: Tensor, vectors: Tensor, activation: int, a: float, b: float
) -> Tensor:
    mean, invstd, factor, offset = (per_sample_and_channel(v, input) for v in vectors)
    z = (widened(input) - mean) * (invstd * factor) + offset
    return torch.empty_like(input).copy_(Pointwise(activation, a, b).forward(z))


def group_norm_act_backward(
    grad: Tensor, input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, vectors: Tensor, activation: int, a: float,
    b: float, needs_input: bool, needs_weight: bool, needs_bias: bool, needs_scale: bool,
    needs_shift: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the input and of weight, bias, scale and shift, in their dtypes; without
    elements where not needed."""
    mean, invstd, factor, offset = (per_sample_and_channel(v, input) for v in vectors)
    normalised = (widened(input) - mean) * invstd
    dz = _gradient_of_sum(grad, normalised * factor + offset, Pointwise(activation, a, b))
    grad_input = input.new_empty(0)
    if needs_input:
        result = _gradient_of_input(dz * factor, normalised, groups) * invstd
        grad_input = torch.empty_like(input).copy_(result)
    affine = Affine(weight, bias, scale, shift)
    needs = (needs_weight, needs_bias, needs_scale, needs_shift)
    gradients = _gradients(dz.double(), normalised.double(), affine, needs)
    w, b_, s, h = (input.new_empty(0) if t is None else t for t in gradients)
    return grad_input, w, b_, s, h


def _gradient_of_sum(grad: Tensor, z: Tensor, activation: Pointwise) -> Tensor:
    """The gradient of the activation's input z."""
    return activation.backward(
        widened(grad), activation.forward(z) if activation.saves_output else z
    )


def _gradient_of_input(d: Tensor, normalised: Tensor, groups: int) -> Tensor:
    """The gradient of the input divided by invstd, d being that of the normalised input."""
    shape = (d.shape[0], groups, d.numel() // max(d.shape[0] * groups, 1))
    d, n = d.reshape(shape), normalised.reshape(shape)
    result = d - d.mean(2, keepdim=True) - n * (d * n).mean(2, keepdim=True)
    return result.reshape(normalised.shape)


def _gradients(
    dz: Tensor, normalised: Tensor, affine: Affine, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the vectors, of the gradient of the activation's input. None where not
    needed."""
    weight, bias, scale, _ = affine
    over = (*dz.shape[:2], dz.shape[2:].numel())
    sums = dz.reshape(over).sum(2)
    slopes = (dz * normalised).reshape(over).sum(2)
    one = 1.0 if scale is None else 1 + scale.to(sums.dtype)
    of_scale = slopes if weight is None else slopes * weight.to(sums.dtype)
    of_scale = of_scale if bias is None else of_scale + sums * bias.to(sums.dtype)
    totals = ((slopes * one).sum(0), (sums * one).sum(0), of_scale, sums)
    return [
        total.to(vector.dtype) if vector is not None and needed else None
        for total, vector, needed in zip(totals, affine, needs)
    ]


def differentiable_backward(
    grad: Tensor, input: Tensor, groups: int, affine: Affine, eps: float, activation: Pointwise,
    needs: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """The backward pass as a differentiable function, for double backward to any order.

    Returns the gradient of the input, and those of the vectors.
    """
    shape, samples = input.shape, input.shape[0]
    x = widened(input).reshape(samples, groups, -1)
    centered = x - x.mean(2, keepdim=True)
    invstd = (centered.square().mean(2, keepdim=True) + eps).rsqrt()
    normalised = (centered * invstd).reshape(shape)
    factor, offset = (
        None if v is None else per_sample_and_channel(v.expand(samples, -1), input)
        for v in joined(affine, x.dtype)
    )
    z = normalised if factor is None else normalised * factor
    dz = _gradient_of_sum(grad, z if offset is None else z + offset, activation)
    d = _gradient_of_input(dz if factor is None else dz * factor, normalised, groups)
    grad_input = (d.reshape(x.shape) * invstd).reshape(shape).to(grad.dtype)
    return grad_input, _gradients(dz, normalised, affine, needs)
