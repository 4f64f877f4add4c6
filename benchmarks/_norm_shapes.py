"""The batch norms of real networks in the order in which they run: shapes, and what follows each.

Derived from the architectures as torchvision has them, for images of 224 x 224 pixels;
tests/test_batch_norm_benchmark.py compares them with torchvision's and timm's models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple


class Layer(NamedTuple):
    """A batch norm: the op (``_norm_contestants.OPS``), and the input without the batch."""

    op: str
    channels: int
    height: int
    width: int


Layers = Iterator[Layer]


def _square(op: str, channels: int, pixels: int) -> Layer:
    return Layer(op, channels, pixels, pixels)


def _resnet50() -> Layers:
    yield _square("bn_relu", 64, 112)
    pixels = 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield _square("bn_relu", width, pixels)
            if block == 0 and width > 64:
                pixels //= 2  # by the 3x3 convolution
            yield _square("bn_relu", width, pixels)
            # The third norm of a block runs before that of the shortcut, which it is added to.
            yield _square("bn_add_relu", 4 * width, pixels)
            if block == 0:
                yield _square("bn", 4 * width, pixels)


def _efficientnet_b0() -> Layers:
    pixels = 112
    yield _square("bn_silu", 32, pixels)
    inputs = 32
    for expansion, stride, out, blocks in (
        (1, 1, 16, 1),
        (6, 2, 24, 2),
        (6, 2, 40, 2),
        (6, 2, 80, 3),
        (6, 1, 112, 3),
        (6, 2, 192, 4),
        (6, 1, 320, 1),
    ):
        for block in range(blocks):
            wide = expansion * inputs
            if expansion != 1:
                yield _square("bn_silu", wide, pixels)
            if block == 0:
                pixels //= stride
            yield _square("bn_silu", wide, pixels)  # after the depthwise convolution
            yield _square("bn_add" if block > 0 else "bn", out, pixels)
            inputs = out
    yield _square("bn_silu", 1280, pixels)


_NETWORKS: dict[str, Callable[[], Layers]] = {
    "resnet50": _resnet50,
    "efficientnet_b0": _efficientnet_b0,
}
NETWORKS = tuple(_NETWORKS)


def layers(network: str) -> list[Layer]:
    """Every batch norm of one of ``NETWORKS``."""
    return list(_NETWORKS[network]())


def distinct_layers(network: str) -> list[Layer]:
    """Each kind of layer once."""
    return list(dict.fromkeys(_NETWORKS[network]()))
