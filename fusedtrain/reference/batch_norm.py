"""Batch norm, add and activation in plain torch: the truth of `ops/batch_norm.py`.

    z = (x - mean) / sqrt(var + eps) * weight + bias          arXiv:1502.03167, algorithm 1
    y = activation(z * branch_scale + residual)

A batch's statistics cover all elements of a channel (dimension 1). 16-bit math is in float32, and
rounds once, at the end; eager torch rounds after each operator.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dtypes import widened
from .pointwise import IDENTITY, Pointwise


class Norm(NamedTuple):
    """The arguments of a norm besides its input, in the order of the ops."""

    branch_scale: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool
    momentum: float
    eps: float


class Statistics(NamedTuple):
    """The tensors that a norm's backward takes from its forward, in the order of the ops."""

    branch_scale: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    invstd: Tensor


def eager(input: Tensor, residual: Tensor | None, norm: Norm, activation: Pointwise) -> Tensor:
    """The norm in eager torch, which torch.compile and torch.func see instead of a kernel."""
    z = F.batch_norm(
        input, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training,
        norm.momentum, norm.eps,
    )  # fmt: skip
    if norm.branch_scale is not None:
        z = z * per_sample(norm.branch_scale, z).to(z.dtype)
    if residual is not None:
        z = z + residual
    return activation.forward(z)


def per_channel(values: Tensor, input: Tensor) -> Tensor:
    """One value a channel, in a shape that broadcasts over the input."""
    return values.reshape([1, -1] + [1] * (input.dim() - 2))


def per_sample(values: Tensor, input: Tensor) -> Tensor:
    """One value a sample, in a shape that broadcasts over the input."""
    return values.reshape([-1] + [1] * (input.dim() - 1))


def _over_channels(t: Tensor) -> Tensor:
    return t.sum([d for d in range(t.dim()) if d != 1])


