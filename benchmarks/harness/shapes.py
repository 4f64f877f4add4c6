"""Shapes in real networks: of parameters, in their order, and of batch norms, as they run.

Derived from the architectures as torchvision has them, for images of 224 x 224 pixels, so that a
benchmark needs no torchvision; test_benchmark_shapes.py compares them with those of torchvision
and timm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]
Shapes = Iterator[Shape]
# Width and blocks of each stage; the first block of the later ones halves the image.
RESNET50 = ((64, 3), (128, 4), (256, 6), (512, 3))
# Expansion, kernel, stride, output and blocks of each stage.
EFFICIENTNET_B0 = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)

# --- parameters ---


def _norm(channels: int) -> Shapes:
    yield from ((channels,), (channels,))


def _conv_norm(out: int, inputs: int, kernel: int) -> Shapes:
    yield out, inputs, kernel, kernel
    yield from _norm(out)


def _with_bias(*shape: int) -> Shapes:
    yield from (shape, shape[:1])


def _resnet50() -> Shapes:
    yield from _conv_norm(64, 3, 7)
    inputs = 64
    for width, blocks in RESNET50:
        for block in range(blocks):
            yield from _conv_norm(width, inputs, 1)
            yield from _conv_norm(width, width, 3)
            yield from _conv_norm(4 * width, width, 1)
            if block == 0:
                yield from _conv_norm(4 * width, inputs, 1)
            inputs = 4 * width
    yield from _with_bias(1000, 2048)


def _efficientnet_b0() -> Shapes:
    yield from _conv_norm(32, 3, 3)
    inputs = 32
    for expansion, kernel, _, out, blocks in EFFICIENTNET_B0:
        for _ in range(blocks):
            wide = expansion * inputs
            if expansion != 1:
                yield from _conv_norm(wide, inputs, 1)
            yield from _conv_norm(wide, 1, kernel)  # depthwise
            yield from _with_bias(inputs // 4, wide, 1, 1)  # squeeze and excite
            yield from _with_bias(wide, inputs // 4, 1, 1)
            yield from _conv_norm(out, wide, 1)
            inputs = out
    yield from _conv_norm(1280, 320, 1)
    yield from _with_bias(1000, 1280)


def _convnext_tiny() -> Shapes:
    yield from _with_bias(96, 3, 4, 4)
    yield from _norm(96)
    for width, blocks in ((96, 3), (192, 3), (384, 9), (768, 3)):
        for _ in range(blocks):
            yield width, 1, 1  # layer scale
            yield from _with_bias(width, 1, 7, 7)
            yield from _norm(width)
            yield from _with_bias(4 * width, width)
            yield from _with_bias(width, 4 * width)
        yield from _norm(width)  # before a downsampling, or before the head
        if width < 768:
            yield from _with_bias(2 * width, width, 2, 2)
    yield from _with_bias(1000, 768)


def _vit_l_16() -> Shapes:
    yield 1, 1, 1024
    yield from _with_bias(1024, 3, 16, 16)
    yield 1, 197, 1024
    for _ in range(24):
        yield from _norm(1024)
        yield from _with_bias(3072, 1024)
        yield from _with_bias(1024, 1024)
        yield from _norm(1024)
        yield from _with_bias(4096, 1024)
        yield from _with_bias(1024, 4096)
    yield from _norm(1024)
    yield from _with_bias(1000, 1024)


_NETWORKS: dict[str, Callable[[], Shapes]] = {
    "efficientnet_b0": _efficientnet_b0,
    "resnet50": _resnet50,
    "convnext_tiny": _convnext_tiny,
    "vit_l_16": _vit_l_16,
}
MODELS = tuple(_NETWORKS)


def shapes(model: str) -> list[Shape]:
    """Shapes of the parameters of one of ``MODELS``, with 1000 classes."""
    return list(_NETWORKS[model]())


def count(of: list[Shape]) -> int:
    """Number of all elements."""
    return sum(map(prod, of))


# --- batch norms ---


class Layer(NamedTuple):
    """A batch norm: the op (in ``contestants.norms.OPS``), and the input without the batch."""

    op: str
    channels: int
    height: int
    width: int


Layers = Iterator[Layer]


def _square(op: str, channels: int, pixels: int) -> Layer:
    return Layer(op, channels, pixels, pixels)


def _resnet50_norms() -> Layers:
    yield _square("bn_relu", 64, 112)
    pixels = 56
    for width, blocks in RESNET50:
        for block in range(blocks):
            yield _square("bn_relu", width, pixels)
            if block == 0 and width > 64:
                pixels //= 2  # by the 3x3 convolution
            yield _square("bn_relu", width, pixels)
            # The third norm of a block runs before that of the shortcut, which it is added to.
            yield _square("bn_add_relu", 4 * width, pixels)
            if block == 0:
                yield _square("bn", 4 * width, pixels)


def _efficientnet_b0_norms() -> Layers:
    pixels = 112
    yield _square("bn_silu", 32, pixels)
    inputs = 32
    for expansion, _, stride, out, blocks in EFFICIENTNET_B0:
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


_NORMS: dict[str, Callable[[], Layers]] = {
    "resnet50": _resnet50_norms,
    "efficientnet_b0": _efficientnet_b0_norms,
}
NORM_NETWORKS = tuple(_NORMS)


def norms(network: str) -> list[Layer]:
    """Every batch norm of one of ``NORM_NETWORKS``."""
    return list(_NORMS[network]())


def distinct_norms(network: str) -> list[Layer]:
    """Each kind of layer once."""
    return list(dict.fromkeys(_NORMS[network]()))
