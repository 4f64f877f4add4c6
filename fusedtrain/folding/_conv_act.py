"""Convolutions with the activation, and a residual addition before it, inside: for inference.

The ops that do so are private ones of torch and take no part in autograd. Where they are missing or
refuse a call, or something asks for gradients, traces, counts operators or has replaced the
functions of torch.nn.functional (FlopCounterMode, DeepSpeed's profiler), the same is computed in
plain torch.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._calls import autocasts, convolutions_are_watched, traced

_PACKS = 2  # packed weights kept, by size of the input
_REFUSALS = 64  # refused calls that a convolution remembers


class Act(NamedTuple):
    """An activation in mkldnn's words."""

    name: str
    numbers: tuple[float, ...] = ()
    algorithm: str = ""


Act.__module__ = "fusedtrain.folding"  # the name in pickles


NO_ACT = Act("none")


def plain(act: Act, x: Tensor) -> Tensor:
    if act.name == "none":
        return x
    if act.name == "gelu":
        return F.gelu(x, approximate=act.algorithm)
    name = "silu" if act.name == "swish" else act.name
    output: Tensor = getattr(torch if name in ("sigmoid", "tanh") else F, name)(x, *act.numbers)
    return output


class _Mkldnn:
    """The CPU: any activation of the table, or an addition with or without relu."""

    def __init__(self) -> None:
        ops = torch.ops.mkldnn
        pointwise = getattr(ops, "_convolution_pointwise", None)
        self.available = hasattr(pointwise, "binary") and torch.backends.mkldnn.is_available()
        if self.available:
            assert pointwise is not None
            self._unary, self._binary = pointwise.default, pointwise.binary
        self._reorder = getattr(ops, "_reorder_convolution_weight", None)

    def has(self, act: Act, residual: bool, dtype: torch.dtype) -> bool:
        if not self.available or (residual and act.name not in ("none", "relu")):
            return False
        if dtype is torch.bfloat16:
            asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
            return asked is not None and bool(asked())
        return dtype is torch.float32

    def ready(self) -> bool:
        return bool(torch.backends.mkldnn.enabled)

    def run(self, conv: Any, input: Tensor, other: Tensor | None) -> Tensor:
        padding, stride, dilation = list(conv.padding), list(conv.stride), list(conv.dilation)
        weight = self._packed(conv, input, padding, stride, dilation)
        sizes = (padding, stride, dilation, conv.groups)
        act = conv._act
        if other is None:
            return self._unary(
                input, weight, conv.bias, *sizes, act.name, list(act.numbers), act.algorithm
            )
        unary = None if act.name == "none" else act.name
        return self._binary(input, other, weight, conv.bias, *sizes, "add", 1.0, unary, [], "")

    def _packed(
        self, conv: Any, input: Tensor, padding: list[int], stride: list[int], dilation: list[int]
    ) -> Tensor:
        """The weight in mkldnn's own layout, made again where it or the input's size changed.

        Only for channels_last inputs: with a packed weight the op gives channels_last outputs,
        which after a contiguous input nobody expects.
        """
        weight: Tensor = conv.weight
        last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
        if (
            self._reorder is None
            or weight.is_inference()
            or input.is_contiguous()
            or not input.is_contiguous(memory_format=last)
        ):
            return weight
        state = (weight._version, weight.data_ptr(), weight.dtype)
        if conv._packs is None or conv._packs[0] != state:
            conv._packs = (state, {})
        packs: dict[torch.Size, Tensor] = conv._packs[1]
        packed = packs.get(input.shape)
        if packed is None:
            while len(packs) >= _PACKS:
                packs.pop(next(iter(packs)), None)
            packed = self._reorder(
                weight.detach(), padding, stride, dilation, conv.groups, list(input.shape)
            )
            packs[input.shape] = packed
        return packed


class _Cudnn:
    """NVIDIA GPUs: relu, with or without an addition. Not yet run on one."""

    def has(self, act: Act, residual: bool, dtype: torch.dtype) -> bool:
        available = hasattr(torch, "cudnn_convolution_relu") and torch.backends.cudnn.is_available()
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
        return available and act.name == "relu" and dtype in dtypes

    def ready(self) -> bool:
        return bool(torch.backends.cudnn.enabled)

    def run(self, conv: Any, input: Tensor, other: Tensor | None) -> Tensor:
        sizes = (conv.stride, conv.padding, conv.dilation, conv.groups)
        if other is None:
            return torch.cudnn_convolution_relu(input, conv.weight, conv.bias, *sizes)
        return torch.cudnn_convolution_add_relu(input, conv.weight, other, 1.0, conv.bias, *sizes)


