"""Depthwise convolutions: the ops, and autograd around them.

`channels_last` says how output and gradients lie in memory; inputs in the other layout are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _backends, _recompute
from .._calls import apply_of, plain_backward
from ..reference import depthwise as reference
from ..reference.depthwise import new_tensor, out_sizes
from ._library import define, op

Numbers = tuple[int, ...]


def fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], padding_end: Sequence[int], dilation: Sequence[int],
    channels_last: bool,
) -> Tensor:  # fmt: skip
    sizes = [list(numbers) for numbers in (stride, padding, padding_end, dilation)]
    out = out_sizes(list(input.shape[2:]), list(weight.shape[2:]), *sizes)
    return new_tensor(input, [input.size(0), weight.size(0), *out], channels_last)


def fake_backward(
    grad: Tensor, input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], channels_last: bool, input_asked: bool, weight_asked: bool,
    bias_asked: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        new_tensor(input, list(input.shape if input_asked else [0]), channels_last and input_asked),
        weight.new_empty(weight.shape if weight_asked else [0]),
        weight.new_empty(weight.shape[:1] if bias_asked else [0]),
    )


define("depthwise_conv", reference.depthwise_conv, fake)
define("depthwise_conv_backward", reference.depthwise_conv_backward, fake_backward)
_depthwise_conv = op("depthwise_conv")
_depthwise_conv_backward = op("depthwise_conv_backward")


class Faster(NamedTuple):
    """Passes in which our kernel is faster than torch's; each pass chooses for itself.

    The bias goes with the weight.
    """

    forward: bool
    grad_input: bool
    grad_weight: bool


class DepthwiseConv(torch.autograd.Function):
    """Saves the input, for the gradient of the weight, and the weight, for that of the input.

    The node in C++, csrc/autograd/depthwise.h, does the same.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Numbers,
        padding: Numbers, padding_end: Numbers, dilation: Numbers, channels_last: bool,
        use: Faster,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(input, weight)
        ctx.rest = (stride, padding, dilation, channels_last)
        ctx.use = use
        rest = (stride, padding, padding_end, dilation, channels_last, use)
        output = convolve(input, weight, bias, *rest)
        scope = _recompute.scope()
        if scope is not None:
            scope.tag(output, convolve, (input, weight, bias), rest)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        asked = ctx.needs_input_grad[:3]
        rest = (None, None, None, None, None, None)
        # torch's own gradients can be differentiated as they are.
        if any(ctx.use) and plain_backward(grad):
            plain = reference.depthwise_conv_backward(grad, input, weight, *ctx.rest, *asked)
            return (*known(plain, asked), *rest)
        return (*gradients_of(grad, input, weight, ctx.use, asked, *ctx.rest), *rest)


def gradients_of(
    grad: Tensor, input: Tensor, weight: Tensor, use: Faster, asked: Sequence[bool],
    stride: Numbers, padding: Numbers, dilation: Numbers, channels_last: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of input, weight and bias that are asked for, by our kernels or torch's."""
    of_weight = use.grad_weight
    ours = [asked[0] and use.grad_input, asked[1] and of_weight, asked[2] and of_weight]
    torchs = [wanted and not mine for wanted, mine in zip(asked, ours, strict=True)]
    gradients: tuple[Tensor | None, ...] = (None, None, None)
    if any(ours):
        made = _depthwise_conv_backward(
            grad, input, weight, stride, padding, dilation, channels_last, *ours
        )
        gradients = known(made, ours)
    if any(torchs):
        other = torch.ops.aten.convolution_backward(
            grad, input, weight, [weight.size(0)], stride, padding, dilation, False,
            [0] * len(stride), input.size(1), torchs,
        )  # fmt: skip
        gradients = tuple(
            b if theirs else a for a, b, theirs in zip(gradients, other, torchs, strict=True)
        )
    return gradients


def known(gradients: Sequence[Tensor], asked: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(t if wanted else None for t, wanted in zip(gradients, asked, strict=True))


def convolve(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Numbers, padding: Numbers,
    padding_end: Numbers, dilation: Numbers, channels_last: bool, use: Faster,
) -> Tensor:  # fmt: skip
    if use.forward:
        return _depthwise_conv(
            input, weight, bias, stride, padding, padding_end, dilation, channels_last
        )
    last: Any = (False, [0] * len(stride), input.size(1))
    return torch.convolution(input, weight, bias, stride, padding, dilation, *last)


def convolve_cast(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """The output that torch's function has of weight and bias that autocast casts."""
    return convolve(x, weight.type_as(x), None if bias is None else bias.type_as(x), *rest)


_recompute.OP_NAMES.update(dict.fromkeys((convolve, convolve_cast), "depthwise_conv"))
apply = apply_of(DepthwiseConv)
cpp = _backends.autograd()
if cpp is not None:
    cpp.prepare_depthwise(reference.depthwise_conv_backward)
