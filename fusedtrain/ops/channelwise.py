"""The activations with trained parameters, one for each channel or one for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.overrides import has_torch_function as _has_any

from .. import _recompute
from .._calls import apply_of, autocasts, needs_grad, takes
from .._graph.fx import handle as _handle
from ..reference import ACTIVATIONS, Activation, activations as _reference
from ._library import define, op
from .activations import check_all_meta, function_of

__all__ = ["prelu", "star_relu"]


def _define(row: Activation) -> None:
    def fake(input: Tensor, *parameters: Tensor) -> Tensor:
        check_all_meta(row.name, input, *parameters)
        return torch.empty_like(input)

    def fake_backward(grad: Tensor, saved: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        check_all_meta(row.name, grad, saved, *parameters)
        return tuple(map(torch.empty_like, (saved, *parameters)))

    define(row.name, row.forward, fake)
    define(f"{row.name}_backward", row.backward, fake_backward)


class ChannelKernel:
    """An activation with parameter tensors that are trained: ``kernel(input, *tensors)``."""

    def __init__(self, row: Activation) -> None:
        self.row = row
        self._forward = op(row.name)
        self._apply = apply_of(_channel_function(row))
        self._reference = row.forward

    def __call__(self, input: Tensor, *tensors: Tensor) -> Tensor:
        if not takes(input) or not all(self._fits(t, input) for t in tensors):
            return self._reference(input, *tensors)
        if needs_grad(input, *tensors):
            if torch.is_inference_mode_enabled() or input.is_inference():
                return self._reference(input, *tensors)
            return self._apply(input, *tensors)
        return self._forward(input, *tensors)

    def _fits(self, tensor: Tensor, input: Tensor) -> bool:
        per_channel = self.row.per_channel and input.dim() > 1
        return (
            takes(tensor)
            and tensor.dtype == input.dtype
            and tensor.device == input.device
            and tensor.dim() <= min(input.dim(), 1)  # broadcasting would add a dimension
            and (tensor.numel() == 1 or (per_channel and tensor.numel() == input.size(1)))
        )


def _channel_function(row: Activation) -> type[torch.autograd.Function]:
    forward_op = op(row.name)
    backward_op = op(f"{row.name}_backward")
    reference_backward = row.backward

    def forward(ctx: Any, input: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(input, *tensors)
        output: Tensor = forward_op(input, *tensors)
        scope = _recompute.scope()
        if scope is not None:
            scope.tag(output, forward_op, (input, *tensors))
        return output

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, *tensors = ctx.saved_tensors
        differentiable = torch.is_grad_enabled() or not takes(grad)
        formula = reference_backward if differentiable else backward_op
        gradients: tuple[Tensor | None, ...] = formula(grad, input, *tensors)
        return tuple(
            g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=True)
        )

    return function_of(row, forward, backward)


_ROWS = [row for row in ACTIVATIONS.values() if row.tensors]
for _row in _ROWS:
    _define(_row)
CHANNEL_KERNELS = {row.name: ChannelKernel(row) for row in _ROWS}
_prelu, _star_relu = CHANNEL_KERNELS["prelu"], CHANNEL_KERNELS["star_relu"]


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """``x if x > 0 else weight * x``; saves both arguments.

    See :func:`torch.nn.functional.prelu`.

    Args:
        input: any shape; dimension 1 are the channels.
        weight: 1-D, one element or one a channel. Under autocast both are cast, as torch does.

    Example:
        >>> prelu(torch.tensor([-1.0, 2.0]), torch.tensor([0.25]))
        tensor([-0.2500,  2.0000])
    """
    if _scripting():
        return _reference.prelu(input, weight)
    if _has_any((input, weight)):
        return _handle(prelu, (input, weight), input, weight)
    if autocasts(input):
        dtype = torch.get_autocast_dtype(input.device.type)
        input = input.to(dtype)
        if weight.is_floating_point() and weight.dtype != torch.float64:
            weight = weight.to(dtype)
    return _prelu(input, weight)


def star_relu(input: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """``scale * max(x, 0)^2 + bias`` (arXiv:2210.13452); saves input, scale and bias.

    Args:
        input: any shape.
        scale: 1-D, one element.
        bias: 1-D, one element.

    Example:
        >>> star_relu(torch.tensor([-1.0, 2.0]), torch.tensor([0.5]), torch.tensor([0.25]))
        tensor([0.2500, 2.2500])
    """
    if _scripting():
        return _reference.star_relu(input, scale, bias)
    if _has_any((input, scale, bias)):
        return _handle(star_relu, (input, scale, bias), input, scale, bias)
    if autocasts(input, "cuda"):  # whose autocast squares in float32
        return _reference.star_relu(input, scale, bias)
    return _star_relu(input, scale, bias)