def batch_norm_stats(input: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of each channel, float64."""
    x = input.double()
    count = max(x.numel() // max(x.shape[1], 1), 1)
    mean = _over_channels(x) / count
    variance = _over_channels((x - per_channel(mean, x)).square()) / count
    return mean, variance


def inverse_deviation(variance: Tensor, eps: float) -> Tensor:
    return (variance.double() + eps).rsqrt()


def move(
    running_mean: Tensor | None, running_var: Tensor | None, momentum: float, mean: Tensor,
    variance: Tensor, count: int | Tensor,
) -> None:  # fmt: skip
    """Moves running statistics, where there are any, by those of `count` elements a channel."""
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        unbiased = variance * (count / (count - 1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)


def batch_norm_act(
    input: Tensor, residual: Tensor | None, branch_scale: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, training: bool,
    momentum: float, eps: float, activation: int, a: float, b: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = widened(input).dtype
    if training:
        mean, variance = batch_norm_stats(input)
        invstd = inverse_deviation(variance, eps)
        count = input.numel() // max(input.shape[1], 1)
        move(running_mean, running_var, momentum, mean, variance, count)
    else:
        assert running_mean is not None
        assert running_var is not None
        # A clone: the saved mean must not change with the running statistics.
        mean, invstd = running_mean.clone(), inverse_deviation(running_var, eps)
    mean, invstd = mean.to(wide), invstd.to(wide)
    output = batch_norm_act_apply(
        input, residual, branch_scale, weight, bias, mean, invstd, activation, a, b
    )
    return output, mean, invstd


def batch_norm_act_(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, activation: int,
    a: float, b: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    output, mean, invstd = batch_norm_act(
        input, None, None, weight, bias, running_mean, running_var, training, momentum, eps,
        activation, a, b,
    )  # fmt: skip
    input.copy_(output)
    return mean, invstd


def batch_norm_act_restore(
    output: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor,
    slope: float,
) -> Tensor:  # fmt: skip
    """Recomputes the input from the output, for an activation that is `s` for s >= 0 and
    `slope * s` below 0. arXiv:1712.02616, section 3."""
    y = widened(output)
    s = torch.where(y > 0, y, y / slope)
    if bias is not None:
        s = s - per_channel(bias, output)
    scale = invstd if weight is None else invstd * weight
    x = s / per_channel(scale, output) + per_channel(mean, output)
    largest = torch.finfo(output.dtype).max  # rounding must not exceed it
    return torch.empty_like(output).copy_(x.clamp(-largest, largest))


def _branch(input: Tensor, statistics: Statistics) -> Tensor:
    branch_scale, weight, bias, mean, invstd = statistics
    scale = invstd if weight is None else invstd * weight
    z = (widened(input) - per_channel(mean, input)) * per_channel(scale, input)
    if bias is not None:
        z = z + per_channel(bias, input)
    return z if branch_scale is None else z * per_sample(branch_scale, input)


def batch_norm_act_apply(
    input: Tensor, residual: Tensor | None, branch_scale: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, mean: Tensor, invstd: Tensor, activation: int, a: float, b: float,
) -> Tensor:  # fmt: skip
    z = _branch(input, Statistics(branch_scale, weight, bias, mean, invstd))
    if residual is not None:
        z = z + widened(residual)
    result = Pointwise(activation, a, b).forward(z)
    return torch.empty_like(input).copy_(result)


def _gradient_of_sum(
    grad: Tensor,
    input: Tensor | None,
    saved: Tensor | None,
    statistics: Statistics,
    activation: Pointwise,
) -> Tensor:
    """The gradient of the activation's input, and so of the residual."""
    g = widened(grad)
    if activation.op == IDENTITY:
        return g
    if activation.saves_output and saved is not None:
        return activation.backward(g, widened(saved))
    assert input is not None
    z = _branch(input, statistics)
    if saved is not None:
        z = z + widened(saved)
    return activation.backward(g, activation.forward(z) if activation.saves_output else z)


def batch_norm_act_backward_reduce(
    grad: Tensor, input: Tensor, saved: Tensor | None, branch_scale: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, activation: int,
    a: float, b: float, needs_residual: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    statistics = Statistics(branch_scale, weight, bias, mean, invstd)
    dz = _gradient_of_sum(grad, input, saved, statistics, Pointwise(activation, a, b))
    grad_residual = torch.empty_like(input).copy_(dz) if needs_residual else input.new_empty(0)
    d = (dz if branch_scale is None else dz * per_sample(branch_scale, input)).double()
    normalised = (widened(input) - per_channel(mean, input)) * per_channel(invstd, input)
    sums = torch.stack([_over_channels(d), _over_channels(d * normalised)])
    return sums, grad_residual


def batch_norm_act_backward_apply(
    grad: Tensor, input: Tensor | None, saved: Tensor | None, branch_scale: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor,
    averages: Tensor | None, activation: int, a: float, b: float, needs_residual: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    statistics = Statistics(branch_scale, weight, bias, mean, invstd)
    dz = _gradient_of_sum(grad, input, saved, statistics, Pointwise(activation, a, b))
    model = grad if input is None else input
    grad_residual = torch.empty_like(model).copy_(dz) if needs_residual else grad.new_empty(0)
    d = dz if branch_scale is None else dz * per_sample(branch_scale, grad)
    if averages is not None:
        assert input is not None
        normalised = (widened(input) - per_channel(mean, input)) * per_channel(invstd, input)
        average, slope = averages.to(d.dtype)
        d = d - per_channel(average, grad) - normalised * per_channel(slope, grad)
    scale = invstd if weight is None else invstd * weight
    return torch.empty_like(model).copy_(d * per_channel(scale, grad)), grad_residual


def batch_norm_act_backward(
    grad: Tensor, input: Tensor | None, saved: Tensor | None, branch_scale: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, training: bool,
    activation: int, a: float, b: float, needs_input: bool, needs_residual: bool,
    needs_affine: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad_input, grad_residual = grad.new_empty(0), grad.new_empty(0)
    grad_weight, grad_bias = mean.new_empty(0), mean.new_empty(0)
    shared = (branch_scale, weight, bias, mean, invstd)
    averages = None
    if training or needs_affine:
        assert input is not None
        sums, grad_residual = batch_norm_act_backward_reduce(
            grad, input, saved, *shared, activation, a, b, needs_residual
        )
        grad_bias, grad_weight = (t.to(mean.dtype, copy=True) for t in sums)
        if training:
            averages = sums / max(input.numel() // max(input.shape[1], 1), 1)
    reduced = training or needs_affine
    if needs_input or (needs_residual and not reduced):
        grad_input, dz = batch_norm_act_backward_apply(
            grad, input, saved, *shared, averages, activation, a, b, needs_residual and not reduced
        )
        grad_residual = grad_residual if reduced else dz
        grad_input = grad_input if needs_input else grad.new_empty(0)
    return grad_input, grad_residual, grad_weight, grad_bias


def differentiable_backward(
    grad: Tensor, input: Tensor | None, saved: Tensor | None, statistics: Statistics,
    training: bool, eps: float, activation: Pointwise,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The backward pass as a differentiable function, for double backward to any order.

    Returns the gradients of input, residual, weight and bias (the last two are None without an
    input).
    """
    branch_scale, weight, bias, mean, invstd = statistics
    if input is not None:
        input = widened(input)  # once: each cast rounds its share of the gradient; shares cancel
    if training:
        assert input is not None
        count = input.numel() // input.shape[1]
        mean = _over_channels(input) / count
        distance = input - per_channel(mean, input)
        invstd = ((_over_channels(distance.square()) / count) + eps).rsqrt()
        statistics = Statistics(branch_scale, weight, bias, mean, invstd)
    dz = _gradient_of_sum(grad, input, saved, statistics, activation)
    d = dz if branch_scale is None else dz * per_sample(branch_scale, grad)
    scale = invstd if weight is None else invstd * weight
    grad_weight = grad_bias = None
    if input is not None:
        normalised = (input - per_channel(mean, input)) * per_channel(invstd, input)
        grad_bias, grad_weight = _over_channels(d), _over_channels(d * normalised)
        if training:
            count = input.numel() // input.shape[1]
            d = d - per_channel(grad_bias / count, grad)
            d = d - normalised * per_channel(grad_weight / count, grad)
    grad_input = (d * per_channel(scale, grad)).to(grad.dtype)
    return grad_input, dz.to(grad.dtype), grad_weight, grad_bias
