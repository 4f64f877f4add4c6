"""Whoever calls a part of a converted model by a way of his own gets the numbers of that part."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
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


# Further calls of the forward around a block, where torch.fx does not see them.
WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nothing": lambda self, y: y,
    "calls it again": lambda self, y: self.block(y),
    "another module of the name": lambda self, y: self.act(y),
    "reaches for the activation": lambda self, y: self.block.act(y),
    "reaches for the norm": lambda self, y: self.block.bn(y),
    "by a variable": lambda self, y: next(iter((self.block,))).act(y),
    "by getattr": lambda self, y: getattr(self.block, "act")(y),  # noqa: B009
    "by a path": lambda self, y: self.get_submodule("block.act")(y),
    "by children": lambda self, y: list(self.block.children())[1](y),
    "by a method": lambda self, y: self.block.features(y),
    "by a method, the norm": lambda self, y: self.block.normed(y),
    "by a method of a method": lambda self, y: self.block.deeper(y),
    "by a property": lambda self, y: self.block.last(y),
    "by a cached property": lambda self, y: self.block.cached(y),
    "by a cached method": lambda self, y: self.block.remembered()(y),
    "by a static method": lambda self, y: self.block.gated(self.block, y),
    "by a static method of its own": lambda self, y: self.activate(self.block, y),
    "by a class method": lambda self, y: self.block.activated(self.block, y),
    "by a function": lambda self, y: use_activation(self.block, y),
    "by an index": lambda self, y: self.block.seq[1](y),
    "by a slice": lambda self, y: self.block.seq[:2](y),
    "by a loop": lambda self, y: [part(y) for part in self.block.seq][1],
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
    besides = WAYS[way]
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
    assert parts == 3, str(report)  # two activations of norms, and a gate


def _in_float32(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return layer(x.float())


class InFloat32(nn.Module):
    """A helper switches autocast off, which is off while the model is converted."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(_in_float32(self.one, x)))


def test_contexts_that_a_helper_enters_stay() -> None:
    torch.manual_seed(0)
    model, x = InFloat32(), torch.randn(4, 8)
    stock = copy.deepcopy(model)
    report = fusedtrain.convert(model, x)
    assert "no_grad, autocast" in str(report)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), stock(x))


class Product(nn.Module):
    """A product to fuse, and a factor from somewhere else."""

    def __init__(self, scale: Any = None, factor: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.scale, self.factor = (
            *(nn.Linear(4, 4) for _ in "ab"),
            scale,
            factor,
        )

    def forward(self, x: Tensor) -> Any:
        y = nn.functional.silu(self.gate(x)) * self.up(x)
        return y * (self.scale if self.factor is None else self.factor(self.scale))


@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        (lambda _: 2.0 if torch.is_autocast_enabled("cpu") else 1.0, "asks is_autocast_enabled()"),
        (
            lambda _: 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0,
            "asks are_deterministic_algorithms_enabled()",
        ),
    ],
)
def test_a_forward_that_depends_on_more_than_it_shows_keeps_its_code(
    factor: Any, reason: str
) -> None:
    report = fusedtrain.convert(Product([], factor))
    assert not report.products
    assert reason in report.left_products[0].reason
    report = fusedtrain.convert(Product(np.ones(2), lambda scale: float(scale[0])))
    assert "uses a ndarray" in report.left_products[0].reason


@pytest.mark.parametrize("factor", [None, lambda _: 1 / np.sqrt(16)])
def test_numbers_of_numpy_are_written_as_numbers(factor: Any) -> None:
    model, x = Product(1 / np.sqrt(16), factor), torch.randn(2, 4)
    stock = copy.deepcopy(model)
    assert len(fusedtrain.convert(model).products) == 1
    torch.testing.assert_close(model(x), stock(x))
