"""Whoever calls a part of a converted model by a way of his own gets the numbers of that part."""

from __future__ import annotations

import copy
import functools
import types
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

    def __init__(self, factor: Callable[[Any, Tensor], Any], scale: Any = None) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor, self.scale = factor, scale

    def forward(self, x: Tensor) -> Any:
        y = nn.functional.silu(self.gate(x)) * self.up(x)
        return y * self.factor(self, x)


def _names_dtype(x: Tensor) -> bool:
    return x.dtype is torch.float32


def _is_tensor(x: Tensor) -> bool:
    return isinstance(x, Tensor)


_elsewhere = types.FunctionType(_is_tensor.__code__, {"Tensor": Tensor, "__name__": "elsewhere"})


# Factors that a stand-in for x, or another day, answers in another way; the reason.
UNSEEN: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "autocast": (
        lambda *_: 1 + torch.is_autocast_enabled("cpu"), "asks is_autocast_enabled()",
    ),
    "deterministic": (
        lambda *_: 1 + torch.are_deterministic_algorithms_enabled(),
        "asks are_deterministic_algorithms_enabled()",
    ),
    "array": (lambda m, _: float(m.scale[0]), "uses a ndarray"),
    "is_tensor": (lambda _, x: 1 + torch.is_tensor(x), "asks is_tensor()"),
    "hasattr": (lambda _, x: x.mask if hasattr(x, "mask") else 2, "asks for the `mask`"),
    "getattr": (lambda _, x: getattr(x, "tag", None) or 2, "asks for the `tag`"),
    "grad": (lambda _, x: 1 if x.grad is None else 2, "asks for the `grad`"),
    "hash": (lambda _, x: {torch.float32: 2}.get(x.dtype, 1), "takes the hash"),
    "str": (lambda _, x: 1 + (str(x.device) == "cpu"), "makes a string"),
    "format": (lambda _, x: 1 + (f"{x.dtype}" == "torch.float32"), "makes a string"),
    "is": (lambda _, x: 1 + (x.dtype is torch.float32), "asks for the type"),
    "is, in a helper": (lambda _, x: 1 + _names_dtype(x), "asks for the type"),
    "isinstance of a size": (
        lambda _, x: 1 + isinstance(x.shape[0], int), "asks for the type",
    ),
    "isinstance in another file": (lambda _, x: 1 + _elsewhere(x), "asks for the type"),
    "type": (lambda _, x: 1 + (type(x) is Tensor), "asks for the type"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSEEN)
def test_a_forward_that_asks_what_a_stand_in_cannot_tell_keeps_its_code(name: str) -> None:
    factor, reason = UNSEEN[name]
    model, x = Product(factor, np.ones(2)), torch.randn(2, 4)
    stock = copy.deepcopy(model)
    report = fusedtrain.convert(model)
    assert reason in report.left_products[0].reason
    assert torch.equal(model(x), stock(x))


class Trying(Product):
    def forward(self, x: Tensor) -> Any:
        y = nn.functional.silu(self.gate(x)) * self.up(x)
        try:
            return y.view(3, -1)
        except RuntimeError:
            return y


def test_a_forward_that_tries_keeps_its_code() -> None:
    model = Trying(lambda *_: 1.0)
    report = fusedtrain.convert(model)
    assert "has a try statement" in report.left_products[0].reason
    assert model(torch.randn(2, 4)).shape == (2, 4)


@pytest.mark.parametrize(
    "factor",
    [lambda m, _: m.scale, lambda *_: 1 / np.sqrt(16), lambda m, _: 1 + (type(m.up) is nn.Linear)],
)
def test_a_forward_that_asks_what_stays_is_fused(factor: Any) -> None:
    """Numbers of numpy are written as numbers."""
    model, x = Product(factor, 1 / np.sqrt(16)), torch.randn(2, 4)
    stock = copy.deepcopy(model)
    assert len(fusedtrain.convert(model).products) == 1
    torch.testing.assert_close(model(x), stock(x))