PLATFORMS: dict[str, _Mkldnn | _Cudnn] = {"cpu": _Mkldnn(), "cuda": _Cudnn()}
_warned: set[str] = set()


def _kind_of(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Key by which a library chooses its algorithm; calls of one kind are refused alike."""
    return tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)


def _warn_once(device_type: str, error: RuntimeError) -> None:
    if device_type not in _warned:
        _warned.add(device_type)
        warnings.warn(
            f"fusedtrain: torch refuses a convolution with its activation on {device_type}, which "
            f"runs without the fusion from now on ({error})",
            stacklevel=2,
        )


class _ConvAct:
    """``act(conv(input) + other)``; the attributes are those of the convolution, and `_act`."""

    _act: Act = NO_ACT
    _packs: tuple[Any, dict[torch.Size, Tensor]] | None = None
    _refused: dict[tuple[Any, ...], None] | None = None

    def forward(self: Any, input: Tensor, other: Tensor | None = None) -> Tensor:
        if traced() or convolutions_are_watched() or not self._takes(input, other):
            return self._plain(input, other)
        kind = _kind_of(input, self.weight, other)
        if self._refused is not None and kind in self._refused:
            return self._plain(input, other)
        try:
            return PLATFORMS[input.device.type].run(self, input, other)
        except RuntimeError as error:
            output = self._plain(input, other)  # may raise itself: then the call is a mistake
            if not isinstance(error, torch.OutOfMemoryError):  # of now, not of this kind of call
                self._remember(kind)
                _warn_once(input.device.type, error)
            return output

    def _plain(self: Any, input: Tensor, other: Tensor | None) -> Tensor:
        output: Tensor = self._conv_forward(input, self.weight, self.bias)
        return plain(self._act, output if other is None else output + other)

    def _remember(self: Any, kind: tuple[Any, ...]) -> None:
        if self._refused is None:
            self._refused = {}
        while len(self._refused) >= _REFUSALS:
            self._refused.pop(next(iter(self._refused)), None)
        self._refused[kind] = None

    def _takes(self: Any, input: Tensor, other: Tensor | None) -> bool:
        weight = self.weight
        platform = PLATFORMS.get(input.device.type)
        tensors = [t for t in (input, weight, self.bias, other) if t is not None]
        return (
            platform is not None
            and platform.ready()
            and platform.has(self._act, other is not None, weight.dtype)
            and input.dim() == weight.dim()
            and input.numel() > 0
            and all(
                t.dtype == weight.dtype and t.device == input.device and t.layout is torch.strided
                for t in tensors
            )
            and not autocasts(input)
            and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
            and (other is None or list(other.shape) == self._output_shape(input))
        )

    def _output_shape(self: Any, input: Tensor) -> list[int]:
        spans = zip(
            input.shape[2:], self.padding, self.dilation, self.kernel_size, self.stride, strict=True
        )
        return [input.size(0), self.out_channels] + [
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, padding, dilation, kernel, stride in spans
        ]

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        state.pop("_packs", None)
        state.pop("_refused", None)
        return state

    def extra_repr(self: Any) -> str:
        return f"{super().extra_repr()}, act={self._act.name}"  # type: ignore[misc]


class ConvAct2d(_ConvAct, nn.Conv2d):
    """A Conv2d that gives its output to an activation."""

    __module__ = "fusedtrain.folding"  # the name in pickles


class ConvAct3d(_ConvAct, nn.Conv3d):
    """A Conv3d that gives its output to an activation."""

    __module__ = "fusedtrain.folding"  # the name in pickles


KINDS: dict[type, type] = {nn.Conv2d: ConvAct2d, nn.Conv3d: ConvAct3d}


def assign(conv: nn.Module, act: Act) -> None:
    """Makes a convolution apply an activation; it stays the same object."""
    conv.__class__ = KINDS[type(conv)]
    vars(conv)["_act"] = act
