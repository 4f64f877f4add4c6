"""Depthwise convolutions as modules."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]
from torch.nn import functional as torch_functional

from .. import functional as F


def _as_many(groups: int | None, in_channels: int) -> int:
    if groups is None or groups == in_channels:
        return in_channels
    raise ValueError(
        f"groups: a depthwise convolution has as many as in_channels, {in_channels}, not {groups}"
    )


class DepthwiseConv1d(nn.Conv1d):
    """:class:`torch.nn.Conv1d` with ``groups=in_channels``; see :class:`DepthwiseConv2d`.

    Example:
        >>> DepthwiseConv1d(8, 16, 31, padding="same")(torch.ones(2, 8, 100)).shape
        torch.Size([2, 16, 100])
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int | None = None, bias: bool = True,
        padding_mode: Any = "zeros", device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation,
            _as_many(groups, in_channels), bias, padding_mode, device, dtype,
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.padding_mode != "zeros":
            sides = self._reversed_padding_repeated_twice
            padded = torch_functional.pad(input, sides, mode=self.padding_mode)
            return F.depthwise_conv1d(padded, weight, bias, self.stride, 0, self.dilation)
        if is_scripting():  # where padding may be a string
            return torch_functional.conv1d(
                input, weight, bias, self.stride, self.padding, self.dilation, self.groups
            )
        return F.depthwise_conv1d(input, weight, bias, self.stride, self.padding, self.dilation)


class DepthwiseConv2d(nn.Conv2d):
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

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int | None = None, bias: bool = True,
        padding_mode: Any = "zeros", device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation,
            _as_many(groups, in_channels), bias, padding_mode, device, dtype,
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.padding_mode != "zeros":
            sides = self._reversed_padding_repeated_twice
            padded = torch_functional.pad(input, sides, mode=self.padding_mode)
            return F.depthwise_conv2d(padded, weight, bias, self.stride, 0, self.dilation)
        if is_scripting():  # where padding may be a string
            return torch_functional.conv2d(
                input, weight, bias, self.stride, self.padding, self.dilation, self.groups
            )
        return F.depthwise_conv2d(input, weight, bias, self.stride, self.padding, self.dilation)


class DepthwiseConv3d(nn.Conv3d):
    """:class:`torch.nn.Conv3d` with ``groups=in_channels``; see :class:`DepthwiseConv2d`.

    Example:
        >>> DepthwiseConv3d(8, 8, (3, 3, 3), padding=1)(torch.ones(1, 8, 4, 7, 7)).shape
        torch.Size([1, 8, 4, 7, 7])
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int | None = None, bias: bool = True,
        padding_mode: Any = "zeros", device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation,
            _as_many(groups, in_channels), bias, padding_mode, device, dtype,
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.padding_mode != "zeros":
            sides = self._reversed_padding_repeated_twice
            padded = torch_functional.pad(input, sides, mode=self.padding_mode)
            return F.depthwise_conv3d(padded, weight, bias, self.stride, 0, self.dilation)
        if is_scripting():  # where padding may be a string
            return torch_functional.conv3d(
                input, weight, bias, self.stride, self.padding, self.dilation, self.groups
            )
        return F.depthwise_conv3d(input, weight, bias, self.stride, self.padding, self.dilation)
