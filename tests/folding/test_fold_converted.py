"""Models that `convert`, `fold_frozen_norms` or `drop_redundant_bias` changed fold like stock."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.conversion import MEMORY
from helpers.folding import difference, waken


class Block(nn.Module):
    """Norms with an activation, with a sum, alone; a gate, a call, a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.Sigmoid())
        self.conv3, self.bn3 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)) + x)
        y = self.bn3(self.conv3(y * self.gate(y)))
        return y * torch.sigmoid(y)


def network() -> nn.Module:
    torch.manual_seed(0)
    stem = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
    return waken(nn.Sequential(*stem, Block(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)))


def image() -> Tensor:
    return torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0))


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    **{
        f"convert {memory}": lambda m, memory=memory: fusedtrain.convert(m, memory=memory)
        for memory in MEMORY
    },
    "fold_frozen_norms": fusedtrain.fold_frozen_norms,
    "drop_redundant_bias": lambda m: fusedtrain.drop_redundant_bias(m.train()),
    "all": lambda m: (
        fusedtrain.drop_redundant_bias(m[3].train()),
        fusedtrain.fold_frozen_norms(m),
        fusedtrain.convert(m),
    ),
}


@pytest.mark.parametrize(
    ("change", "inplace"), [*((change, False) for change in CHANGES), ("convert store", True)]
)
def test_a_changed_model_folds_as_the_stock_one(change: str, inplace: bool) -> None:
    """Converted norms were left, and so were folded ones and convolutions without their bias."""
    stock, x = network(), image()
    model = copy.deepcopy(stock)
    assert CHANGES[change](model)
    model.eval()
    with torch.no_grad():
        want = model(x)
        expected, stock_report = fusedtrain.fold_conv_bn(stock, x)
        folded, report = fusedtrain.fold_conv_bn(model, x, inplace=inplace)
        assert difference(folded(x), want) < 1e-5
        torch.testing.assert_close(folded(x), expected(x), rtol=1e-6, atol=1e-6)
        if not inplace:
            assert torch.equal(model(x), want)
            assert fusedtrain.revert(model) > 0
    assert (len(report), report.left) == (5, [])
    assert report.folded == stock_report.folded
    assert report.fused == stock_report.fused
    assert fusedtrain.revert(folded) == 0


def test_convert_train_fold() -> None:
    """Statistics and weights are those of the end of training."""
    model, x = network().train(), image()
    fusedtrain.convert(model, x)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    folded, report = fusedtrain.fold_conv_bn(model.eval(), x)
    assert (len(report), report.left) == (5, [])
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in folded.modules())
    with torch.no_grad():
        assert difference(folded(x), model(x)) < 1e-5


@pytest.mark.parametrize("change", [fusedtrain.fold_frozen_norms, fusedtrain.drop_redundant_bias])
def test_others_leave_what_is_converted(change: Callable[[nn.Module], Any]) -> None:
    """They change the model itself: whoever converted it has to revert it. A converted forward may
    do the work of each module inside of it."""
    model, x = network().train(), image()
    fusedtrain.convert(model)
    twin = copy.deepcopy(model)
    report = change(model)
    assert {entry.name for entry in report.left} >= {"1", "3.bn1", "3.bn2", "3.bn3"}
    assert all("fusedtrain.revert first" in entry.reason for entry in report.left)
    torch.testing.assert_close(model(x), twin(x))
    fusedtrain.revert(model)
    assert (len(change(model)), change(network().train()).left) == (5, [])
