"""Depthwise convolutions: the ops, autograd around them, and the public functions.

`channels_last` says how output and gradients lie in memory; inputs in the other layout are copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.nn import functional as torch_functional
from torch.overrides import has_torch_function as _has_any

from .. import _backends, _recompute
from .._calls import (
    apply_of,
    autocasts,
    convolutions_are_watched,
    fits,
    needs_grad,
    plain_backward,
    suggests_channels_last,
)
from .._graph.fx import handle as _handle
from .._torch_private import (
    BroadcastingList1,
    BroadcastingList2,
    BroadcastingList3,
    mkldnn_is_on,
    mkldnn_takes,
)
from ..reference import depthwise as reference
from ..reference.depthwise import new_tensor, out_sizes
from ._library import define, op

__all__ = ["depthwise_conv1d", "depthwise_conv2d", "depthwise_conv3d"]

_Numbers = tuple[int, ...]
_EVERYWHERE = False  # our kernels where torch's are faster, too: for tests and benchmarks


def _fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], padding_end: Sequence[int], dilation: Sequence[int],
    channels_last: bool,
) -> Tensor:  # fmt: skip
    sizes = [list(numbers) for numbers in (stride, padding, padding_end, dilation)]
    out = out_sizes(list(input.shape[2:]), list(weight.shape[2:]), *sizes)
    return new_tensor(input, [input.size(0), weight.size(0), *out], channels_last)


def _fake_backward(
    grad: Tensor, input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], channels_last: bool, input_asked: bool, weight_asked: bool,
    bias_asked: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        new_tensor(input, list(input.shape if input_asked else [0]), channels_last and input_asked),
        weight.new_empty(weight.shape if weight_asked else [0]),
        weight.new_empty(weight.shape[:1] if bias_asked else [0]),
    )


define("depthwise_conv", reference.depthwise_conv, _fake)
define("depthwise_conv_backward", reference.depthwise_conv_backward, _fake_backward)
_depthwise_conv = op("depthwise_conv")
_depthwise_conv_backward = op("depthwise_conv_backward")


class Faster(NamedTuple):
    """Where our kernel is faster than torch's: the forward and each gradient choose for themselves.

    The bias goes with the weight.
    """

    forward: bool
    grad_input: bool
    grad_weight: bool


_NONE, _ALL = Faster(False, False, False), Faster(True, True, True)
_WIDE = 9  # the widest windows for which oneDNN has fast loops everywhere
_REACH = 4096  # of a dilated kernel: borders as wide are laid out


def _torch_has_kernels(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes depthwise convolutions of this dtype on this CPU: others take 2 to
    100 times as long as ours."""
    if not mkldnn_is_on() or dtype is torch.float64:
        return False
    return dtype is torch.float32 or mkldnn_takes(dtype)


def faster(
    dtype: torch.dtype, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
    outputs: int, channels_last: bool,
) -> Faster:  # fmt: skip
    """The rule, for a CPU: `outputs` positions a channel.

    Of the processor time of torch's kernel and ours, one thread of an AMD EPYC with AVX-512, torch
    2.13 with AVX-512 and bounded to AVX2, memory of earlier tensors at hand as in a training loop,
    2026-11-27 (docs/depthwise.md): the side that wins in both. Small planes are torch's: its copy
    into blocks of channels has no border, and ours has one for each plane.
    """
    if not _torch_has_kernels(dtype) or math.prod(kernel) == 1:
        return _ALL
    row, volume = len(kernel) == 1, len(kernel) == 3
    windows = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    wide = max(windows) > _WIDE
    general = volume or max(dilation) > 1  # oneDNN's gradients have plain loops alone
    # Its gradient of weights has fast loops of kernels up to 3 wide.
    slow_weight = general or kernel[-1] > 3
    if dtype is not torch.float32:
        large = outputs >= 4000 and not (channels_last or row or volume)
        # Gradients of strided inputs take its plain loops 9 to 85 times as long.
        return Faster(large, general or max(stride) > 1 or large, slow_weight or large)
    if channels_last:
        return Faster(wide and max(kernel) < 16, general or max(kernel) > _WIDE, slow_weight)
    if row:
        return Faster(kernel[0] < 6 or wide, general or kernel[0] < 6, True)
    least = 8000 if volume else 700 if kernel[-1] > 3 and max(stride) == 1 else 1000
    large = outputs >= least
    grad_input = general or (large and max(kernel) < 16)
    return Faster(wide or large, grad_input, slow_weight or large)


