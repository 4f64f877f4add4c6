"""A convolution, a batch norm and an activation, as a building block for new models."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn


def _pair(value: Any) -> Any:
    return value if isinstance(value, (tuple, list)) else (value, value)


def _padding_of(padding: Any, kernel_size: Any, stride: Any, dilation: Any) -> Any:
    """timm's default '': symmetric, so that a stride of 1 keeps the size (odd kernels)."""
    if padding != "":
        return padding
    sides = zip(_pair(kernel_size), _pair(stride), _pair(dilation), strict=True)
    return tuple((s - 1 + d * (k - 1)) // 2 for k, s, d in sides)


class ConvBnAct(nn.Module):
    """``act(bn(conv(input)))``, with the names and arguments of timm's ConvNormAct.

    The children are `conv`, an nn.Conv2d, and `bn`, a :class:`fusedtrain.nn.BatchNormAct2d`, which
    normalises and activates in one kernel. :func:`fusedtrain.fold_conv_bn`,
    :func:`fusedtrain.fold_frozen_norms` and :func:`fusedtrain.drop_redundant_bias` recognise the
    pair.

    Args:
        in_channels, out_channels, kernel_size, stride, dilation, groups, bias: of the convolution.
        padding: of the convolution. '' pads by ``(stride - 1 + dilation (kernel_size - 1)) // 2``.
        apply_norm: False: no norm and no activation.
        apply_act: False: no activation.
        norm_layer: replaces BatchNormAct2d; takes (channels, apply_act, act_layer, ...).
        act_layer: a class or timm's name of an activation.
        aa_layer: not supported; keeps the order of timm's arguments.
        drop_layer: a class, between norm and activation.
        conv_kwargs, norm_kwargs, act_kwargs: further arguments.
        device, dtype: of the parameters.

    Shape: (N, in_channels, H, W) to (N, out_channels, H', W'), as of nn.Conv2d.

    Raises:
        NotImplementedError: `aa_layer` is given.
        The errors of nn.Conv2d.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        padding: Any = "",
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
        apply_norm: bool = True,
        apply_act: bool = True,
        norm_layer: Any = None,
        act_layer: Any = nn.ReLU,
        aa_layer: Any = None,
        drop_layer: Any = None,
        conv_kwargs: dict[str, Any] | None = None,
        norm_kwargs: dict[str, Any] | None = None,
        act_kwargs: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if aa_layer is not None:
            raise NotImplementedError("ConvBnAct: aa_layer is not supported")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            _padding_of(padding, kernel_size, stride, dilation),
            dilation,
            groups,
            bias,
            **place,
            **(conv_kwargs or {}),
        )
        if not apply_norm:
            self.bn: nn.Module = nn.Identity()
            return
        if norm_layer is None:
            # A late import: a convolution without a norm does not need this module.
            norm_layer = importlib.import_module(".norm", __package__).BatchNormAct2d
        options = dict(norm_kwargs or {})
        if act_kwargs:
            options["act_kwargs"] = act_kwargs
        if drop_layer is not None:
            options["drop_layer"] = drop_layer
        options |= {key: value for key, value in place.items() if value is not None}
        self.bn = norm_layer(out_channels, apply_act=apply_act, act_layer=act_layer, **options)

    @property
    def in_channels(self) -> int:
        return self.conv.in_channels

    @property
    def out_channels(self) -> int:
        return self.conv.out_channels

    def forward(self, input: Tensor) -> Tensor:
        return self.bn(self.conv(input))
