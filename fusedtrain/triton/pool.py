"""Max pooling. Forward, a lane computes one byte of codes and the byte's outputs. Backward, a lane
has one input, and visits the windows that contain it in the order of the outputs. UNIT neighbours
are channels of one pixel: one thread has all of them, and accesses them at once."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.bits import packed_bytes
from ..reference.pool import new_image, out_sizes
from ._layout import cdiv, unit_of
from .launch import Launcher, check_dtype
from .vecmath import widen

_SIZES = [
    "count", "units", "height", "width", "out_height", "out_width", "kernel_h", "kernel_w",
    "stride_h", "stride_w", "pad_h", "pad_w",
]  # fmt: skip


@triton.jit
def narrow(a, b, c, d, SMALL: tl.constexpr):
    """32-bit numbers, if all indices fit: a division of 64 bits is a function call."""
    if SMALL:
        return a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), d.to(tl.int32)
    else:
        return a, b, c, d


@triton.jit
def pixel_of(at, channels, height, width):
    """Plane, row, column and channel of an element in memory order."""
    pixel = at // channels
    line = pixel // width
    return line // height, line % height, pixel % width, at % channels


@triton.jit(do_not_specialize=_SIZES)
def max_pool2d_kernel(
    x_ptr, y_ptr, codes_ptr, count: tl.int64, units: tl.int64, height: tl.int64,
    width: tl.int64, out_height: tl.int64, out_width: tl.int64, kernel_h: tl.int64,
    kernel_w: tl.int64, stride_h: tl.int64, stride_w: tl.int64, pad_h: tl.int64, pad_w: tl.int64,
    BITS: tl.constexpr, CODES: tl.constexpr, SMALL: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`count` times UNIT outputs. BITS is 8 without CODES."""
    PART: tl.constexpr = 32 * BITS  # bytes of a block of 256 codes
    count, units, height, width = narrow(count, units, height, width, SMALL)
    count *= UNIT
    channels = units * UNIT
    out_height, out_width, kernel_h, kernel_w = narrow(
        out_height, out_width, kernel_h, kernel_w, SMALL
    )
    stride_h, stride_w, pad_h, pad_w = narrow(stride_h, stride_w, pad_h, pad_w, SMALL)
    byte = tl.program_id(0).to(count.dtype) * BLOCK + tl.arange(0, BLOCK)
    packed = tl.zeros((BLOCK,), tl.int32)
    for k in range(8 // BITS):
        at = byte // PART * 256 + byte % PART + k * PART
        inside = at < count
        plane, row, column, channel = pixel_of(at, channels, out_height, out_width)
        top = row * stride_h - pad_h
        left = column * stride_w - pad_w
        best = tl.full((BLOCK,), -float("inf"), widen(tl.zeros((1,), x_ptr.dtype.element_ty)).dtype)
        # The first element of the window that is not padding.
        place = tl.maximum(-top, 0) * kernel_w + tl.maximum(-left, 0)
        for i in range(kernel_h):
            h = top + i
            in_row = inside & (h >= 0) & (h < height)
            source = ((plane * height + h) * width + left) * channels + channel
            for j in range(kernel_w):
                valid = in_row & (left + j >= 0) & (left + j < width)
                valid = tl.max_constancy(valid, UNIT)
                from_here = tl.max_contiguous(tl.multiple_of(source + j * channels, UNIT), UNIT)
                value = tl.load(x_ptr + from_here, mask=valid, other=-float("inf"))
                value = widen(value)
                # The first of equal numbers wins, and the last NaN, as in torch.
                wins = (value > best) | (value != value)
                best = tl.where(wins, value, best)
                place = tl.where(wins, i * kernel_w + j, place)
        tl.store(y_ptr + at, best.to(y_ptr.dtype.element_ty), mask=inside)
        packed |= tl.where(inside, place, 0).to(tl.int32) << (k * BITS)
    if CODES:
        last = (count + 255) // 256 * PART
        tl.store(codes_ptr + byte, packed.to(tl.uint8), mask=byte < last)


@triton.jit(do_not_specialize=_SIZES)
def max_pool2d_backward_kernel(  # equal (other=): outputs that are not valid are not added
    grad_ptr, codes_ptr, grad_input_ptr, count: tl.int64, units: tl.int64, height: tl.int64,
    width: tl.int64, out_height: tl.int64, out_width: tl.int64, kernel_h: tl.int64,
    kernel_w: tl.int64, stride_h: tl.int64, stride_w: tl.int64, pad_h: tl.int64, pad_w: tl.int64,
    BITS: tl.constexpr, SMALL: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`count` times UNIT inputs."""
    PART: tl.constexpr = 32 * BITS
    count, units, height, width = narrow(count, units, height, width, SMALL)
    count *= UNIT
    channels = units * UNIT
    out_height, out_width, kernel_h, kernel_w = narrow(
        out_height, out_width, kernel_h, kernel_w, SMALL
    )
    stride_h, stride_w, pad_h, pad_w = narrow(stride_h, stride_w, pad_h, pad_w, SMALL)
    at = tl.program_id(0).to(count.dtype) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    plane, row, column, channel = pixel_of(at, channels, height, width)
    h = row + pad_h
    w = column + pad_w
    sums = tl.zeros((BLOCK,), widen(tl.zeros((1,), grad_ptr.dtype.element_ty)).dtype)
    # The window whose last element is this input has the first output, and so comes first.
    for a in range(kernel_h):
        i = kernel_h - 1 - a
        o = (h - i) // stride_h
        in_row = inside & (h >= i) & ((h - i) % stride_h == 0) & (o < out_height)
        for b in range(kernel_w):
            j = kernel_w - 1 - b
            q = (w - j) // stride_w
            valid = in_row & (w >= j) & ((w - j) % stride_w == 0) & (q < out_width)
            output = ((plane * out_height + o) * out_width + q) * channels + channel
            rest = (output % 256).to(tl.int32)
            byte = tl.max_contiguous(tl.multiple_of(output // 256 * PART + rest % PART, UNIT), UNIT)
            code = tl.load(codes_ptr + byte, mask=tl.max_constancy(valid, UNIT), other=0)
            place = (code.to(tl.int32) >> (rest // PART * BITS)) & ((1 << BITS) - 1)
            grad = widen(tl.load(grad_ptr + output, mask=valid, other=0.0))
            sums += tl.where(valid & (place == i * kernel_w + j), grad, 0.0)
    tl.store(grad_input_ptr + at, sums.to(grad_input_ptr.dtype.element_ty), mask=inside)


# Lanes of a program of 128 threads, if neighbours are not channels. With 256 lanes, 8 bits and
# 16-bit numbers, the calls that divide 64 bits spill 16 bytes.
_BLOCK = 128


def _unit(channels: int, itemsize: int, small: bool) -> int:
    """Channels of a pixel per thread: up to 16 bytes, if indices fit in 32 bits, else one."""
    return min(unit_of(channels), 16 // itemsize) if small else 1


_MOST = 2**29  # windows reach beyond the tensor by less than a kernel and a stride

_launch_forward = Launcher(max_pool2d_kernel)
_launch_backward = Launcher(max_pool2d_backward_kernel)


def _check(
    name: str, t: Tensor, height: int, width: int, kernel_size: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], bits: int, channels_last: bool,
) -> None:  # fmt: skip
    """As csrc/bindings/pool.h."""
    check_dtype(name, t, "input")
    for wrong, message in (
        (
            t.dim() != 4 and (t.dim() != 3 or channels_last),
            "expected [N, C, H, W], or [C, H, W] and not channels_last",
        ),
        (
            any(len(two) != 2 for two in (kernel_size, stride, padding)),
            "kernel_size, stride and padding must be two numbers",
        ),
        (
            not all(1 <= k <= 256 and s >= 1 for k, s in zip(kernel_size, stride, strict=False)),
            "kernel_size must be from 1 to 256, stride at least 1",
        ),
        (
            not all(0 <= 2 * p <= k for k, p in zip(kernel_size, padding, strict=False)),
            "padding must be from 0 to half of kernel_size",
        ),
        (bits not in (0, 1, 2, 4, 8), "bits must be 0, 1, 2, 4 or 8"),
        (
            bits > 0 and kernel_size[0] * kernel_size[-1] > 1 << bits,
            f"{bits} bits are too few for the window",
        ),
        (height < 1 or width < 1, "the input has no pixels"),
    ):
        if wrong:
            raise RuntimeError(f"fusedtrain::{name}: {message}")


def _in_layout(t: Tensor, channels_last: bool) -> Tensor:
    format = torch.channels_last if channels_last else torch.contiguous_format
    return t.detach().contiguous(memory_format=format)


def max_pool2d(
    input: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    ceil_mode: bool, bits: int, channels_last: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    name = "max_pool2d"
    height, width = input.shape[-2:] if input.dim() > 1 else (0, 0)
    _check(name, input, height, width, kernel_size, stride, padding, bits, channels_last)
    sizes = out_sizes(input, kernel_size, stride, padding, ceil_mode)
    if min(sizes) < 1:
        raise RuntimeError(f"fusedtrain::{name}: the input is smaller than a window")
    y = new_image(input, *sizes, channels_last)
    codes = input.new_empty(packed_bytes(y.numel(), bits), dtype=torch.uint8)
    if y.numel():
        stored = bits or 8
        small = max(input.numel(), y.numel(), *stride) < _MOST
        channels = input.size(1) if channels_last else 1
        unit = _unit(channels, input.itemsize, small)
        numbers = (
            y.numel() // unit, channels // unit, height, width, *sizes, *kernel_size, *stride,
            *padding,
        )  # fmt: skip
        constants = (stored, bits > 0, small, unit, unit * _BLOCK)
        _launch_forward(
            constants,
            cdiv(packed_bytes(y.numel(), stored), unit * _BLOCK),
            (_in_layout(input, channels_last), y, codes),
            numbers,
            constants,
        )
    return y, codes


def max_pool2d_backward(
    grad: Tensor, codes: Tensor, height: int, width: int, kernel_size: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], bits: int, channels_last: bool,
) -> Tensor:  # fmt: skip
    name = "max_pool2d_backward"
    _check(name, grad, height, width, kernel_size, stride, padding, bits, channels_last)
    if codes.device != grad.device:
        raise RuntimeError(f"fusedtrain::{name}: codes must be on the device of grad")
    right = codes.dtype is torch.uint8 and codes.dim() == 1
    if not (bits and right and codes.numel() == packed_bytes(grad.numel(), bits)):
        raise RuntimeError(
            f"fusedtrain::{name}: codes must be the {bits}-bit codes of as many outputs as grad has"
        )
    grad_input = new_image(grad, height, width, channels_last)
    if not grad.numel():
        return grad_input.zero_()
    small = max(grad_input.numel(), grad.numel(), *stride) < _MOST
    channels = grad.size(1) if channels_last else 1
    unit = _unit(channels, grad.itemsize, small)
    numbers = (
        grad_input.numel() // unit, channels // unit, height, width, *grad.shape[-2:],
        *kernel_size, *stride, *padding,
    )  # fmt: skip
    constants = (bits, small, unit, unit * _BLOCK)
    _launch_backward(
        constants,
        cdiv(grad_input.numel(), unit * _BLOCK),
        (_in_layout(grad, channels_last), codes.contiguous(), grad_input),
        numbers,
        constants,
    )
    return grad_input
