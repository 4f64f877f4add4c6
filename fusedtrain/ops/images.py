"""Normalised images: the op, and the public function.

``input`` is uint8 [N, C, H, W], ``coefficients`` float32 [3, C], ``dtype`` not float64.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.overrides import has_torch_function as _has_any

from .. import _calls
from .._graph.fx import handle as _handle
from ..reference import images as _reference
from ..reference.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    MemoryFormat,
    Numbers,
    check_coefficients,
    check_formats,
    check_input,
    image_coefficients,
    layout_hint,
    mean_or_imagenet,
    std_or_imagenet,
    vector_of,
)
from ._library import define, op

__all__ = ["normalize_images"]


def _fake(
    input: Tensor, coefficients: Tensor, dtype: torch.dtype, memory_format: torch.memory_format
) -> Tensor:
    return torch.empty_like(input, dtype=dtype, memory_format=memory_format)


define("normalize_images", _reference.normalize_images, _fake)
_op = op("normalize_images")


def _kernel_takes(input: Tensor) -> bool:
    return type(input) is Tensor and input.layout is torch.strided and not _calls.traced()


def _batch(
    input: Tensor, coefficients: Tensor, dtype: torch.dtype, memory_format: MemoryFormat
) -> Tensor:
    if _scripting():
        return _reference.normalize_images(input, coefficients, dtype, memory_format)
    if dtype == torch.float64 or not _kernel_takes(input):
        return _reference.normalize_images(input, coefficients, dtype, memory_format)
    return _op(input, coefficients, dtype, memory_format)


def _run(
    input: Tensor, coefficients: Tensor, dtype: torch.dtype, memory_format: MemoryFormat
) -> Tensor:
    if input.dim() == 4:
        return _batch(input, coefficients, dtype, memory_format)
    return _batch(input.unsqueeze(0), coefficients, dtype, memory_format).squeeze(0)


@torch.jit.unused
def _refuse(input: Any) -> None:
    """Raises TypeError for an image that is not a tensor; names the way to make one."""
    kind = f"{type(input).__module__}.{type(input).__qualname__}"
    remedies = {
        "numpy.ndarray": ". torch.from_numpy(input) makes a tensor; for an array [H, W, C] add "
        ".permute(2, 0, 1)",
        "PIL": ". torchvision.transforms.v2.functional.pil_to_tensor(input) makes a tensor",
    }
    remedy = remedies.get(kind, remedies.get(kind.partition(".")[0], ""))
    name = kind.removeprefix("builtins.")
    raise TypeError(f"input: expected a torch.Tensor of uint8, got {name}{remedy}")


def _coefficients(input: Tensor, mean: Numbers, std: Numbers, dtype: torch.dtype) -> Tensor:
    means = mean if type(mean) is tuple else numbers_of(mean)
    stds = std if type(std) is tuple else numbers_of(std)
    try:
        return coefficients_of(means, stds, input.size(-3), input.device, dtype)
    except ValueError as error:
        hint = layout_hint(input, max(len(means), len(stds)))
        raise ValueError(f"{error}{hint}") from None


def normalize_with(
    input: Tensor, coefficients: Tensor, dtype: torch.dtype, memory_format: MemoryFormat
) -> Tensor:
    """:func:`normalize_images` with its numbers made ready, [3, C] or [3, 1]."""
    if not _scripting() and _has_any((input,)):
        return _handle(normalize_with, (input,), input, coefficients, dtype, memory_format)
    if not isinstance(input, Tensor):
        _refuse(input)
    check_input(input)
    channels, expected = input.size(-3), coefficients.size(1)
    if expected != channels and expected != 1:
        raise ValueError(
            f"input: expected {expected} channels, got shape {list(input.shape)}"
            f"{layout_hint(input, expected)}"
        )
    return _run(input, coefficients.expand(3, channels), dtype, memory_format)


def numbers_of(values: Numbers) -> tuple[float, ...]:
    if isinstance(values, Tensor):
        return tuple(values.detach().flatten().tolist())
    return (values,) if isinstance(values, (float, int)) else tuple(values)


def _traceable(values: Numbers) -> Numbers:
    return values if isinstance(values, Tensor) else numbers_of(values)


@functools.lru_cache(maxsize=64)
def coefficients_of(
    mean: tuple[float, ...],
    std: tuple[float, ...],
    channels: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Made and checked once, so that a call copies nothing to the device and waits for nothing."""
    cpu = torch.device("cpu")
    with torch.inference_mode(False):
        wide_std = vector_of("std", std, channels, cpu)
        made = image_coefficients(vector_of("mean", mean, channels, cpu), wide_std, dtype)
        check_coefficients(wide_std, made)
        return made.to(device)


