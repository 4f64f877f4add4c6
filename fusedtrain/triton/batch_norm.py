"""Batch norm with activation: the ops of `ops/batch_norm_schema.py`, with the arguments of the
formulas in `reference/batch_norm.py`.

Training takes three launches forward (shares of the statistics; the statistics, invstd and running
statistics; the output) and three backward (shares of the sums, and the residual's gradient; the
sums, and the gradients of weight and bias; the input's gradient). Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference.pointwise import IDENTITY
from ._batch_norm_calls import NAME, BackwardCall, Call


def batch_norm_stats(input: Tensor) -> tuple[Tensor, Tensor]:
    call = Call(input, None, None, None, IDENTITY, 0.0, 0.0)
    mean = input.new_empty(call.channels, dtype=torch.float64)
    variance = torch.empty_like(mean)
    if call.empty:
        return mean.zero_(), variance.zero_()
    call.statistics(mean, variance, None, 0.0, 0.0, invert=False)
    return mean, variance


def batch_norm_act(
    input: Tensor, residual: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    branch_scale, weight, bias, *settings, activation, a, b = arguments
    call = Call(input, branch_scale, weight, bias, activation, a, b)
    added = call.companion(residual, "residual")
    mean, invstd = call.look(*settings)
    return call.laid_out(call.normalise(added, torch.empty_like(call.x))), mean, invstd


def batch_norm_act_(input: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    weight, bias, *settings, activation, a, b = arguments
    call = Call(input, None, weight, bias, activation, a, b)
    if call.x is not input:
        raise RuntimeError(f"fusedtrain::{NAME}_: input must be dense")
    mean, invstd = call.look(*settings)
    call.normalise(None, input)
    return mean, invstd


def batch_norm_act_restore(
    output: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor,
    slope: float,
) -> Tensor:  # fmt: skip
    call = Call(output, None, weight, bias, IDENTITY, 0.0, 0.0)
    call.use(mean, invstd)
    return call.laid_out(call.restore(slope))


def batch_norm_act_apply(input: Tensor, residual: Tensor | None, *arguments: Any) -> Tensor:
    branch_scale, weight, bias, mean, invstd, *activation = arguments
    call = Call(input, branch_scale, weight, bias, *activation)
    call.use(mean, invstd)
    added = call.companion(residual, "residual")
    return call.laid_out(call.normalise(added, torch.empty_like(call.x)))


def batch_norm_act_backward(
    grad: Tensor, input: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tensors, training, activation, a, b, needs_input, needs_residual, needs_affine = arguments
    reduced = training or needs_affine
    if reduced and input is None:
        raise RuntimeError(f"fusedtrain::{NAME}_backward: input")
    call = BackwardCall(grad, input, *tensors, activation, a, b)
    none = grad.new_empty(0)
    grad_input = torch.empty_like(call.x) if needs_input else None
    grad_residual = torch.empty_like(call.x) if needs_residual else None
    affine = averages = None
    if reduced:
        affine = call.new_vectors()
        averages = call.reduce(grad_residual, affine, call.count if training else 1)
    still = None if reduced else grad_residual
    if grad_input is not None or still is not None:
        call.apply(grad_input, still, averages if training else None)
    return call.laid_out(grad_input), call.laid_out(grad_residual), *(affine or (none, none))


def batch_norm_act_backward_reduce(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *call_arguments, needs_residual = arguments
    call = BackwardCall(grad, *call_arguments)
    grad_residual = torch.empty_like(call.x) if needs_residual else None
    sums = call.reduce(grad_residual, None, 1)
    return sums, call.laid_out(grad_residual)


def batch_norm_act_backward_apply(
    grad: Tensor, input: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor]:
    *tensors, averages, activation, a, b, needs_residual = arguments
    call = BackwardCall(grad, input, *tensors, activation, a, b)
    if averages is not None:
        ok = averages.dtype is torch.float64 and averages.numel() == 2 * call.channels
        if input is None or not ok or averages.device != call.x.device:
            raise RuntimeError(f"fusedtrain::{NAME}_backward_apply: averages")
        averages = averages.contiguous()
    grad_input = torch.empty_like(call.x)
    grad_residual = torch.empty_like(call.x) if needs_residual else None
    call.apply(grad_input, grad_residual, averages)
    return call.laid_out(grad_input), call.laid_out(grad_residual)
