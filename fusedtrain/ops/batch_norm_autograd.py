"""Autograd around the ops of batch norm with activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _backends, _calls, _recompute
from .._torch_private import BatchNormBase
from ..reference.batch_norm import Statistics, differentiable_backward
from ..reference.dtypes import wide_of
from ..reference.pointwise import BY_OUTPUT, INDEX, Pointwise
from . import batch_norm_schema as batch_norm_schema  # defines the ops
from ._library import library, op

_forward = op("batch_norm_act")
_backward = op("batch_norm_act_backward")
_given_statistics = op("batch_norm_act_apply")

# Running mean, running variance, training, momentum, eps: what the op takes behind the bias.
Settings = tuple[Tensor | None, Tensor | None, bool, float, float]


class BatchNormAct(torch.autograd.Function):
    """Saves the input and the two vectors of statistics; with a residual, also what the activation
    is differentiated by (the output, or the residual); the input only where it is needed."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, residual: Tensor | None, branch_scale: Tensor | None,
        weight: Tensor | None, bias: Tensor | None, settings: Settings, activation: Pointwise,
    ) -> Tensor:  # fmt: skip
        output, mean, invstd = _forward(
            input, residual, branch_scale, weight, bias, *settings, *activation
        )
        _, _, training, _, ctx.eps = settings
        ctx.training, ctx.activation = training, activation
        needs = ctx.needs_input_grad
        statistics = (branch_scale, weight, bias, mean, invstd)
        keeps_input = save_for_backward(
            ctx, input, residual, output, statistics, training, activation, needs[3] or needs[4]
        )
        scope = _recompute.scope()
        if scope is not None:
            keeps_residual = not activation.saves_output and activation.op >= 0
            scope.tag(
                output, _given_statistics, (input, residual, *statistics), tuple(activation),
                (None if keeps_input else input, None if keeps_residual else residual),
            )  # fmt: skip
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def differentiable(grad: Tensor, *saved: Any) -> tuple[Any, ...]:
            # torch.utils.checkpoint hands out saved tensors once.
            return _formula(grad, *saved[:7], ctx.training, ctx.eps, *ctx.activation)

        op = differentiable if _calls.plain_backward(grad) else _backward
        return (*_gradients(ctx, grad, op), None, None)


def _gradients(ctx: Any, grad: Tensor, op: Callable[..., tuple[Any, ...]]) -> Any:
    """The gradients of input, residual, branch_scale, weight and bias. A residual that is only
    added gets the output's gradient itself."""
    needs_input, needs_residual, _, needs_weight, needs_bias = ctx.needs_input_grad[:5]
    added = ctx.activation.op < 0
    gradients = op(
        grad, *ctx.saved_tensors, ctx.training, *ctx.activation, needs_input,
        needs_residual and not added, needs_weight or needs_bias,
    )  # fmt: skip
    return (
        gradients[0] if needs_input else None,
        (grad if added else gradients[1]) if needs_residual else None,
        None,
        gradients[2] if needs_weight else None,
        gradients[3] if needs_bias else None,
    )


def save_for_backward(
    ctx: Any,
    input: Tensor,
    residual: Tensor | None,
    output: Tensor,
    statistics: tuple[Tensor | None, ...],
    training: bool,
    activation: Pointwise,
    affine: bool,
) -> bool:
    """Keeps what backward will need, and no other tensor of the input's size.

    With fixed statistics and no gradient for weight and bias, the input serves the activation's
    derivative only: nothing is kept for none, the output (which the next layer mostly keeps anyway)
    where the derivative is a function of it.

    Args:
        statistics: as :class:`Statistics` has them.
        affine: whether weight or bias need a gradient.

    Returns whether it keeps the input.
    """
    identity, by_output = activation.op < 0, activation.op in BY_OUTPUT
    needs_input = training or affine or not (identity or by_output)
    saved = None
    if by_output and (residual is not None or not needs_input):
        saved = output
    elif not by_output and not identity:
        saved = residual
    ctx.save_for_backward(input if needs_input else None, saved, *statistics)
    return needs_input


apply = _calls.apply_of(BatchNormAct)


def _formula(grad: Tensor, input: Tensor | None, saved: Tensor | None, *others: Any) -> Any:
    """The differentiable backward, with the arguments of the node in C++."""
    *statistics, training, eps, op, a, b = others
    grad_input, grad_residual, *affine = differentiable_backward(
        grad, input, saved, Statistics(*statistics), training, eps, Pointwise(op, a, b)
    )
    return grad_input, grad if op < 0 else grad_residual, *affine


_cpp = _backends.autograd()
if _cpp is not None:
    _cpp.prepare_batch_norm(_formula, INDEX["softplus"])


def recomputed_as_torch(norm: BatchNormBase, input: Tensor, output: Tensor) -> None:
    """Registers the recomputation, with the same bits, of an output of torch's batch norm."""
    scope = _recompute.scope()
    if scope is None or output.grad_fn is None:
        return
    mean, var = norm.running_mean, norm.running_var
    training = norm.training or (mean is None and var is None)
    wide = None
    if training:
        if mean is not None and norm.track_running_stats:
            wide = mean.dtype
        mean = var = None
    scope.tag(output, _batch_norm, (input, mean, var, norm.weight, norm.bias), (norm.eps, wide))


def _batch_norm(
    input: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, eps: float, wide: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """torch's batch norm. `wide`: the dtype of running statistics that the forward has updated:
    torch computes in it."""
    training = mean is None
    if wide is not None:
        mean, var = input.new_zeros(2, input.shape[1], dtype=wide)
    return torch.nn.functional.batch_norm(input, mean, var, weight, bias, training, 0.0, eps)


def _setup_functional(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, residual, branch_scale, weight, bias, _, _, training, _, *activation = inputs
    ctx.training, ctx.activation = training, Pointwise(*activation)
    mean = output[1].to(wide_of(input))
    statistics = Statistics(branch_scale, weight, bias, mean, output[3])
    affine = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    save_for_backward(ctx, input, residual, output[0], statistics, training, ctx.activation, affine)
    ctx.mark_non_differentiable(*output[1:])


def _backward_functional(ctx: Any, grad: Tensor, *_: Any) -> Any:
    op = torch.ops.fusedtrain.batch_norm_act_backward
    return (*_gradients(ctx, grad, op), *(None,) * 7)


torch.library.register_autograd(
    "fusedtrain::batch_norm_act_functional",
    _backward_functional,
    setup_context=_setup_functional,
    lib=library,
)
