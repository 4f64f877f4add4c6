"""Depthwise convolutions: which kernels run, the op for torch.compile, the public functions."""

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
    autocasts,
    convolutions_are_watched,
    fits,
    is_plain,
    needs_grad,
    suggests_channels_last,
    transformed,
)
from .._graph.fx import handle as _handle
from .._torch_private import (
    BroadcastingList1,
    BroadcastingList2,
    BroadcastingList3,
    is_exporting,
    mkldnn_is_on,
    mkldnn_takes,
)
from ..reference.depthwise import out_sizes
from ._library import define, library
from .depthwise_autograd import (
    Faster,
    Numbers,
    apply,
    convolve,
    convolve_cast,
    cpp as _cpp,
    fake,
    fake_backward,
    gradients_of,
    known,
)
from .depthwise_gpus import rule_of

__all__ = ["depthwise_conv1d", "depthwise_conv2d", "depthwise_conv3d"]

_EVERYWHERE = False  # our kernels where torch's are faster, too: for tests and benchmarks


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
    """Whether our kernels run on a device, such as "cpu"."""
    return device in _MEASURED or rule_of(torch.device(device)) is not None


def _numbers(value: Any, count: int) -> Numbers | None:
    """So many integers, of one or as many; None of anything else, about which torch is asked."""
    if type(value) is int:
        return (value,) * count
    if type(value) not in (tuple, list) or len(value) not in (1, count):
        return None
    for number in value:  # `all` of a generator takes 0.3 us more
        if type(number) is not int:
            return None
    return tuple(value) if len(value) == count else tuple(value) * count


class _ConvGeometry(NamedTuple):
    """Geometry of a call as the kernels take it, and the passes that ours run."""

    stride: Numbers
    padding: Numbers
    padding_end: Numbers
    dilation: Numbers
    channels_last: bool
    use: Faster


