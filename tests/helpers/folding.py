"""Convolutions, norms and models that the tests of folding share, and the comparison of outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedtrain

DOUBLE = 1e-12  # relative to the largest magnitude, for single layers in float64


def waken(model: nn.Module) -> nn.Module:
    """Statistics and parameters of norms that a wrong fold would show; eval mode."""
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            if module.weight is not None:
                with torch.no_grad():
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.normal_(0, 0.3)
    return model.eval()


def difference(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def assert_folds(model: nn.Module, x: Tensor, count: int = 1, limit: float = DOUBLE) -> nn.Module:
    """All of `count` norms fold, the outputs agree, and the model is as it was."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
        folded, report = fusedtrain.fold_conv_bn(model, x, tolerance=limit)
        assert difference(folded(x), expected) <= limit
        assert torch.equal(model(x), expected)
    assert (len(report), report.left) == (count, []), report
    after = model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    return folded


CONVS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d, (2, 4, 9)),
    "2d": (lambda: nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d, (2, 4, 9, 8)),
    "3d": (lambda: nn.Conv3d(4, 6, 2), nn.BatchNorm3d, (2, 4, 5, 4, 3)),
    "no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d, (2, 4, 9, 8)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d, (2, 4, 9, 8)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d, (2, 6, 9, 8)),
    "circular": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d, (2, 4, 9, 8)
    ),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d, (2, 4, 9)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d, (2, 4, 5, 4)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 6, 2), nn.BatchNorm3d, (2, 4, 3, 4, 2)),
    "transposed, grouped": (
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d, (2, 4, 5, 4)
    ),
    "transposed, depthwise": (
        lambda: nn.ConvTranspose2d(4, 4, 3, groups=4), nn.BatchNorm2d, (2, 4, 5, 4)
    ),
    "linear": (lambda: nn.Linear(4, 6), nn.BatchNorm1d, (5, 4)),
}  # fmt: skip


def channels(conv: Any) -> int:
    return conv.out_features if isinstance(conv, nn.Linear) else conv.out_channels


class ByNames(nn.Module):
    """Children in an order that says nothing about the data."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Twice(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(self.conv(x)))


class Functional(nn.Module):
    def __init__(self, training: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.train_norm = training

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        y = F.batch_norm(
            self.conv(x), n.running_mean, n.running_var, n.weight, n.bias, self.train_norm, eps=1e-3
        )
        return y.relu()
