"""Images, and the truth of their normalisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedtrain.ops import images as _images

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = (torch.preserve_format, torch.contiguous_format, torch.channels_last)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CPU = torch.device("cpu")


def statistics(channels: int) -> tuple[list[float], list[float]]:
    """Mean and deviation, others for each channel, so that none can stand for another."""
    rest = range(max(channels - 5, 0))
    mean = [*MEAN, 0.0, -0.7, *(0.001 * c for c in rest)]
    std = [*STD, 1.0, 1e-3, *(0.1 + 0.001 * c for c in rest)]
    return mean[:channels], std[:channels]


def coefficients(channels: int) -> Tensor:
    return _images.coefficients_of(*map(tuple, statistics(channels)), channels, CPU, torch.float32)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def check(result: Tensor, x: Tensor, mean: Any, std: Any) -> None:
    """The result is the truth within 2^-23 (1 + 2 |mean|) / std, then rounded to the dtype."""
    m, s = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (mean, std))
    want = (x.cpu().double() / 255 - m) / s
    before = 2**-23 * (1 + 2 * m.abs()) / s
    info = torch.finfo(result.dtype)
    half = (want.abs() + before) * info.eps / 2 + info.smallest_normal * info.eps
    if result.dtype is torch.float32:
        half = torch.zeros_like(want)  # no further rounding
    assert result.shape == want.shape
    assert ((result.cpu().double() - want).abs() <= before + half).all()


SHAPES = {
    "photo": (2, 3, 24, 40),
    "odd": (3, 3, 7, 5),
    "one pixel": (5, 3, 1, 1),
    "one image": (1, 3, 33, 31),
    "a row": (2, 3, 1, 17),
    "small": (40, 3, 4, 4),
    "grey": (2, 1, 9, 11),
    "two channels": (2, 2, 5, 13),
    "four channels": (2, 4, 8, 24),
    "five channels": (1, 5, 7, 9),
    "most that are moved": (2, 16, 5, 32),
    "more": (2, 17, 5, 8),
    "many": (1, 130, 3, 5),
    "no image": (0, 3, 4, 4),
    "no pixels": (2, 3, 0, 4),
    "no channels": (2, 0, 4, 4),
}
