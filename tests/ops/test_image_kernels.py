"""Normalised images: the kernels of every backend, which promise the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import images
from helpers.backends import Kernels
from helpers.images import (
    DTYPES,
    FORMATS,
    MEAN,
    SHAPES,
    STD,
    check,
    coefficients,
    last,
    random_bytes,
    statistics,
)
from helpers.launches import parameters
from helpers.processes import by_capability

pytestmark = pytest.mark.usefixtures("memory_is_full_of_nan")


def run(ops: Kernels, x: Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
    """The output of the op, after a check of its numbers and strides."""
    channels = x.size(1)
    numbers = coefficients(channels)
    output: Tensor = ops(
        "normalize_images", x.to(ops.device), numbers.to(ops.device), dtype, memory_format
    )
    assert output.dtype is dtype
    want = images.normalize_images(x, numbers, dtype, memory_format)
    assert torch.equal(output.cpu(), want)
    check(output, x, *statistics(channels))
    promised = torch.empty_like(x, dtype=dtype, memory_format=memory_format)
    if ops.kernel and x.numel():
        assert output.stride() == promised.stride()
    elif x.numel():  # torch leaves strides of dimensions of one element as they are
        pairs = zip(x.shape, output.stride(), promised.stride(), strict=True)
        assert all(n == 1 or a == b for n, a, b in pairs)
    return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", parameters(SHAPES, "no image", "no pixels", "no channels"))
def test_layouts(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    x = random_bytes(*SHAPES[name])
    for batch in (x, last(x)):
        for memory_format in FORMATS:
            run(ops, batch, dtype, memory_format)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(1, 3, 70, 100), (2, 3, 180, 200), (1, 1100, 2, 3), (1, 33, 40, 40)], ids=str
)
def test_several_blocks(ops: Kernels, shape: tuple[int, ...]) -> None:
    """Also more than the threads of an emulated grid take in one step."""
    x = random_bytes(*shape)
    for batch in (x.contiguous(), last(x)):
        for memory_format in FORMATS[1:]:
            run(ops, batch, torch.float32, memory_format)


STRIDED: dict[str, Callable[[], Tensor]] = {
    "crop": lambda: random_bytes(2, 3, 20, 30)[..., 3:12, 5:22],
    "crop, channels last": lambda: last(random_bytes(2, 3, 20, 30))[..., 3:12, 5:22],
    "images of HWC": lambda: random_bytes(2, 9, 16, 3).permute(0, 3, 1, 2),
    "BGR": lambda: random_bytes(2, 9, 16, 3).permute(0, 3, 1, 2).flip(1),
    "every other": lambda: random_bytes(2, 3, 9, 32)[..., ::2],
    "transposed": lambda: random_bytes(2, 3, 8, 16).transpose(2, 3),
    "channels first of all": lambda: random_bytes(3, 2, 8, 16).transpose(0, 1),
    "rows of pixels": lambda: random_bytes(2, 9, 3, 16).permute(0, 2, 1, 3),
    "expanded": lambda: random_bytes(1, 3, 8, 8).expand(2, 3, 8, 8),
    "off 16 bytes": lambda: random_bytes(2 * 3 * 8 * 16 + 1)[1:].view(2, 3, 8, 16),
    "off 16 bytes, channels last": lambda: (
        random_bytes(2 * 3 * 8 * 16 + 1)[1:].view(2, 8, 16, 3).permute(0, 3, 1, 2)
    ),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides(ops: Kernels, name: str) -> None:
    x = STRIDED[name]()
    before = x.clone()
    for memory_format in FORMATS:
        run(ops, x, torch.float16, memory_format)
    assert torch.equal(x, before)


@pytest.mark.parametrize("memory_format", FORMATS[1:], ids=str)
def test_channels_are_told_apart(ops: Kernels, memory_format: torch.memory_format) -> None:
    """Each channel's numbers for each byte there is, out of every layout."""
    x = torch.arange(256, dtype=torch.uint8).expand(2, 3, 1, 256).contiguous()
    for batch in (x, last(x)):
        output = run(ops, batch, torch.float32, memory_format).cpu()
        for c in range(3):
            exact = (torch.arange(256, dtype=torch.float64) / 255 - MEAN[c]) / STD[c]
            assert torch.allclose(output[1, c, 0].double(), exact, rtol=0, atol=1e-6)


CAPABILITIES = """
import torch
from helpers.images import SHAPES, FORMATS, DTYPES, coefficients, last, random_bytes
import fusedtrain
torch.manual_seed(0)
outputs = []
for shape in SHAPES.values():
    x = random_bytes(*shape)
    for batch in (x, last(x)):
        for dtype in DTYPES:
            for memory_format in FORMATS:
                outputs.append(torch.ops.fusedtrain.normalize_images(
                    batch, coefficients(shape[1]), dtype, memory_format))
torch.save(outputs, {path!r})
"""


@pytest.mark.slow
def test_cpu_capabilities_agree(tmp_path: Path) -> None:
    """To the bit: products are exact, so that FMA changes nothing."""
    results = by_capability(CAPABILITIES, tmp_path)
    for others in results.values():
        for a, b in zip(others, results["default"], strict=True):
            assert torch.equal(a, b)


def test_products_with_bytes_are_exact() -> None:
    std = torch.cat([torch.tensor(STD), torch.rand(500), torch.logspace(-30, 30, 500)]).double()
    made = images.image_coefficients(torch.zeros_like(std), std, torch.float32)
    byte = torch.arange(256).view(-1, 1)
    for part in made[:2]:
        assert torch.equal((byte.float() * part).double(), byte.double() * part.double())
    scale = 1 / (255 * std)
    assert ((made[:2].double().sum(0) - scale).abs() <= 2**-32 * scale).all()


def test_opcheck() -> None:
    for x in (random_bytes(2, 3, 4, 5), last(random_bytes(2, 3, 4, 5)), STRIDED["crop"]()):
        for memory_format in FORMATS:
            torch.library.opcheck(
                torch.ops.fusedtrain.normalize_images.default,
                (x, coefficients(3), torch.float16, memory_format),
            )
