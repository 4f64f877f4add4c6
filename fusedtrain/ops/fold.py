"""The ops that fold a batch norm into a weight at every call, with its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._calls import takes
from ..reference import fold as reference
from ._library import define, op


def _fake(weight: Tensor, bias: Any, gamma: Any, beta: Any, mean: Tensor, *rest: Any) -> Any:
    return torch.empty_like(weight), weight.new_empty(mean.shape)


def _fake_backward(
    grad_weight: Tensor, grad_bias: Tensor, weight: Tensor, bias: Any, gamma: Any, mean: Tensor,
    *rest: Any,
) -> Any:  # fmt: skip
    ours = torch.empty_like(weight), weight.new_empty(mean.shape)
    return (*ours, torch.empty_like(mean), torch.empty_like(mean))


define("fold_weight", reference.fold_weight, _fake)
define("fold_weight_backward", reference.fold_weight_backward, _fake_backward)
_forward = op("fold_weight")
_backward = op("fold_weight_backward")


class _FoldWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        weight, bias, gamma, _, mean, var, *numbers = arguments
        ctx.save_for_backward(weight, bias, gamma, mean, var)
        ctx.numbers = numbers
        return _forward(*arguments)

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor, grad_bias: Tensor) -> Any:
        # Under create_graph the formula in torch operators is differentiated again.
        plain = torch.is_grad_enabled() or not (takes(grad_weight) and takes(grad_bias))
        formula = reference.fold_weight_backward if plain else _backward
        gradients = formula(grad_weight, grad_bias, *ctx.saved_tensors, *ctx.numbers)
        wanted = ctx.needs_input_grad[:4]
        return (*(g if w else None for g, w in zip(gradients, wanted, strict=True)), *[None] * 5)


def fold_weight(
    weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    running_mean: Tensor, running_var: Tensor, eps: float, transposed: bool, groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weight and bias of a convolution with its batch norm (reference/fold.py)."""
    arguments = (weight, bias, gamma, beta, running_mean, running_var, eps, transposed, groups)
    tensors = [t for t in arguments[:6] if t is not None]
    if not all(map(takes, tensors)):
        return reference.fold_weight(*arguments)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _FoldWeight.apply(*arguments)
    return _forward(*arguments)
