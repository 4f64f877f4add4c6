"""The layout of norms that convert found in a forward, and what traces of them hold."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fusedtrain

WIDTH = 24


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Layer(Rms):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


@pytest.mark.parametrize("cls", [Rms, Layer])
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0), (2, 0, 1)])
def test_the_layout_is_that_of_the_stock_forward(
    cls: type[Rms], order: tuple[int, int, int]
) -> None:
    """For a `view` of what lies in order in memory: [T, B, C] of [B, T, C], say."""
    stock = nn.Sequential(cls())
    model = copy.deepcopy(stock)
    fusedtrain.convert(model)
    shape = [0, 0, 0]
    for size, dim in zip((3, 5, WIDTH), order):
        shape[dim] = size
    x = torch.randn(shape).permute(order)
    for net in (model, torch.compile(model, backend="eager")):
        y = net(x)
        torch.testing.assert_close(y, stock(x))
        assert y.stride() == x.stride()


def test_traces_have_no_rms_norm() -> None:
    """The exporter of ONNX by TorchScript knows none."""
    model, x = nn.Sequential(Rms(), Rms()), torch.randn(2, WIDTH)
    fusedtrain.convert(model)
    traced = torch.jit.trace(model, x)
    assert "rms_norm" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), model(x))
