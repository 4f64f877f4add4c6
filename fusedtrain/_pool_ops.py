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
from .reference.pool import new_image, out_sizes

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
