"""Batch norm with activation in the place of its input, for backward to compute that again.

The activation must be exactly invertible: `s` from 0 on, `slope * s` below, which is none at all or
LeakyReLU. ELU and softplus are invertible in real numbers only: they round to a constant.

    x = (f^-1(y) - bias) / (invstd weight) + mean          In-Place ABN, arXiv:1712.02616

y is rounded, by up to u |y| (u is half of the dtype's eps). So the normalised x is off by about
u (|normalised x| + |bias / weight|): as when it is stored, as long as the bias is not much larger
than the weight. In other channels the input is kept, apart (`lost`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _calls, _recompute
from .._capture import is_capturing
from .._torch_private import top_saved_tensors_hooks
from ..reference.batch_norm import Statistics, differentiable_backward
from ..reference.pointwise import IDENTITY, POINTWISE, Pointwise
from . import batch_norm_schema as batch_norm_schema  # defines the ops
from ._library import op

# |weight| must be at least these, the second one times |bias|.
LEAST_WEIGHT, LEAST_SHARE = 2.0**-6, 0.25

_forward = op("batch_norm_act_")
_restore = op("batch_norm_act_restore")
_backward = op("batch_norm_act_backward")


def slope_of(activation: Pointwise, dtype: torch.dtype) -> float | None:
    """Negative slope of an activation; None if it cannot be inverted exactly.

    In float16 small slopes are among these: their outputs would lose digits.
    """
    if activation.op == IDENTITY:
        return 1.0
    if POINTWISE[activation.op].name != "leaky_relu":
        return None
    slope = activation.a
    return slope if slope * LEAST_WEIGHT >= torch.finfo(dtype).tiny else None


def applies(input: Tensor, activation: Pointwise) -> bool:
    """Whether an output may take the place of this input, and backward compute it again."""
    return (
        slope_of(activation, input.dtype) is not None
        # An input that needs no gradient is the user's data; views and leaves autograd refuses.
        and input.requires_grad
        and not input.is_leaf
        and not input._is_view()
        and _calls.has_torch_layout(input)
        and not input.is_meta
        and _recompute.scope() is None  # where the output is what can be computed again
        and not _is_checkpointed()
        and not is_capturing()  # a CUDA graph, in which `lost` cannot wait for an answer
    )


def _is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint will run this again, maybe from the very input."""
    top = top_saved_tensors_hooks(True)
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


class BatchNormActInPlace(torch.autograd.Function):
    """Saves the output, the inputs of the channels that would be lost, and the statistics."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, *norm_and_activation: Any) -> Tensor:
        *norm, activation = norm_and_activation
        weight, bias, _, _, training, _, eps = norm  # as Norm has them, but for branch_scale
        index = kept = None
        channels = lost(weight, bias)
        if channels:
            index = torch.tensor(channels, device=input.device)
            kept = input.index_select(1, index)
        mean, invstd = _forward(input, *norm, *activation)
        ctx.mark_dirty(input)
        ctx.save_for_backward(input, kept, index, weight, bias, mean, invstd)
        ctx.training, ctx.eps, ctx.activation = training, eps, activation
        return input

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "batch_norm_act: with overwrite_input=True there is no second derivative, since "
                "the input that it is of is gone. Leave overwrite_input out"
            )
        output, kept, index, weight, bias, mean, invstd = ctx.saved_tensors
        activation: Pointwise = ctx.activation
        slope = slope_of(activation, output.dtype)
        assert slope is not None
        input = _restore(output, weight, bias, mean, invstd, slope)
        if index is not None:
            input.index_copy_(1, index, kept)
        saved = output if activation.saves_output else None
        statistics = Statistics(None, weight, bias, mean, invstd)
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if _calls.takes(grad):
            gradients = _backward(
                grad, input, saved, *statistics, ctx.training, *activation,
                ctx.needs_input_grad[0], False, needs_weight or needs_bias,
            )  # fmt: skip
        else:
            gradients = differentiable_backward(
                grad, input, saved, statistics, ctx.training, ctx.eps, activation
            )
        return (
            gradients[0] if ctx.needs_input_grad[0] else None,
            gradients[2] if needs_weight else None,
            gradients[3] if needs_bias else None,
            *(None,) * 6,
        )


apply = _calls.apply_of(BatchNormActInPlace)


@torch.no_grad()
def lost(weight: Tensor | None, bias: Tensor | None) -> list[int]:
    """The channels whose input cannot be computed again. On a GPU this waits for the device: memory
    is allocated for them. Nothing is remembered from call to call: some optimizers change weights
    without raising torch's version counter."""
    vector = bias if weight is None else weight
    if vector is None:
        return []
    size = torch.ones_like(vector) if weight is None else weight.abs()
    enough = (size >= LEAST_WEIGHT) & size.isfinite()  # nor NaN
    if bias is not None:
        enough &= size >= LEAST_SHARE * bias.abs()
    if bool(enough.all()):
        return []
    return enough.logical_not().nonzero().flatten().tolist()
