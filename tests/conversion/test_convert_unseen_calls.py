"""`convert` leaves alone what a forward that cannot be traced calls by a way of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.SiLU()
        self.gate = nn.Sigmoid()
        self.seq = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.seq(self.act(self.bn(self.conv(x))))
        return y * self.gate(self.conv(y))

    def features(self, x: Tensor) -> Tensor:
        return self.act(x)

    def normed(self, x: Tensor) -> Tensor:
        return self.bn(x)

    def deeper(self, x: Tensor) -> Tensor:
        return self.features(x)

    @property
    def last(self) -> nn.Module:
        return self.gate

    @functools.cached_property
    def cached(self) -> nn.Module:
        return self.gate

    @functools.cache  # noqa: B019
    def remembered(self) -> nn.Module:
        return self.gate

    @staticmethod
    def gated(block: Block, x: Tensor) -> Tensor:
        return block.gate(x)

    @classmethod
    def activated(cls, block: Block, x: Tensor) -> Tensor:
        return block.act(x)


def use_activation(block: Block, x: Tensor) -> Tensor:
    return block.act(x)


# What the forward around a block does besides, and how many calls still become part of another one:
# two activations of norms, and a gate, which does its own work for callers that nobody sees.
WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "nothing": (lambda self, y: y, 3),
    "calls it again": (lambda self, y: self.block(y), 3),
    "another module of the name": (lambda self, y: self.act(y), 3),
    "reaches for the activation": (lambda self, y: self.block.act(y), 2),
    "reaches for the norm": (lambda self, y: self.block.bn(y), 2),
    "by a variable": (lambda self, y: next(iter((self.block,))).act(y), 2),
    "by getattr": (lambda self, y: getattr(self.block, "act")(y), 1),  # noqa: B009
    "by a path": (lambda self, y: self.get_submodule("block.act")(y), 1),
    "by children": (lambda self, y: list(self.block.children())[1](y), 1),
    "by a method": (lambda self, y: self.block.features(y), 2),
    "by a method, the norm": (lambda self, y: self.block.normed(y), 2),
    "by a method of a method": (lambda self, y: self.block.deeper(y), 2),
    "by a property": (lambda self, y: self.block.last(y), 3),
    "by a cached property": (lambda self, y: self.block.cached(y), 3),
    "by a cached method": (lambda self, y: self.block.remembered()(y), 3),
    "by a static method": (lambda self, y: self.block.gated(self.block, y), 3),
    "by a static method of its own": (lambda self, y: self.activate(self.block, y), 2),
    "by a class method": (lambda self, y: self.block.activated(self.block, y), 2),
    "by a function": (lambda self, y: use_activation(self.block, y), 2),
    "by an index": (lambda self, y: self.block.seq[1](y), 2),
    "by a slice": (lambda self, y: self.block.seq[:2](y), 2),
    "by a loop": (lambda self, y: [part(y) for part in self.block.seq][1], 2),
}


class Around(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.block, self.act = Block(), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        y = y + float(x.mean())  # torch.fx has no number
        return self.besides(y)

    @staticmethod
    def activate(block: Block, x: Tensor) -> Tensor:
        return block.act(x)


def around(way: str) -> nn.Module:
    besides, _ = WAYS[way]
    torch.manual_seed(0)
    return type("Model", (Around,), {"besides": besides})(way).double()


@pytest.mark.parametrize("way", WAYS)
def test_untraceable_caller(way: str) -> None:
    model = around(way)
    twin = copy.deepcopy(model)
    report = fusedtrain.convert(twin)
    for training in (True, False):
        x = torch.randn(3, 4, 2, 2, dtype=torch.float64)
        output, expected = twin.train(training)(x), model.train(training)(x)
        torch.testing.assert_close(output, expected)
    parts = sum(len(norm.parts) for norm in report.norms) + len(report.products)
    assert parts == WAYS[way][1], str(report)


def test_the_reason_is_told() -> None:
    report = fusedtrain.convert(around("by a method"))
    assert "act stays: the model, which torch.fx cannot trace, may call it" in str(report)
