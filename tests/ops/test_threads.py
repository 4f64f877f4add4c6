"""Results have the same bits on any number of threads.

test_batch_norm_numbers.py has batch norm, on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

import fusedtrain.functional as F
from fusedtrain.ops import depthwise
from helpers.backends import same_bits
from helpers.batch_norm import FORMULAS

OPS = torch.ops.fusedtrain
Shape = tuple[int, ...]
Results = Iterable[Tensor]


def _with_gradients(function: Callable[..., Tensor], shape: Shape, *others: Shape) -> Results:
    """Outputs and gradients of a contiguous input and, of images, of channels_last."""
    x, *rest = (torch.randn(s, requires_grad=True) for s in (shape, *others))
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for last in (False, True)[: 1 + (len(shape) in formats)]:
        leaf = x.detach().contiguous(memory_format=formats[len(shape)]) if last else x
        y = function(leaf.requires_grad_(), *rest)
        yield from (y, *torch.autograd.grad(y, (leaf, *rest), torch.randn(y.shape)))


def _channelwise(name: str, count: int) -> Results:
    for shape in ((3, 700), (2, 5, 90, 70), (40_000,), (100, 20_000), (2, 300, 7), (2, 2, 40_000)):
        channels = shape[1] if len(shape) > 1 and name == "prelu" else 1
        yield from _with_gradients(getattr(F, name), shape, *[(channels,)] * count)


def _scale_and_bias() -> Results:
    x, g, scale = torch.randn(3, 40, 61, 59), torch.randn(3, 40, 61, 59), torch.randn(3, 40)
    rest = (torch.tensor([3, 4]), 1, *FORMULAS["gelu"], 1.0, -1.0, 0.2, True)
    for y in (x, x.to(memory_format=torch.channels_last)):
        yield from OPS.scale_add_backward(g, y, scale, 1, True)
        yield from OPS.bias_act_backward(g, y, scale[0], *rest)


def _row_norm() -> Results:
    """Rows, and channels of both layouts."""
    image = torch.randn(3, 40, 61, 59)
    for x in (torch.randn(900, 100), image, image.to(memory_format=torch.channels_last)):
        n = x.shape[1]
        y, mean, rstd, _ = OPS.row_norm(x, x, torch.randn(n), torch.randn(n), 1, 1, 1e-5, True)
        statistics = (torch.randn(n), mean, rstd)
        yield from (y, *OPS.row_norm_backward(x, y, y, *statistics, 1, 1, True, True))


def _group_norm() -> Results:
    image, vectors = torch.randn(3, 40, 61, 59), (torch.randn(40), torch.randn(40))
    rest = (*vectors, torch.randn(3, 40), torch.randn(3, 40))
    for x in (image, image.to(memory_format=torch.channels_last)):
        y, rows = OPS.group_norm_act(x, 4, *rest, 1e-5, *FORMULAS["silu"])
        needs = (rows, *FORMULAS["silu"], *(True,) * 5)
        yield from (y, *OPS.group_norm_act_backward(x, x, 4, *rest, *needs))


def _pool() -> Results:
    window = ([3, 3], [2, 2], [1, 1])
    y, codes = OPS.max_pool2d(torch.randn(3, 20, 65, 67), *window, False, 4, False)
    return y, codes, OPS.max_pool2d_backward(y, codes, 65, 67, *window, 4, False)


def _convolution(shape: Shape, kernel: Shape, **options: object) -> Callable[[], Results]:
    function = F.depthwise_conv2d if len(shape) == 4 else F.depthwise_conv3d
    return partial(_with_gradients, partial(function, **options), shape, kernel, kernel[:1])


CASES: dict[str, Callable[[], Results]] = {
    "prelu": partial(_channelwise, "prelu", 1),
    "star_relu": partial(_channelwise, "star_relu", 2),
    "scale_add, bias_act": _scale_and_bias,
    "row_norm": _row_norm,
    "group_norm": _group_norm,
    "max_pool2d": _pool,
    "3x3": _convolution((2, 20, 9, 10), (20, 1, 3, 3), padding=1),
    "5x5 by 2": _convolution((2, 3, 11, 12), (3, 1, 5, 5), stride=2, padding=2),
    "pairs": _convolution(
        (2, 4, 9, 12), (8, 1, 2, 4), stride=(1, 3), padding=(0, 2), dilation=(2, 1)
    ),
    "3-d": _convolution((2, 5, 4, 6, 7), (5, 1, 3, 3, 3), stride=(1, 2, 2), padding=1),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "_EVERYWHERE", True)
    before, runs = torch.get_num_threads(), []
    try:
        for threads in range(1, 6):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            runs.append(tuple(CASES[name]()))
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(runs[0], other) for other in runs[1:])