def _geometry(
    sizes: Numbers, kernel: Numbers, step: Numbers, padding: Numbers | str, spread: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers] | None:
    """Stride, padding at both ends and dilation, where the kernels take them."""
    count = len(kernel)
    if min(step) < 1 or min(spread) < 1 or min(kernel) < 1 or not all(sizes):
        return None
    if max(d * (k - 1) for d, k in zip(spread, kernel, strict=True)) > _REACH:
        return None
    if padding == "same" and max(step) == 1:
        total = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
        before: Numbers = tuple(number // 2 for number in total)
        end: Numbers = tuple(number - number // 2 for number in total)
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


def _is_depthwise(shape: Numbers, kernel_shape: Numbers, bias_shape: Numbers | None) -> bool:
    channels, outputs = shape[1], kernel_shape[0]
    if not 0 < channels <= outputs or outputs % channels != 0 or kernel_shape[1] != 1:
        return False
    return bias_shape is None or bias_shape == (outputs,)


_Rule = Callable[..., Faster] | None


@lru_cache(1024)
def _plan(
    shape: Numbers, kernel_shape: Numbers, bias_shape: Numbers | None, stride: Numbers,
    padding: Numbers | str, dilation: Numbers, dtype: torch.dtype, channels_last: bool,
    rule: _Rule, everywhere: bool, mkldnn: bool,
) -> _ConvGeometry | None:  # fmt: skip
    """None where these are not the shapes of a depthwise convolution that kernels take. `mkldnn` is
    an argument since `rule` asks for it."""
    if not _is_depthwise(shape, kernel_shape, bias_shape):
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
    return _ConvGeometry(*geometry, channels_last, use)


def _is_last(input: Tensor, weight: Tensor) -> bool:
    return weight.dim() > 3 and (suggests_channels_last(input) or suggests_channels_last(weight))


def _plan_of(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> _ConvGeometry | None:
    """The plan of tensors of equally many dimensions; plans are cached by shapes."""
    count = weight.dim() - 2
    step, spread = _numbers(stride, count), _numbers(dilation, count)
    sides = padding if type(padding) is str else _numbers(padding, count)
    if step is None or spread is None or sides is None:
        return None
    return _plan(
        input.shape, weight.shape, None if bias is None else bias.shape, step, sides, spread,
        input.dtype, _is_last(input, weight),
        _MEASURED.get(input.device.type) or rule_of(input.device), _EVERYWHERE, mkldnn_is_on(),
    )  # fmt: skip


def passes(input: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Faster:
    """The passes of a call of these tensors in which our kernels run."""
    plan = _plan_of(input, weight, None, stride, padding, dilation)
    return _NONE if plan is None else plan.use


# --- torch.compile: one op, which chooses kernels when it runs ---


def _chosen(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int],
) -> Tensor:  # fmt: skip
    plan = _plan_of(input, weight, bias, stride, padding, dilation)
    assert plan is not None  # `_whole` has asked
    return convolve(input, weight, bias, *plan)


def _chosen_backward(
    grad: Tensor, input: Tensor, weight: Tensor, stride: list[int], padding: list[int],
    dilation: list[int], input_asked: bool, weight_asked: bool, bias_asked: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    plan = _plan_of(input, weight, None, stride, padding, dilation)
    assert plan is not None
    rest = (plan.stride, plan.padding, plan.dilation, plan.channels_last)
    asked = (input_asked, weight_asked, bias_asked)
    made = gradients_of(grad, input, weight, plan.use, asked, *rest)
    of_input, of_weight, of_bias = (weight.new_empty(0) if t is None else t for t in made)
    return of_input, of_weight, of_bias


def _fake_chosen(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int],
) -> Tensor:  # fmt: skip
    return fake(input, weight, bias, stride, padding, padding, dilation, _is_last(input, weight))


def _fake_chosen_backward(
    grad: Tensor, input: Tensor, weight: Tensor, stride: list[int], padding: list[int],
    dilation: list[int], *asked: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    last = _is_last(input, weight)
    return fake_backward(grad, input, weight, stride, padding, dilation, last, *asked)


define("depthwise_conv_chosen", _chosen, _fake_chosen)
define("depthwise_conv_chosen_backward", _chosen_backward, _fake_chosen_backward)


def _setup_chosen(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _, *ctx.rest = inputs
    ctx.save_for_backward(input, weight)


def _backward_of_chosen(ctx: Any, grad: Tensor) -> Any:
    asked = ctx.needs_input_grad[:3]
    made = torch.ops.fusedtrain.depthwise_conv_chosen_backward(
        grad, *ctx.saved_tensors, *ctx.rest, *asked
    )
    return (*known(made, asked), *(None,) * 3)


torch.library.register_autograd(
    "fusedtrain::depthwise_conv_chosen",
    _backward_of_chosen,
    setup_context=_setup_chosen,
    lib=library,
)


def _whole(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> Tensor | None:
    """The op as torch.compile is to see it; None for calls that stay torch's: Inductor calls
    torch's kernels, which take up to 100 times as long as ours (docs/depthwise.md)."""
    tensors = [input, weight] if bias is None else [input, weight, bias]
    if is_exporting() or transformed() or not _backends.is_opaque_to_compile(input.device):
        return None
    if not all(is_plain(t) and t.dtype is input.dtype for t in tensors):
        return None
    count = weight.dim() - 2
    step, sides, spread = (_numbers(value, count) for value in (stride, padding, dilation))
    if step is None or sides is None or spread is None:
        return None
    if not _is_depthwise(input.shape, weight.shape, None if bias is None else bias.shape):
        return None
    if _geometry(input.shape[2:], weight.shape[2:], step, sides, spread) is None:
        return None
    return torch.ops.fusedtrain.depthwise_conv_chosen(input, weight, bias, step, sides, spread)


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
    if torch.compiler.is_compiling():
        whole = _whole(batch, kernels, biases, stride, padding, dilation) if same_dims else None
        if whole is not None:
            return whole if input.dim() > count + 1 else whole.squeeze(0)
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
        scope.tag(output, convolve_cast, (batch, weight, bias), tuple(plan))
    elif _cpp is not None:
        output = _cpp.depthwise_conv(batch, kernels, biases, *plan[:5], *plan.use)
    if output is NotImplemented:
        output = (apply if trains else convolve)(batch, kernels, biases, *plan)
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
    convolutions. torch.compile sees one op on a CPU; torch.export, functorch and arguments that
    torch refuses meet torch's convolution.

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
