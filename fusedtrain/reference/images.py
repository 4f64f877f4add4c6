"""Normalisation of byte images: ``(x / 255 - mean) / std``, as a scale and a shift.

The scale, 1 / (255 std), is split into two parts of 16 bits. Their products with a byte are exact
in float32, so ``x upper + (x lower + shift)`` has the same bits whether or not a compiler fuses
multiplications with additions: on every instruction set and device, compiled or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    Numbers = float | Sequence[float] | Tensor
    MemoryFormat = torch.memory_format
else:  # types that TorchScript knows
    Numbers = float | list[float] | Tensor
    MemoryFormat = int


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _sixteen_bits(x: Tensor) -> Tensor:
    """float64 rounded to 16 bits of fraction, by Veltkamp's splitting."""
    shifted = x * 137438953473.0  # 2^37 + 1
    return shifted - (shifted - x)


def image_coefficients(mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    """The two parts of the scale, and the shift: [3, C].

    float64 for float64, where the scale is not split, else float32. `mean`, `std`: float64 [C].
    """
    scale, shift = 1 / (255 * std), -mean / std
    if dtype == torch.float64:
        return torch.stack([scale, torch.zeros_like(scale), shift])
    upper = _sixteen_bits(scale)
    lower = _sixteen_bits(scale - upper)
    return torch.stack([upper, lower, shift]).float()


def normalize_images(
    input: Tensor, coefficients: Tensor, dtype: torch.dtype, memory_format: MemoryFormat
) -> Tensor:
    """`input` is [N, C, H, W]; computes in the coefficients' dtype, and rounds once to `dtype`."""
    upper, lower, shift = coefficients.view(3, 1, -1, 1, 1).unbind()
    x = input.to(coefficients.dtype)
    y = (x * upper + (x * lower + shift)).to(dtype)
    if memory_format == torch.preserve_format:
        return y
    return y.contiguous(memory_format=memory_format)


def vector_of(name: str, values: Numbers, channels: int, device: torch.device) -> Tensor:
    """float64 [channels] of one number, or one for each channel."""
    if isinstance(values, Tensor):
        t = values.detach().to(device, torch.float64).reshape(-1)
    elif isinstance(values, float):
        t = torch.full([1], values, dtype=torch.float64, device=device)
    else:  # torch.tensor would round to float32 in TorchScript, and copy from the host elsewhere
        each = [torch.empty([0], dtype=torch.float64, device=device)]
        for value in values:
            each.append(torch.full([1], value, dtype=torch.float64, device=device))
        t = torch.cat(each)
    if t.numel() != 1 and t.numel() != channels:
        raise ValueError(
            f"{name}: expected one value, or one for each of {channels} channels, got {t.numel()}"
        )
    return t.expand(channels)


def mean_or_imagenet(mean: Numbers | None) -> Numbers:
    """The mean, or ImageNet's: TorchScript takes neither such defaults nor the tuples above."""
    if mean is None:
        return [0.485, 0.456, 0.406]
    return mean


def std_or_imagenet(std: Numbers | None) -> Numbers:
    if std is None:
        return [0.229, 0.224, 0.225]
    return std


def check_input(input: Tensor) -> None:
    if input.dtype != torch.uint8:
        raise TypeError(
            f"input: expected uint8, got {input.dtype}. Images of floats are normalised by "
            "(input - mean) / std, as torchvision.transforms.v2.functional.normalize does"
        )
    if input.dim() != 3 and input.dim() != 4:
        raise ValueError(f"input: expected [C, H, W] or [N, C, H, W], got {list(input.shape)}")


def layout_hint(input: Tensor, channels: int) -> str:
    """The end of a message about a wrong number of channels."""
    if channels == 1 or input.size(-1) != channels:
        return ""
    order = "(2, 0, 1)" if input.dim() == 3 else "(0, 3, 1, 2)"
    return f". The last dimension may be the channels: input.permute{order} puts them first"


def check_formats(dtype: torch.dtype, memory_format: MemoryFormat) -> None:
    if dtype not in [torch.float32, torch.float16, torch.bfloat16, torch.float64]:
        raise TypeError(f"dtype: expected float32, float16, bfloat16 or float64, got {dtype}")
    if memory_format not in [torch.preserve_format, torch.contiguous_format, torch.channels_last]:
        raise ValueError(
            "memory_format: expected preserve_format, contiguous_format or channels_last, got "
            f"{memory_format}"
        )


def check_coefficients(std: Tensor, coefficients: Tensor) -> None:
    if not bool(((std > 0) & std.isfinite()).all()):
        raise ValueError("std: must be positive and finite")
    if not bool(coefficients.isfinite().all()):
        raise ValueError("mean, std: 1 / (255 std) and mean / std must be finite in float32")