def normalize_images(
    input: Tensor,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    dtype: torch.dtype = torch.float32,
    memory_format: MemoryFormat = torch.preserve_format,
) -> Tensor:
    """``(input / 255 - mean) / std`` of bytes in one pass, the last step of a data loader.

    Both layouts of the input, contiguous and channels_last (so also ``hwc.permute(2, 0, 1)``), are
    read where they are, and either is written; other strides are made dense first. A scale and a
    shift are made in float64 and applied in float32 (in float64 for a float64 result): before its
    one rounding to `dtype` the result is within ``2^-23 (1 + 2 |mean|) / std`` of the exact one,
    and has the same bits from every kernel and from eager torch. It has no gradient.

    The scale and the shift of numbers are kept for the next call. Tensors are read by the host at
    every call, which waits for a GPU; :class:`fusedtrain.nn.NormalizeImages` reads them once.

    Args:
        input: uint8 [N, C, H, W] or [C, H, W].
        mean: one number, or one for each channel, of images from 0 to 1; by default ImageNet's.
        std: as mean.
        dtype: of the result: float32, float16, bfloat16 or float64.
        memory_format: ``torch.preserve_format``, ``contiguous_format`` or ``channels_last``. A
            single image is laid out as one of a batch.

    Raises:
        TypeError: an input that is not a tensor of uint8, or a dtype that is not one of these.
        ValueError: an input of other dimensions, numbers of other channels, a `std` that is not
            positive and finite (not under torch.compile), another memory format.

    Example:
        >>> image = torch.tensor([0, 255, 51], dtype=torch.uint8).view(3, 1, 1)
        >>> normalize_images(image, [0.5, 0.5, 0.0], [0.5, 0.25, 1.0]).flatten()
        tensor([-1.0000,  2.0000,  0.2000])
    """
    if _scripting():
        check_input(input)
        check_formats(dtype, memory_format)
        channels = input.size(-3)
        wide_std = vector_of("std", std_or_imagenet(std), channels, input.device)
        wide_mean = vector_of("mean", mean_or_imagenet(mean), channels, input.device)
        coefficients = image_coefficients(wide_mean, wide_std, dtype)
        check_coefficients(wide_std, coefficients)
        return _run(input, coefficients, dtype, memory_format)
    if _has_any((input, mean, std)):
        return _handle(
            normalize_images, (input, mean, std), input, mean, std, dtype=dtype,
            memory_format=memory_format,
        )  # fmt: skip
    if not isinstance(input, Tensor):
        _refuse(input)
    check_input(input)
    check_formats(dtype, memory_format)
    channels = input.size(-3)
    mean = IMAGENET_MEAN if mean is None else mean
    std = IMAGENET_STD if std is None else std
    if _kernel_takes(input):
        numbers = _coefficients(input, mean, std, dtype)
    else:
        wide_mean = vector_of("mean", _traceable(mean), channels, input.device)
        wide_std = vector_of("std", _traceable(std), channels, input.device)
        numbers = image_coefficients(wide_mean, wide_std, dtype)
    return _run(input, numbers, dtype, memory_format)
