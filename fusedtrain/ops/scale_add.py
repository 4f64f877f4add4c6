"""Scaled sums: the ops, autograd around them, and residual branches.

``scale`` is [samples, channels]: as many samples as dimension 0 has or one, as many channels as
dimension ``dim`` has, one where that is -1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as _is_dynamo_compiling
from torch.overrides import has_torch_function as _has_any

from .. import _backends, _recompute
from .._calls import apply_of, fits, needs_grad, plain_backward
from .._graph.fx import handle as _handle
from ..reference import scale_add as reference
from ..reference.channels import channel_sums, spread
from ..reference.dtypes import wide_of
from ._library import define, op

__all__ = ["residual_add"]


def _fake_backward(
    grad: Tensor, input: Tensor | None, scale: Tensor, dim: int, needs_input: bool
) -> tuple[Tensor, Tensor]:
    model = grad if input is None else input
    grad_input = torch.empty_like(model) if needs_input else grad.new_empty(0)
    shape = (0,) if input is None else scale.shape
    return grad_input, grad.new_empty(shape, dtype=wide_of(grad))


define("scale_add", reference.scale_add, lambda input, *_: torch.empty_like(input))
define("scale_add_backward", reference.scale_add_backward, _fake_backward)
_scale_add, _scale_add_backward = op("scale_add"), op("scale_add_backward")


class ScaleAdd(torch.autograd.Function):
    """Saves the scale, and the input where the scale is trained."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, scale: Tensor, residual: Tensor | None, dim: int
    ) -> Tensor:
        output: Tensor = _scale_add(input, scale, residual, dim)
        keeps = ctx.needs_input_grad[1]
        ctx.save_for_backward(input if keeps else None, scale)
        ctx.dim = dim
        scope = _recompute.scope()
        if scope is not None:
            dropped = (residual, None if keeps else input)
            scope.tag(output, _scale_add, (input, scale, residual), (dim,), dropped)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, scale = ctx.saved_tensors
        needs_input, needs_scale, needs_residual = ctx.needs_input_grad[:3]
        if plain_backward(grad):
            gradients = _differentiable_backward(grad, input, scale, ctx.dim, needs_scale)
        else:
            gradients = _scale_add_backward(
                grad, input if needs_scale else None, scale, ctx.dim, needs_input
            )
        return (
            gradients[0] if needs_input else None,
            gradients[1].to(scale.dtype) if needs_scale else None,
            grad if needs_residual else None,
            None,
        )


def _differentiable_backward(
    grad: Tensor, input: Tensor | None, scale: Tensor, dim: int, needs_scale: bool
) -> tuple[Any, Any, Tensor]:
    """Gradients of input, scale (None where not needed) and residual."""
    sums = None
    if needs_scale:
        assert input is not None
        sums = channel_sums(grad * input, scale.shape[0], dim).to(scale.dtype)
    return grad * spread(scale, grad, dim), sums, grad


_apply_scale = apply_of(ScaleAdd)
_cpp = _backends.autograd()
if _cpp is not None:
    _cpp.prepare_scale_add(_differentiable_backward)


def run_scale(input: Tensor, scale: Tensor, residual: Tensor | None, dim: int) -> Tensor:
    """`scale` is [samples, channels]; :func:`fits` has allowed them all."""
    if _cpp is not None and not _is_dynamo_compiling():
        result: Any = _cpp.scale_add(input, scale, residual, dim)
        if result is not NotImplemented:
            return result
    if needs_grad(input, scale, residual):
        return _apply_scale(input, scale, residual, dim)
    return _scale_add(input, scale, residual, dim)


def residual_add(
    residual: Tensor,
    input: Tensor,
    scale: Tensor | None = None,
    branch_scale: Tensor | None = None,
    dim: int = -1,
) -> Tensor:
    """``residual + input * scale * branch_scale``: layer scale (arXiv:2103.17239), stochastic depth
    (arXiv:1603.09382) and the addition in one pass.

    Saves the input where the scale is trained, else nothing of its size.

    Args:
        residual: of the input's shape.
        input: [N, ...], what the branch has computed.
        scale: one value for each channel (dimension `dim`); any shape of so many elements.
        branch_scale: [N], 0 for samples whose branch is dropped, else 1 or 1 / keep_prob. It gets
            no gradient.
        dim: of the channels.

    Raises:
        ValueError: `scale` has not one value a channel, or `branch_scale` not one a sample.
        IndexError: the input has no dimension `dim`.
        RuntimeError: shapes that cannot be added.

    Example:
        >>> residual_add(torch.ones(2, 2), torch.ones(2, 2), torch.tensor([1.0, 3.0]))
        tensor([[2., 4.],
                [2., 4.]])
    """
    tensors = (residual, input, scale, branch_scale)
    if _has_any(tensors):
        return _handle(residual_add, tensors, residual, input, scale, branch_scale, dim=dim)
    if scale is not None and not -input.dim() <= dim < input.dim():
        raise IndexError(f"dim: {dim} is not a dimension of an input of {input.dim()}")
    channel = dim % input.dim() if scale is not None else -1
    if scale is not None and scale.numel() != input.size(channel):
        raise ValueError(
            f"scale: expected one value for each of {input.size(channel)} channels, got shape "
            f"{tuple(scale.shape)}"
        )
    if branch_scale is not None and branch_scale.shape != input.shape[:1]:
        raise ValueError(
            f"branch_scale: expected one value for each of {input.shape[0]} samples, got shape "
            f"{tuple(branch_scale.shape)}"
        )
    if scale is None and branch_scale is None:
        return residual + input
    factors = None if scale is None else scale.reshape(1, -1)
    if branch_scale is not None:
        rows = branch_scale.detach().reshape(-1, 1)
        factors = rows if factors is None else factors * rows.to(factors.dtype)
    assert factors is not None
    factors = factors.to(input.dtype) if branch_scale is not None and scale is None else factors
    # Dimension 0 cannot be both that of the samples and that of the channels.
    clash = factors.shape[0] != 1 and channel == 0
    # The factors' gradients would be as many as the input's: 1024 x 4096 took twice eager's time.
    many = factors.shape[0] > 1 and factors.requires_grad and factors.numel() * 16 > input.numel()
    if (
        clash
        or many
        or residual.shape != input.shape
        or input.dim() == 0
        or not fits(input, factors, residual)
    ):
        y = input
        if scale is not None:
            shape = [1] * input.dim()
            shape[channel] = -1
            y = y * scale.reshape(shape)
        if branch_scale is not None:
            y = y * branch_scale.detach().to(y.dtype).reshape([-1] + [1] * (input.dim() - 1))
        return residual + y
    return run_scale(input, factors, residual, channel)
