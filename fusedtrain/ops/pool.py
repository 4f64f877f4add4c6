"""Pooling: maxima of windows, and means whose gradients are views.

`bits` is what a place takes (1, 2, 4 or 8; 0: no codes are asked for). `channels_last` says how
output and gradient lie in memory, the order of the codes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.nn import functional as torch_functional
from torch.overrides import has_torch_function_unary as _has

from .. import _recompute
from .._calls import (
    apply_of,
    fits,
    is_plain,
    needs_grad,
    plain_backward,
    suggests_channels_last,
)
from .._graph.fx import handle as _handle
from .._torch_private import BroadcastingList1, BroadcastingList2
from ..reference import pool as reference
from ..reference.bits import packed_bytes
from ..reference.pool import new_image, out_sizes
from ._library import define, op

__all__ = ["adaptive_avg_pool2d", "max_pool2d", "mean"]


def _fake(
    input: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    ceil_mode: bool, bits: int, channels_last: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sizes = out_sizes(input, kernel_size, stride, padding, ceil_mode)
    output = new_image(input, *sizes, channels_last)
    codes = input.new_empty(packed_bytes(output.numel(), bits), dtype=torch.uint8)
    return output, codes


def _fake_backward(grad: Tensor, codes: Tensor, height: int, width: int, *rest: object) -> Tensor:
    return new_image(grad, height, width, bool(rest[-1]))


define("max_pool2d", reference.max_pool2d, _fake)  # -> output, codes
define("max_pool2d_backward", reference.max_pool2d_backward, _fake_backward)
_max_pool2d = op("max_pool2d")
_max_pool2d_backward = op("max_pool2d_backward")

_Pair = tuple[int, int]


def _maxima(input: Tensor, *window: Any) -> Tensor:
    """Maxima without codes: no gradient is needed, or the codes are kept already."""
    *sizes, channels_last = window
    return _max_pool2d(input, *sizes, 0, channels_last)[0]


class MaxPool2d(torch.autograd.Function):
    """Saves the places of the maxima."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, kernel_size: _Pair, stride: _Pair, padding: _Pair,
        ceil_mode: bool, channels_last: bool,
    ) -> Tensor:  # fmt: skip
        window = (kernel_size, stride, padding)
        bits = _bits_of(kernel_size)
        output, codes = _max_pool2d(input, *window, ceil_mode, bits, channels_last)
        ctx.save_for_backward(codes)
        ctx.rest = (*input.shape[-2:], *window, bits, channels_last)
        scope = _recompute.scope()
        if scope is not None:
            scope.tag(output, _maxima, (input,), (*window, ceil_mode, channels_last), (input,))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (codes,) = ctx.saved_tensors
        op = reference.max_pool2d_backward if plain_backward(grad) else _max_pool2d_backward
        return (op(grad, codes, *ctx.rest), None, None, None, None, None)


_apply = apply_of(MaxPool2d)


def _bits_of(kernel_size: _Pair) -> int:
    """Number of bits of a place in such a window."""
    count = kernel_size[0] * kernel_size[1]
    return 1 if count <= 2 else 2 if count <= 4 else 4 if count <= 16 else 8


def _pair(value: Any) -> _Pair | None:
    """Two integers, of one or two; None of anything else, about which torch is asked."""
    if type(value) is int:
        return value, value
    if type(value) in (tuple, list) and len(value) == 2:
        first, second = value
        if type(first) is int and type(second) is int:
            return first, second
    return None


def _window(
    input: Tensor, kernel_size: Any, stride: Any, padding: Any, ceil_mode: Any
) -> tuple[_Pair, _Pair, _Pair] | None:
    """Kernel size, stride and padding, where the kernels take them."""
    kernel, pad = _pair(kernel_size), _pair(padding)
    step = kernel if stride is None else _pair(stride)
    if kernel is None or step is None or pad is None or type(ceil_mode) is not bool:
        return None
    if not 0 < kernel[0] * kernel[1] <= 256 or input.dim() not in (3, 4):
        return None
    for size, k, s, p in zip(input.shape[-2:], kernel, step, pad, strict=True):
        if k < 1 or s < 1 or not 0 <= p <= k // 2 or size < 1:
            return None
        if reference.out_size(size, k, s, p, ceil_mode) < 1:
            return None
    # Dimensions without elements: torch has an opinion on all but the batch.
    return (kernel, step, pad) if all(input.shape[1:]) and input.size(-3) else None


