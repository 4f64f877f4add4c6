"""The ops of reference/pool.py: schemas, fake kernels, fallbacks.

`bits` is what a place takes (1, 2, 4 or 8; 0: no codes are asked for). `channels_last` says how
output and gradient lie in memory, the order of the codes. `_pool.py` puts autograd in front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._definitions import fallback
from .reference import pool
from .reference.bits import packed_bytes

_WINDOW = "int[] kernel_size, int[] stride, int[] padding"

SCHEMAS = {
    # -> output, codes
    "max_pool2d": (
        f"(Tensor input, {_WINDOW}, bool ceil_mode, int bits, bool channels_last) "
        "-> (Tensor, Tensor)"
    ),
    "max_pool2d_backward": (
        f"(Tensor grad, Tensor codes, int height, int width, {_WINDOW}, int bits, "
        "bool channels_last) -> Tensor"
    ),
}
KERNELS = tuple(SCHEMAS)


def out_size(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """As torch: with ceil_mode windows may reach beyond the padding, but not begin there."""
    room = size + 2 * padding - kernel
    count = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def out_sizes(
    input: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
) -> tuple[int, int]:
    """Height and width of the output."""
    height, width = (
        out_size(*numbers, ceil)
        for numbers in zip(input.shape[-2:], kernel, stride, padding, strict=True)
    )
    return height, width


def new_image(model: Tensor, height: int, width: int, channels_last: bool) -> Tensor:
    """A tensor with the sizes of `model` but for the last two."""
    format = torch.channels_last if channels_last else torch.contiguous_format
    shape = (*model.shape[:-2], height, width)
    return torch.empty(shape, dtype=model.dtype, device=model.device, memory_format=format)


def _fake(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    bits: int,
    channels_last: bool,
) -> tuple[Tensor, Tensor]:
    sizes = out_sizes(input, kernel_size, stride, padding, ceil_mode)
    output = new_image(input, *sizes, channels_last)
    codes = input.new_empty(packed_bytes(output.numel(), bits), dtype=torch.uint8)
    return output, codes


def _fake_backward(grad: Tensor, codes: Tensor, height: int, width: int, *rest: object) -> Tensor:
    return new_image(grad, height, width, bool(rest[-1]))


_FAKES: dict[str, Callable[..., object]] = {
    "max_pool2d": _fake,
    "max_pool2d_backward": _fake_backward,
}


def define(library: torch.library.Library, warn: Callable[[torch.device], None]) -> None:
    """Defines the ops in the library, with the plain-torch reference behind each."""
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _FAKES[name], "Meta")
        run = fallback(getattr(pool, name), warn)
        library.impl(name, run, "CompositeExplicitAutograd")