_MEASURED: dict[str, Callable[..., Faster]] = {"cpu": faster}


def is_measured(device: str) -> bool:
    """Whether our kernels run on a type of device."""
    return device in _MEASURED


class DepthwiseConv(torch.autograd.Function):
    """Saves the input, for the gradient of the weight, and the weight, for that of the input.

    The node in C++, csrc/autograd/depthwise.h, does the same.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, stride: _Numbers,
        padding: _Numbers, padding_end: _Numbers, dilation: _Numbers, channels_last: bool,
        use: Faster,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(input, weight)
        ctx.rest = (stride, padding, dilation, channels_last)
        ctx.use = use
        rest = (stride, padding, padding_end, dilation, channels_last, use)
        output = _depthwise(input, weight, bias, *rest)
        scope = _recompute.scope()
        if scope is not None:
            scope.tag(output, _depthwise, (input, weight, bias), rest)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        asked = ctx.needs_input_grad[:3]
        rest = (None, None, None, None, None, None)
        # torch's own gradients can be differentiated as they are.
        if any(ctx.use) and plain_backward(grad):
            plain = reference.depthwise_conv_backward(grad, input, weight, *ctx.rest, *asked)
            return (*_known(plain, asked), *rest)
        of_weight = ctx.use.grad_weight
        ours = [asked[0] and ctx.use.grad_input, asked[1] and of_weight, asked[2] and of_weight]
        torchs = [wanted and not mine for wanted, mine in zip(asked, ours, strict=True)]
        gradients: tuple[Tensor | None, ...] = (None, None, None)
        if any(ours):
            made = _depthwise_conv_backward(grad, input, weight, *ctx.rest, *ours)
            gradients = _known(made, ours)
        if any(torchs):
            stride, padding, dilation, _ = ctx.rest
            other = torch.ops.aten.convolution_backward(
                grad, input, weight, [weight.size(0)], stride, padding, dilation, False,
                [0] * len(stride), input.size(1), torchs,
            )  # fmt: skip
            gradients = tuple(
                b if theirs else a for a, b, theirs in zip(gradients, other, torchs, strict=True)
            )
        return (*gradients, *rest)


def _known(gradients: Sequence[Tensor], asked: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(t if wanted else None for t, wanted in zip(gradients, asked, strict=True))


def _depthwise(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: _Numbers, padding: _Numbers,
    padding_end: _Numbers, dilation: _Numbers, channels_last: bool, use: Faster,
) -> Tensor:  # fmt: skip
    if use.forward:
        output: Tensor = _depthwise_conv(
            input, weight, bias, stride, padding, padding_end, dilation, channels_last
        )
        return output
    last: Any = (False, [0] * len(stride), input.size(1))
    return torch.convolution(input, weight, bias, stride, padding, dilation, *last)


def _depthwise_cast(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """The output that torch's function has of weight and bias that autocast casts."""
    return _depthwise(x, weight.type_as(x), None if bias is None else bias.type_as(x), *rest)


_recompute.OP_NAMES.update(dict.fromkeys((_depthwise, _depthwise_cast), "depthwise_conv"))
_apply = apply_of(DepthwiseConv)
_cpp = _backends.autograd()
if _cpp is not None:
    _cpp.prepare_depthwise(reference.depthwise_conv_backward)


def _numbers(value: Any, count: int) -> _Numbers | None:
    """So many integers, of one or as many; None of anything else, about which torch is asked."""
    if type(value) is int:
        return (value,) * count
    if type(value) not in (tuple, list) or len(value) not in (1, count):
        return None
    for number in value:  # `all` of a generator takes 0.3 us more
        if type(number) is not int:
            return None
    return tuple(value) if len(value) == count else tuple(value) * count


class _Plan(NamedTuple):
    """How the kernels run a call."""

    stride: _Numbers
    padding: _Numbers
    padding_end: _Numbers
    dilation: _Numbers
    channels_last: bool
    use: Faster


