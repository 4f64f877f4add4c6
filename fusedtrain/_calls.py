"""Tests for calls that a kernel takes; others go to plain torch. Imports only torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from ._torch_private import autocast_is_available, dispatch_modes, transformed as transformed

KERNEL_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


def traced() -> bool:
    """Whether a tracer or transform must see plain torch operators in this call.

    These are torch.compile and torch.export (so that Inductor may fuse), torch.jit.trace, functorch
    transforms and forward-mode AD.
    """
    return torch.compiler.is_compiling() or transformed()


_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)


def convolutions_are_watched() -> bool:
    """Whether somebody counts operators (FlopCounterMode) or, by patches, torch's functions."""
    now = (functional.conv1d, functional.conv2d, functional.conv3d)
    return dispatch_modes() > 0 or now != _CONVOLUTIONS


def is_plain(tensor: Tensor) -> bool:
    """Whether this is a plain strided tensor of a floating dtype."""
    kind = type(tensor)
    return (
        (kind is Tensor or kind is Parameter)
        and tensor.dtype in KERNEL_DTYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def in_torch_layout(input: Tensor) -> Tensor:
    """The input if it is contiguous or channels_last, else a copy that is: the layouts in which
    torch's batch norms (those of the CPU and cuDNN's) return their output."""
    if has_torch_layout(input):
        return input
    last = suggests_channels_last(input)
    return input.contiguous(
        memory_format=_CHANNELS_LAST[input.dim()] if last else torch.contiguous_format
    )


# Types of device on which torch's logsigmoid returns a contiguous output.
_LOGSIGMOID_IN_ORDER = frozenset({"cpu"})


def for_logsigmoid(input: Tensor) -> Tensor:
    """The input in the layout of torch's output of logsigmoid."""
    in_order = is_plain(input) and input.device.type in _LOGSIGMOID_IN_ORDER
    return input.contiguous() if in_order else input


def has_torch_layout(t: Tensor) -> bool:
    if t.is_contiguous():
        return True
    last = _CHANNELS_LAST.get(t.dim())
    return last is not None and t.is_contiguous(memory_format=last)


def suggests_channels_last(t: Tensor) -> bool:
    """Whether torch's convolutions and poolings return channels_last for this input, dense or not:
    c10's suggest_memory_format."""
    dims = t.dim()
    if dims not in _CHANNELS_LAST or t.is_contiguous():
        return False
    sizes, strides, least = t.shape, t.stride(), 0
    for d in (1, 3, 2, 0) if dims == 4 else (1, 4, 3, 2, 0):
        if strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * sizes[d]
    return strides[1] > 0


def takes(tensor: Tensor) -> bool:
    """Whether a kernel can take the tensor now."""
    return is_plain(tensor) and not traced()


def autocast_is_on(device_type: str) -> bool:
    return autocast_is_available(device_type) and torch.is_autocast_enabled(device_type)


def autocasts(input: Tensor, device_type: str = "") -> bool:
    """Whether autocast casts this input: a floating tensor (on `device_type`), but not float64."""
    return (
        isinstance(input, Tensor)
        and device_type in ("", input.device.type)
        and autocast_is_on(input.device.type)
        and input.is_floating_point()
        and input.dtype is not torch.float64
    )


def needs_grad(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:  # `any` of a generator takes 0.5 us more
            if t is not None and t.requires_grad:
                return True
    return False


def fits(model: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels can take all tensors together now: plain ones of one dtype and device."""
    if not takes(model):
        return False
    dtype, device = model.dtype, model.device
    for t in others:
        if t is not None and not (is_plain(t) and t.dtype is dtype and t.device == device):
            return False
    if not needs_grad(model, *others):
        return True
    # Inference tensors cannot be saved for backward.
    if torch.is_inference_mode_enabled() or model.is_inference():
        return False
    return not any(t is not None and t.is_inference() for t in others)


def plain_backward(grad: Tensor) -> bool:
    """Whether backward must be plain torch: it is differentiated, or no kernel takes `grad`."""
    return torch.is_grad_enabled() or not takes(grad)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """``Function.apply`` without its Python half.

    The Python half serves functorch, which `takes` excludes, and costs 1.5 us of a call's 8 us.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]
