"""Calls that write in place between what is folded: nothing is moved across them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedtrain
from helpers.folding import difference, waken
from helpers.models import model_of

pytestmark = pytest.mark.usefixtures("one_thread")


def add_one(x: Tensor) -> None:
    x += 1


def into_a_view(x: Tensor) -> None:
    x.view_as(x)[:, :2].mul_(3)


def set_item(x: Tensor) -> None:
    x[:, :2] = 0


WRITES: dict[str, Callable[[Any], object]] = {
    "+=": add_one,
    "method": lambda x: x.mul_(2),
    "function": torch.relu_,
    "functional": lambda x: F.relu(x, inplace=True),
    "functional, by place": lambda x: F.relu(x, True),
    "module": nn.Sequential(nn.ReLU(inplace=True)),
    "unknown module": model_of(lambda self, x: x.mul_(2)),
    "view": into_a_view,
    "item": set_item,
    "data": lambda x: x.data.mul_(2),
    "detached": lambda x: x.detach().mul_(2),
    "out": lambda x: torch.mul(x, 2, out=x.detach()),
}


class Writing(nn.Module):
    """`write` is a child where it is a module."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.write = write
        self.c1, self.n1 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.c2, self.n2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)


class OnInputOfNorm(Writing):
    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(x)
        y = self.n1(x)
        self.write(x)
        return self.c1(y)


class OnOutputOfConv(Writing):
    def forward(self, x: Tensor) -> Any:
        y = self.c1(x)
        self.write(y)
        return self.n1(y)


class OnResidual(Writing):
    """Between the convolution and the sum."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(x)
        y = self.n1(self.c1(x))
        self.write(h)
        return torch.relu(y + h)


class OnResidualLater(Writing):
    """Between the sum and the activation."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(x)
        y = self.n1(self.c1(x)) + h
        self.write(h)
        return torch.relu(y)


class OnInputOfConv(Writing):
    def forward(self, x: Tensor) -> Any:
        h, x = torch.tanh(x), x * 1
        y = self.n1(self.c1(x))
        self.write(x)
        return torch.relu(y + h)


class SumIsSeen(Writing):
    """`h += y` is seen through a view of h."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.write(x * 1)) if isinstance(self.write, nn.Module) else torch.tanh(x)
        view = h[:, :2]
        y = self.n1(self.c1(x))
        h += y
        return torch.relu(h), view


PLACES = (OnInputOfNorm, OnOutputOfConv, OnResidual, OnResidualLater, OnInputOfConv, SumIsSeen)


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("place", PLACES, ids=lambda cls: cls.__name__)
def test_same_as_before(place: type, how: str) -> None:
    torch.manual_seed(0)
    model = waken(place(WRITES[how]))
    x = torch.randn(2, 4, 5, 5)
    folded, _ = fusedtrain.fold_conv_bn(model)
    tuned, report = fusedtrain.fold_conv_bn(model, fuse_activation=False)
    with torch.no_grad():
        for changed in (folded, tuned):
            for actual, expected in zip(changed(x), model(x), strict=True):
                assert difference(actual, expected) < 1e-5
    if place in (OnResidual, OnResidualLater, OnInputOfConv):
        assert len(report) == (how != "item")  # which torch.fx cannot trace


def test_reading_hinders_nothing() -> None:
    """A write is what counts, not a use."""

    class Reads(Writing):
        def forward(self, x: Tensor) -> Any:
            y = self.n1(self.c1(x))
            h = torch.tanh(x) + self.n2(self.c2(x))
            return torch.relu(y + h)

    _, report = fusedtrain.fold_conv_bn(waken(Reads(None)), torch.randn(2, 4, 5, 5))
    assert "add" in report.fused[-1].other_type
