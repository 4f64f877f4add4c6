"""Normalisation of byte images, in either layout, in one launch."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._layout import cdiv, channel_view, dense_like, is_dense
from .launch import Launcher

_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_FORMATS = (torch.preserve_format, torch.contiguous_format, torch.channels_last)


@triton.jit
def normalised(x, coefficients_ptr, channel, channels):
    """Products with a byte are exact (reference/images.py): fusing them changes no bit."""
    upper = tl.load(coefficients_ptr + channel)
    lower = tl.load(coefficients_ptr + channels + channel)
    shift = tl.load(coefficients_ptr + 2 * channels + channel)
    x = x.to(tl.float32)
    return x * upper + (x * lower + shift)


@triton.jit(do_not_specialize=["units", "channels"])
def to_planes_kernel(  # equal (other=): elements beyond the data are not stored
    y_ptr, x_ptr, coefficients_ptr, units: tl.int64, channels: tl.int64,
    LAST: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes the same pixels of all channels: their interleaved bytes are neighbours."""
    pixels = units * UNIT  # shows Triton whether planes start on 16 bytes
    across = tl.cdiv(pixels, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    start = program // across * channels * pixels
    at = program % across * BLOCK + tl.arange(0, BLOCK)
    inside = at < pixels
    for c in range(channels):
        if LAST:
            x = tl.load(x_ptr + start + at * channels + c, mask=inside, other=0)
        else:
            x = tl.load(x_ptr + start + c * pixels + at, mask=inside, other=0)
        y = normalised(x, coefficients_ptr, c, channels).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + start + c * pixels + at, y, mask=inside)


@triton.jit(do_not_specialize=["total", "pixels", "channels"])
def to_last_kernel(  # equal (other=): elements beyond the data are not stored
    y_ptr, x_ptr, coefficients_ptr, total: tl.int64, pixels: tl.int64, channels: tl.int64,
    LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    channel = at % channels
    if LAST:
        source = at
    else:
        pixel = at // channels
        source = (pixel // pixels * channels + channel) * pixels + pixel % pixels
    # equal (< for <=): a whole last block is masked: slower, same result
    whole = start + BLOCK <= total  # then without a mask: any total has 16-byte accesses
    if whole:
        x = tl.load(x_ptr + source)
    else:
        x = tl.load(x_ptr + source, mask=at < total, other=0)
    y = normalised(x, coefficients_ptr, channel, channels).to(y_ptr.dtype.element_ty)
    if whole:
        tl.store(y_ptr + at, y)
    else:
        tl.store(y_ptr + at, y, mask=at < total)


_BLOCK = {4: 1024, 2: 2048}  # 16 bytes of output twice in each of 128 threads

_launch_to_planes = Launcher(to_planes_kernel)
_launch_to_last = Launcher(to_last_kernel)


def _has_layout(t: Tensor, last: bool) -> bool:
    _, c, h, w = t.shape
    wanted = (c * h * w, 1, w * c, c) if last else (c * h * w, h * w, w, 1)
    return all(n == 1 or s == v for n, s, v in zip(t.shape, t.stride(), wanted, strict=True))


def normalize_images(
    input: Tensor,
    coefficients: Tensor,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> Tensor:
    for wrong, message in (
        (input.dtype is not torch.uint8, "input must be uint8"),
        (input.dim() != 4, "input must have 4 dimensions"),
        (coefficients.device != input.device, "coefficients are on another device"),
        (dtype not in _DTYPES, "dtype must be float32, float16 or bfloat16"),
        (
            memory_format not in _FORMATS,
            "memory_format must be preserve_format, contiguous_format or channels_last",
        ),
    ):
        if wrong:
            raise RuntimeError(f"fusedtrain::normalize_images: {message}")
    if coefficients.dtype is not torch.float32 or coefficients.shape != (3, input.size(1)):
        raise RuntimeError(
            f"fusedtrain::normalize_images: coefficients must be float32 [3, {input.size(1)}]"
        )
    y = torch.empty_like(input, dtype=dtype, memory_format=memory_format)
    if not y.numel():
        return y
    x = input if is_dense(input) else torch.empty_like(input).copy_(input)
    x_last = _has_layout(x, True) and _has_layout(y, False)
    y_last = _has_layout(x, False) and _has_layout(y, True)
    if x_last != y_last:
        samples, channels, height, width = x.shape
        pixels = height * width
    else:
        x = dense_like(x, y)
        samples, channels, pixels = channel_view(x)
        x_last = y_last = pixels == 1 and channels > 1
    block = _BLOCK[dtype.itemsize]
    tensors = (y, x, coefficients.contiguous())
    if y_last:
        total = y.numel()
        _launch_to_last(
            x_last, cdiv(total, block), tensors, (total, pixels, channels), (x_last, block)
        )  # fmt: skip
    else:
        unit = 16 if pixels % 16 == 0 else 1
        programs = samples * cdiv(pixels, block)
        constants = (x_last, unit, block)
        _launch_to_planes(constants, programs, tensors, (pixels // unit, channels), constants)
    return y