def max_pool2d(
    input: Tensor,
    kernel_size: BroadcastingList2[int],
    stride: Optional[BroadcastingList2[int]] = None,  # noqa: UP045
    padding: BroadcastingList2[int] = 0,
    dilation: BroadcastingList2[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """The maximum of every window, as :func:`torch.nn.functional.max_pool2d`, bit for bit.

    Saves the place of each maximum in its window, in 2 bits an output where windows have up to 4
    elements, 4 bits up to 16, 8 bits up to 256: eager torch saves the input, and 64 bits an output.
    Gradients are eager torch's, bit for bit; but sums of several windows are rounded to 16 bits
    once, where eager torch on the CPU rounds after every addition.

    Eager torch runs, as it is, under torch.compile and functorch, with `dilation` other than 1,
    with `return_indices`, and for larger windows.

    Args:
        input: [N, C, H, W] or [C, H, W], of dtype float32, float64, float16 or bfloat16 (others run
            in eager torch). The output has its layout, contiguous or channels_last.
        kernel_size: an int, or a pair for height and width, as are stride, padding and dilation.
        stride: `kernel_size` where it is None.
        padding: with -inf, at most half of `kernel_size`.
        dilation: the distance of the elements of a window.
        ceil_mode: whether windows that begin inside the input may reach beyond its padding.
        return_indices: also return the flat indices of the maxima: a pair (not in TorchScript).

    Raises:
        RuntimeError, TypeError: what torch raises for the same mistake.

    Example:
        >>> max_pool2d(torch.tensor([[[1.0, 3.0, 2.0, 0.0], [4.0, 2.0, 1.0, 5.0]]]), 2)
        tensor([[[4., 5.]]])
    """
    if _scripting():
        assert not return_indices, "TorchScript needs torch.nn.functional for the indices"
        return torch.max_pool2d(
            input, kernel_size, kernel_size if stride is None else stride, padding, dilation,
            ceil_mode,
        )  # fmt: skip
    if _has(input):
        return _handle(
            max_pool2d, (input,), input, kernel_size, stride, padding, dilation, ceil_mode,
            return_indices,
        )  # fmt: skip
    plain = return_indices is not False or _pair(dilation) != (1, 1) or not fits(input)
    window = None if plain else _window(input, kernel_size, stride, padding, ceil_mode)
    if window is None:
        return torch_functional.max_pool2d(  # type: ignore[call-overload]
            input, kernel_size, stride, padding, dilation, ceil_mode, return_indices
        )
    channels_last = suggests_channels_last(input)
    if needs_grad(input):
        return _apply(input, *window, ceil_mode, channels_last)
    return _maxima(input, *window, ceil_mode, channels_last)


# Below, Python takes longer than the passes over memory. Mean, product with the gate and backward,
# channels_last, one thread of an AMD EPYC with AVX2, 2026-11-29, float32 and bfloat16: 0.95 and
# 1.15x at 2^15 elements, 1.3 and 1.6x at 2^18, 1.4 and 2x at [16, 96, 64, 64]; contiguous 0.94 to
# 1.00x of torch's.
_LEAST = 1 << 17


class Mean(torch.autograd.Function):
    """Saves nothing. The gradient is a view of one number for each mean. Eager torch writes a
    tensor of the input's size, contiguous whatever the layout of the input is, so that the sum with
    the gradient of another reader (a squeeze-and-excitation gate) walks across memory."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, dims: tuple[int, ...], keepdim: bool, pools: bool
    ) -> Tensor:
        ctx.rest = (input.shape, dims, keepdim)
        if pools:
            return torch_functional.adaptive_avg_pool2d(input, 1)
        return torch.mean(input, dims, keepdim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shape, dims, keepdim = ctx.rest
        if not keepdim:
            for dim in sorted(dims):
                grad = grad.unsqueeze(dim)
        count = math.prod(shape[dim] for dim in dims)
        return (grad / count).expand(shape), None, None, None


_apply_mean = apply_of(Mean)


def is_one(output_size: Any) -> bool:
    """Whether an adaptive pooling has an output of 1 x 1."""
    return _pair(output_size) == (1, 1)


def _gains(input: Tensor) -> bool:
    """Whether a mean is worth a node of our own. The layout is the cheapest question."""
    if not (is_plain(input) and suggests_channels_last(input) and fits(input)):
        return False
    return needs_grad(input) and input.numel() >= _LEAST


def mean(
    input: Tensor,
    dim: BroadcastingList1[int],  # type: ignore[valid-type]
    keepdim: bool = False,
) -> Tensor:
    """:func:`torch.mean` over dimensions, bit for bit, forward and backward.

    Of a channels_last input of 2^17 elements or more the gradient is a view of one number for each
    mean, which whoever else reads the input adds to its own in one pass. Eager torch, which runs
    otherwise, writes a contiguous tensor of the input's size first.

    Args:
        input: of any shape and floating dtype.
        dim: a dimension, or several.
        keepdim: whether these dimensions stay, with size 1.

    Raises:
        IndexError, RuntimeError, TypeError: what torch raises for the same mistake.

    Example:
        >>> mean(torch.ones(2, 8, 7, 7), (2, 3)).shape
        torch.Size([2, 8])
    """
    if _scripting():
        return torch.mean(input, dim, keepdim)
    if _has(input):
        return _handle(mean, (input,), input, dim, keepdim)
    if isinstance(input, Tensor) and type(keepdim) is bool and _gains(input):
        places = _places(input.dim(), dim)
        if places:
            return _apply_mean(input, places, keepdim, False)
    return torch.mean(input, dim, keepdim)


def _places(count: int, dim: Any) -> tuple[int, ...]:
    """Dimensions from 0 on; none of anything that torch refuses, or takes for all of them."""
    dims = (dim,) if type(dim) is int else dim
    if type(dims) not in (tuple, list) or any(type(d) is not int for d in dims):
        return ()
    places = tuple(d % count for d in dims if -count <= d < count)
    return places if len(set(places)) == len(dims) else ()


def adaptive_avg_pool2d(input: Tensor, output_size: BroadcastingList2[int]) -> Tensor:
    """:func:`torch.nn.functional.adaptive_avg_pool2d`, bit for bit. With an output of 1 x 1
    it is a :func:`mean`.

    Args:
        input: [N, C, H, W] or [C, H, W].
        output_size: an int, or a pair for height and width, of which None is that of the input.

    Raises:
        RuntimeError, TypeError: what torch raises for the same mistake.

    Example:
        >>> adaptive_avg_pool2d(torch.ones(2, 8, 7, 7), 1).shape
        torch.Size([2, 8, 1, 1])
    """
    if _scripting():
        return torch_functional.adaptive_avg_pool2d(input, output_size)
    if _has(input):
        return _handle(adaptive_avg_pool2d, (input,), input, output_size)
    if is_one(output_size) and isinstance(input, Tensor) and input.dim() == 4 and _gains(input):
        return _apply_mean(input, (2, 3), True, True)
    return torch_functional.adaptive_avg_pool2d(input, output_size)
