"""Depthwise convolutions in one, two and three dimensions: a kernel of its own for every channel.

Output channel c is of input channel ``c // multiplier``. Position o of the output sees positions
``o stride - padding + k dilation`` of the input, zeros outside (Chollet, arXiv:1610.02357).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch_private import functorch_is_active, is_legacy_batched


def out_sizes(
    sizes: list[int], kernel: list[int], stride: list[int], padding: list[int],
    padding_end: list[int], dilation: list[int],
) -> list[int]:  # fmt: skip
    """Positions of the output; `sizes` and `kernel` are those of the dimensions behind channels."""
    out: list[int] = []
    for i in range(len(sizes)):
        room = sizes[i] + padding[i] + padding_end[i] - dilation[i] * (kernel[i] - 1) - 1
        out.append(room // stride[i] + 1)
    return out


def _format(dims: int, channels_last: bool) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last if dims == 4 else torch.channels_last_3d


def new_tensor(model: Tensor, shape: list[int], channels_last: bool) -> Tensor:
    return torch.empty(
        shape, dtype=model.dtype, device=model.device,
        memory_format=_format(len(shape), channels_last),
    )  # fmt: skip


def _laid_out(t: Tensor, channels_last: bool) -> Tensor:
    if functorch_is_active() or is_legacy_batched(t):  # vmap does not support channels_last
        return t
    return t.contiguous(memory_format=_format(t.dim(), channels_last))


def _padded(input: Tensor, padding: list[int], end: list[int]) -> Tensor:
    sides: list[int] = []
    for i in range(len(padding)):
        last = len(padding) - 1 - i
        sides += [padding[last], end[last]]
    return torch.nn.functional.pad(input, sides)


def depthwise_conv(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    padding_end: list[int], dilation: list[int], channels_last: bool,
) -> Tensor:  # fmt: skip
    """`weight` is [C multiplier, 1, ...]; `padding` in front of each dimension, then at its end."""
    zeros = [0] * len(stride)
    output = torch.convolution(
        _padded(input, padding, padding_end), weight, bias, stride, zeros, dilation, False, zeros,
        input.size(1),
    )  # fmt: skip
    return _laid_out(output, channels_last)


def depthwise_conv_backward(
    grad: Tensor, input: Tensor, weight: Tensor, stride: list[int], padding: list[int],
    dilation: list[int], channels_last: bool, input_asked: bool, weight_asked: bool,
    bias_asked: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of input, weight and bias. Those that are not asked for have no elements."""
    zeros = [0] * len(stride)
    end: list[int] = []  # what the last output sees beyond the input; negative: inputs not seen
    for i in range(len(stride)):
        reach = (grad.size(2 + i) - 1) * stride[i] + dilation[i] * (weight.size(2 + i) - 1) + 1
        end.append(reach - input.size(2 + i) - padding[i])
    padded = _padded(input, padding, end)
    grad_input, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad, padded, weight, [weight.size(0)], stride, zeros, dilation, False, zeros,
        input.size(1), [input_asked, weight_asked, bias_asked],
    )  # fmt: skip
    none = input.new_empty([0])
    if input_asked:
        inner = [-side for side in padding]
        grad_input = _padded(grad_input, inner, [-side for side in end])
        grad_input = _laid_out(grad_input, channels_last)
    return (
        grad_input if input_asked else none,
        grad_weight.contiguous() if weight_asked else none,
        grad_bias if bias_asked else none,
    )
