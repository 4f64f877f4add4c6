"""Batch norm with activation: the ops of `_batch_norm_ops.py`.

Training takes three launches forward (shares of the statistics; the statistics, invstd and running
statistics; the output) and three backward (shares of the sums, with the gradient of the residual;
the sums, with those of weight and bias; the gradient of the input). Nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.batch_norm import IDENTITY
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
    input: Tensor,
    residual: Tensor | None,
    branch_scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: int,
    a: float,
    b: float,
) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(input, branch_scale, weight, bias, activation, a, b)
    added = call.companion(residual, "residual")
    running = None
    if running_mean is not None and running_var is not None:
        if training and not (running_mean.is_contiguous() and running_var.is_contiguous()):
            raise RuntimeError(f"fusedtrain::{NAME}: running statistics must be contiguous")
        running = call.given(running_mean, "running_mean"), call.given(running_var, "running_var")
    elif not training or running_mean is not running_var:
        raise RuntimeError(f"fusedtrain::{NAME}: running_mean and running_var")
    mean, invstd = call.mean, call.invstd = call.new_vectors()
    if call.empty:
        return call.laid_out(call.normalise(added)), mean.zero_(), invstd.zero_()
    if training:
        if running is not None and call.count < 2:
            raise RuntimeError(f"fusedtrain::{NAME}: one value a channel has no variance")
        call.statistics(mean, invstd, running, momentum, eps, invert=True)
    else:
        assert running is not None
        call.invert(running, eps)
    return call.laid_out(call.normalise(added)), mean, invstd


def batch_norm_act_apply(
    input: Tensor,
    residual: Tensor | None,
    branch_scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    activation: int,
    a: float,
    b: float,
) -> Tensor:
    call = Call(input, branch_scale, weight, bias, activation, a, b)
    call.use(mean, invstd)
    return call.laid_out(call.normalise(call.companion(residual, "residual")))


def batch_norm_act_backward(
    grad: Tensor,
    input: Tensor | None,
    saved: Tensor | None,
    branch_scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    activation: int,
    a: float,
    b: float,
    needs_input: bool,
    needs_residual: bool,
    needs_affine: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    reduced = training or needs_affine
    if reduced and input is None:
        raise RuntimeError(f"fusedtrain::{NAME}_backward: input")
    call = BackwardCall(
        grad, input, saved, branch_scale, weight, bias, mean, invstd, activation, a, b
    )
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
    return (
        none if grad_input is None else call.laid_out(grad_input),
        none if grad_residual is None else call.laid_out(grad_residual),
        *(affine or (none, none)),
    )


def batch_norm_act_backward_reduce(
    grad: Tensor,
    input: Tensor,
    saved: Tensor | None,
    branch_scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    activation: int,
    a: float,
    b: float,
    needs_residual: bool,
) -> tuple[Tensor, Tensor]:
    call = BackwardCall(
        grad, input, saved, branch_scale, weight, bias, mean, invstd, activation, a, b
    )
    grad_residual = torch.empty_like(call.x) if needs_residual else None
    sums = call.reduce(grad_residual, None, 1)
    return sums, grad.new_empty(0) if grad_residual is None else call.laid_out(grad_residual)


def batch_norm_act_backward_apply(
    grad: Tensor,
    input: Tensor | None,
    saved: Tensor | None,
    branch_scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    averages: Tensor | None,
    activation: int,
    a: float,
    b: float,
    needs_residual: bool,
) -> tuple[Tensor, Tensor]:
    call = BackwardCall(
        grad, input, saved, branch_scale, weight, bias, mean, invstd, activation, a, b
    )
    if averages is not None:
        ok = averages.dtype is torch.float64 and averages.numel() == 2 * call.channels
        if input is None or not ok or averages.device != call.x.device:
            raise RuntimeError(f"fusedtrain::{NAME}_backward_apply: averages")
        averages = averages.contiguous()
    grad_input = torch.empty_like(call.x)
    grad_residual = torch.empty_like(call.x) if needs_residual else None
    call.apply(grad_input, grad_residual, averages)
    residual = grad.new_empty(0) if grad_residual is None else call.laid_out(grad_residual)
    return call.laid_out(grad_input), residual