def _geometry(
    sizes: _Numbers, kernel: _Numbers, step: _Numbers, padding: _Numbers | str, spread: _Numbers
) -> tuple[_Numbers, _Numbers, _Numbers, _Numbers] | None:
    """Stride, padding at both ends and dilation, where the kernels take them."""
    count = len(kernel)
    if min(step) < 1 or min(spread) < 1 or min(kernel) < 1 or not all(sizes):
        return None
    if max(d * (k - 1) for d, k in zip(spread, kernel, strict=True)) > _REACH:
        return None
    if padding == "same" and max(step) == 1:
        total = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
        before: _Numbers = tuple(number // 2 for number in total)
        end: _Numbers = tuple(number - number // 2 for number in total)
    elif isinstance(padding, str):
        if padding != "valid":
            return None
        before = end = (0,) * count
    else:
        before = end = padding
    if min(before) < 0:
        return None
    room = out_sizes([*sizes], [*kernel], [*step], [*before], [*end], [*spread])
    return (step, before, end, spread) if min(room) >= 1 else None


_Rule = Callable[..., Faster] | None


@lru_cache(1024)
def _plan(
    shape: _Numbers, kernel_shape: _Numbers, bias_shape: _Numbers | None, stride: _Numbers,
    padding: _Numbers | str, dilation: _Numbers, dtype: torch.dtype, channels_last: bool,
    rule: _Rule, everywhere: bool, mkldnn: bool,
) -> _Plan | None:  # fmt: skip
    """None where these are not the shapes of a depthwise convolution that kernels take. `mkldnn` is
    an argument since `rule` asks for it."""
    channels, outputs = shape[1], kernel_shape[0]
    if not 0 < channels <= outputs or outputs % channels != 0 or kernel_shape[1] != 1:
        return None
    if bias_shape is not None and bias_shape != (outputs,):
        return None
    kernel = kernel_shape[2:]
    geometry = _geometry(shape[2:], kernel, stride, padding, dilation)
    if geometry is None:
        return None
    if everywhere:
        use = _ALL
    elif rule is None:  # nothing was measured on this device
        use = _NONE
    else:
        _, before, end, _ = geometry
        out = out_sizes([*shape[2:]], [*kernel], [*stride], [*before], [*end], [*dilation])
        use = rule(dtype, kernel, stride, dilation, math.prod(out), channels_last)
        use = use if before == end else _ALL  # torch pads unequal sides by a copy
    return _Plan(*geometry, channels_last, use)


def _plan_of(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> _Plan | None:
    """The plan of tensors of equally many dimensions; plans are cached by shapes."""
    count = weight.dim() - 2
    step, spread = _numbers(stride, count), _numbers(dilation, count)
    sides = padding if type(padding) is str else _numbers(padding, count)
    if step is None or spread is None or sides is None:
        return None
    last = count > 1 and (suggests_channels_last(input) or suggests_channels_last(weight))
    return _plan(
        input.shape, weight.shape, None if bias is None else bias.shape, step, sides, spread,
        input.dtype, last, _MEASURED.get(input.device.type), _EVERYWHERE, mkldnn_is_on(),
    )  # fmt: skip


def passes(input: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Faster:
    """The passes of a call of these tensors in which our kernels run."""
    plan = _plan_of(input, weight, None, stride, padding, dilation)
    return _NONE if plan is None else plan.use


def _convolve(
    plain: Callable[..., Tensor], count: int, input: Tensor, weight: Tensor, bias: Tensor | None,
    stride: Any, padding: Any, dilation: Any,
) -> Tensor:  # fmt: skip
    """`plain` is torch's function of so many dimensions, for calls that no kernel takes."""
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor)):
        return plain(input, weight, bias, stride, padding, dilation, 1)
    groups = input.size(-count - 1) if input.dim() > count else 1
    batch, kernels, biases = input, weight, bias
    if autocasts(input):
        dtype = torch.get_autocast_dtype(input.device.type)
        batch, kernels = input.to(dtype), weight.to(dtype) if autocasts(weight) else weight
        biases = bias.to(dtype) if bias is not None and autocasts(bias) else bias
    if input.dim() == count + 1:
        batch = batch.unsqueeze(0)
    plan = None
    same_dims = batch.dim() == weight.dim() == count + 2
    if same_dims and fits(batch, kernels, biases) and not convolutions_are_watched():
        plan = _plan_of(batch, kernels, biases, stride, padding, dilation)
    if plan is None:
        return plain(input, weight, bias, stride, padding, dilation, groups)
    trains = needs_grad(batch, kernels, biases)
    output: Any = NotImplemented
    if not (any(plan.use) if trains else plan.use.forward):
        scope = _recompute.scope() if trains and is_measured(input.device.type) else None
        if scope is None or scope.sees_torch:
            return plain(input, weight, bias, stride, padding, dilation, groups)
        # Weight and bias as they are: autocast casts them once for all calls.
        output = plain(batch, weight, bias, stride, padding, dilation, groups)
        scope.tag(output, _depthwise_cast, (batch, weight, bias), tuple(plan))
    elif _cpp is not None:
        output = _cpp.depthwise_conv(batch, kernels, biases, *plan[:5], *plan.use)
    if output is NotImplemented:
        output = (_apply if trains else _depthwise)(batch, kernels, biases, *plan)
    return output if input.dim() > count + 1 else output.squeeze(0)


def depthwise_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,  # noqa: UP045
    stride: BroadcastingList1[int] = 1,  # type: ignore[valid-type]
    padding: BroadcastingList1[int] = 0,  # type: ignore[valid-type]
    dilation: BroadcastingList1[int] = 1,  # type: ignore[valid-type]
) -> Tensor:
    """A depthwise convolution of [N, C, L]; see :func:`depthwise_conv2d`.

    Example:
        >>> depthwise_conv1d(torch.tensor([[[1.0, 2.0, 4.0]]]), torch.tensor([[[-1.0, 1.0]]]))
        tensor([[[1., 2.]]])
    """
    if _scripting():
        return torch.conv1d(input, weight, bias, stride, padding, dilation, input.size(-2))
    if _has_any((input, weight, bias)):
        return _handle(
            depthwise_conv1d, (input, weight, bias), input, weight, bias, stride, padding, dilation
        )
    return _convolve(torch_functional.conv1d, 1, input, weight, bias, stride, padding, dilation)


def depthwise_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,  # noqa: UP045
    stride: BroadcastingList2[int] = 1,
    padding: BroadcastingList2[int] = 0,
    dilation: BroadcastingList2[int] = 1,
) -> Tensor:
    """``torch.nn.functional.conv2d(input, weight, ..., groups=C)``: each of the C channels is
    convolved with kernels of its own (Chollet, arXiv:1610.02357).

    Contiguous and channels_last inputs are read where they are. Products are added up in float32
    (float64 for float64) and rounded once. Under autocast all arguments are cast, as for torch's
    convolutions. Eager torch runs under torch.compile and functorch, and for arguments that torch
    refuses, with torch's messages.

    Args:
        input: [N, C, H, W] or [C, H, W], of dtype float32, float64, float16 or bfloat16.
        weight: [C m, 1, kernel height, kernel width]; output channel c is of input channel
            ``c // m``.
        bias: [C m], or None.
        stride: an int, or a pair for height and width, as are padding and dilation.
        padding: zeros at each side, or "same" (a stride of 1), or "valid"; strings not in
            TorchScript.
        dilation: the distance of the elements of a kernel.

    Returns:
        [N, C m, H', W'], channels_last where input or weight is.

    Raises:
        RuntimeError, TypeError, ValueError: what torch raises for the same mistake.

    Example:
        >>> image = torch.ones(1, 2, 3, 3)
        >>> depthwise_conv2d(image, torch.ones(2, 1, 3, 3), padding=1)[0, 0]
        tensor([[4., 6., 4.],
                [6., 9., 6.],
                [4., 6., 4.]])
    """
    if _scripting():
        return torch.conv2d(input, weight, bias, stride, padding, dilation, input.size(-3))
    if _has_any((input, weight, bias)):
        return _handle(
            depthwise_conv2d, (input, weight, bias), input, weight, bias, stride, padding, dilation
        )
    return _convolve(torch_functional.conv2d, 2, input, weight, bias, stride, padding, dilation)


def depthwise_conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,  # noqa: UP045
    stride: BroadcastingList3[int] = 1,
    padding: BroadcastingList3[int] = 0,
    dilation: BroadcastingList3[int] = 1,
) -> Tensor:
    """A depthwise convolution of [N, C, D, H, W]; see :func:`depthwise_conv2d`.

    Example:
        >>> depthwise_conv3d(torch.ones(1, 1, 2, 2, 2), torch.ones(1, 1, 2, 2, 2))
        tensor([[[[[8.]]]]])
    """
    if _scripting():
        return torch.conv3d(input, weight, bias, stride, padding, dilation, input.size(-4))
    if _has_any((input, weight, bias)):
        return _handle(
            depthwise_conv3d, (input, weight, bias), input, weight, bias, stride, padding, dilation
        )
    return _convolve(torch_functional.conv3d, 3, input, weight, bias, stride, padding, dilation)
