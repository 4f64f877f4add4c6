"""Depthwise convolutions as modules."""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]
from torch.nn import functional as torch_functional

from .. import functional as F
from .._calls import autocasts, is_plain
from .._graph.fx import module_call
from .._torch_private import CONV_FORWARDS
from ..ops.depthwise import passes
from ..ops.depthwise_autograd import Faster


def _padded(layer: Any, input: Tensor) -> tuple[Tensor, Any]:
    """The input and padding of the convolution. Padding other than zeros is a copy before it."""
    if layer.padding_mode == "zeros":
        return input, layer.padding
    sides = layer._reversed_padding_repeated_twice
    return torch_functional.pad(input, sides, mode=layer.padding_mode), 0


def convolve(layer: Any, input: Tensor) -> Tensor:
    """The forward of a depthwise convolution of torch's class or of ours."""
    function, stock = _FUNCTIONS[len(layer.kernel_size)]
    patched = "_conv_forward" in layer.__dict__ or type(layer)._conv_forward is not stock
    if patched or layer.groups != layer.in_channels:  # edited since
        return layer._conv_forward(input, layer.weight, layer.bias)
    input, padding = _padded(layer, input)
    return function(input, layer.weight, layer.bias, layer.stride, padding, layer.dilation)


convolve.is_traced = True  # type: ignore[attr-defined]  # torch.compile sees it as the forward
_FUNCTIONS: dict[int, tuple[Any, Any]] = {
    1: (F.depthwise_conv1d, CONV_FORWARDS[nn.Conv1d]),
    2: (F.depthwise_conv2d, CONV_FORWARDS[nn.Conv2d]),
    3: (F.depthwise_conv3d, CONV_FORWARDS[nn.Conv3d]),
}


class _Depthwise:
    """Constructor and forward of the three."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int | None = None, bias: bool = True,
        padding_mode: Any = "zeros", device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if groups is not None and groups != in_channels:
            raise ValueError(
                f"groups: a depthwise convolution has as many as in_channels, {in_channels}, not "
                f"{groups}"
            )
        super().__init__(  # type: ignore[call-arg]  # of torch's class
            in_channels, out_channels, kernel_size, stride, padding, dilation, in_channels, bias,
            padding_mode, device, dtype,
        )  # fmt: skip

    def forward(self: Any, input: Tensor) -> Tensor:
        if is_scripting():
            return self._conv_forward(input, self.weight, self.bias)
        call = module_call(input) if isinstance(input, fx.Proxy) else None
        if call is not None:
            return call
        return convolve(self, input)


class DepthwiseConv1d(_Depthwise, nn.Conv1d):
    """:class:`torch.nn.Conv1d` with ``groups=in_channels``; see :class:`DepthwiseConv2d`.

    Example:
        >>> DepthwiseConv1d(8, 16, 31, padding="same")(torch.ones(2, 8, 100)).shape
        torch.Size([2, 16, 100])
    """


class DepthwiseConv2d(_Depthwise, nn.Conv2d):
    """:class:`torch.nn.Conv2d` with ``groups=in_channels``, in fused kernels of both layouts; see
    :func:`fusedtrain.functional.depthwise_conv2d`.

    Arguments, parameters, their initial values and the keys of the state dict are those of
    torch.nn.Conv2d; `groups` may be left out.

    Raises:
        ValueError: other `groups`, and what torch.nn.Conv2d raises.

    Shape: (N, C, H, W) or (C, H, W) to (N, C m, H', W') or (C m, H', W').

    Example:
        >>> layer = DepthwiseConv2d(8, 8, 3, stride=2, padding=1, bias=False)
        >>> layer(torch.ones(1, 8, 14, 14)).shape, list(layer.state_dict())
        (torch.Size([1, 8, 7, 7]), ['weight'])
    """


class DepthwiseConv3d(_Depthwise, nn.Conv3d):
    """:class:`torch.nn.Conv3d` with ``groups=in_channels``; see :class:`DepthwiseConv2d`.

    Example:
        >>> DepthwiseConv3d(8, 8, (3, 3, 3), padding=1)(torch.ones(1, 8, 4, 7, 7)).shape
        torch.Size([1, 8, 4, 7, 7])
    """


# torch's class -> ours
DEPTHWISE: dict[type, type] = {
    nn.Conv1d: DepthwiseConv1d,
    nn.Conv2d: DepthwiseConv2d,
    nn.Conv3d: DepthwiseConv3d,
}


def passes_of(layer: Any, input: Any) -> Faster:
    """The passes in which our kernels run if a layer of torch's class or of ours is called, whoever
    asks for gradients."""
    if not (isinstance(input, Tensor) and is_plain(input)):
        return Faster(False, False, False)
    batch = input.detach()
    if autocasts(batch):
        batch = batch.to(torch.get_autocast_dtype(batch.device.type))
    batch, padding = _padded(layer, batch)
    if batch.dim() < layer.weight.dim():
        batch = batch.unsqueeze(0)
    return passes(batch, layer.weight, layer.stride, padding, layer.dilation)
