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

from .dtypes import widened
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
    weight, bias, scale, shift = affine
    z = F.group_norm(input, groups, weight, bias, eps)
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


def gradients(
    sums: Tensor, slopes: Tensor, affine: Affine, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the vectors, of the sums [N, C] of d and of d times the normalised input, d
    being the gradient of the activation's input. None where not needed."""
    weight, bias, scale, shift = affine
    results: list[Tensor | None] = []
    for vector, sum, needed in ((weight, slopes, needs[0]), (bias, sums, needs[1])):
        if vector is None or not needed:
            results.append(None)
            continue
        total = sum if scale is None else sum * (1 + scale.to(sum.dtype))
        results.append(total.sum(0).to(vector.dtype))
    for vector, needed in ((scale, needs[2]), (shift, needs[3])):
        if vector is None or not needed:
            results.append(None)
            continue
        total = sums
        if vector is scale:
            total = slopes if weight is None else slopes * weight.to(slopes.dtype)
            total = total if bias is None else total + sums * bias.to(sums.dtype)
        results.append(total.to(vector.dtype))
    return results


def differentiable_backward(
    grad: Tensor, input: Tensor, groups: int, affine: Affine, eps: float, activation: Pointwise
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass as a differentiable function, for double backward to any order.

    Returns the gradient of the input, and the two sums that :func:`gradients` takes.
    """
    shape, samples = input.shape, input.shape[0]
    x = widened(input).reshape(samples, groups, -1)
    centered = x - x.mean(2, keepdim=True)
    invstd = (centered.square().mean(2, keepdim=True) + eps).rsqrt()
    normalised = centered * invstd
    weight, bias = joined(affine, x.dtype)
    z = normalised.reshape(shape)
    if weight is not None:
        weight = per_sample_and_channel(weight.expand(samples, -1), input)
        z = z * weight
    if bias is not None:
        z = z + per_sample_and_channel(bias.expand(samples, -1), input)
    dz = activation.backward(widened(grad), activation.forward(z) if activation.saves_output else z)
    d = (dz if weight is None else dz * weight).reshape(x.shape)
    slope = (d * normalised).mean(2, keepdim=True)
    grad_input = (d - d.mean(2, keepdim=True) - normalised * slope) * invstd
    over = (samples, shape[1], -1)
    sums = dz.reshape(over).sum(2)
    slopes = (dz * normalised.reshape(shape)).reshape(over).sum(2)
    return grad_input.reshape(shape).to(grad.dtype), sums, slopes
