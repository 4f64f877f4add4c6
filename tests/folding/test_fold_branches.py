"""Forwards with several ways, values that leave a forward, and rewriting what has only one way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedtrain
from helpers.folding import waken

pytestmark = pytest.mark.usefixtures("one_thread")


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 1)


def norm() -> nn.BatchNorm2d:
    return nn.BatchNorm2d(4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.n, self.act = conv(), norm(), nn.ReLU()
        self.c2, self.n2 = conv(), norm()
        self.inner = nn.Sequential(conv())
        self.inner_norm = norm()


class TwoWays(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.act(self.n(self.c(x)))
        return self.act(self.n(self.c(-x))) + self.n2(self.c2(x))


class ListOrTensor(Net):
    def forward(self, x: Any) -> Tensor:
        y = torch.cat(x) if isinstance(x, list) else x
        return self.act(self.n(self.c(y)))


class AcrossForwards(Net):
    """The convolution is called in another forward than its norm, each in one of two ways."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) if x.sum() > 0 else self.inner(-x)
        return self.inner_norm(y)


class Optional(Net):
    def forward(self, x: Tensor, early: bool = False) -> Tensor:
        y = self.n(self.c(x))
        return y if early else self.n2(self.c2(torch.tanh(y)))


@pytest.mark.parametrize(
    ("make", "count", "fused"),
    [(TwoWays, 2, 1), (ListOrTensor, 1, 1), (AcrossForwards, 1, 0), (Optional, 2, 0)],
)
def test_every_way_folds(make: type[nn.Module], count: int, fused: int) -> None:
    model = waken(make())
    folded, report = fusedtrain.fold_conv_bn(model)
    assert (len(report), len(report.fused)) == (count, fused), report
    tuned = copy.deepcopy(model)
    assert len(fusedtrain.fold_frozen_norms(tuned)) == count
    x = torch.rand(2, 4, 3, 3)
    with torch.no_grad():
        for value in (x, -x):
            for changed in (folded, tuned):
                torch.testing.assert_close(changed(value), model(value), rtol=1e-4, atol=1e-5)


class SomeWays(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x)
        return self.n(y) if x.sum() > 0 else y


class OtherConvolution(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.n(self.c(x) if x.sum() > 0 else self.c2(x))


class Leaves(Net):
    """The output of the inner module goes to its norm in one way only."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y if x.sum() > 0 else self.inner_norm(y)


class CalledTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner_norm(self.inner(x)) + self.inner(x)


class Items(Net):
    """The traced list has two items, others may have more."""

    def forward(self, x: Any) -> Any:
        for i, item in enumerate(x):
            y = self.n(self.c(item)) if i < 2 else self.c(item)
        return y


class Stores(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.c(x)
        return self.n(self.last)


class ByName(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.n(self.c(x)) + self.c.forward(x)


class Untraced(Net):
    """A forward that torch.fx cannot trace calls the inner module apart from the pair."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Sequential(conv()), norm())

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x) if float(x.sum()) > 0 else self.pair[0](x)


LEFT: dict[str, tuple[type[nn.Module], str, str]] = {
    "some ways": (SomeWays, "n", "the output of c is used elsewhere, too"),
    "other convolution": (OtherConvolution, "n", "its convolution is now one, now another (c, c2)"),
    "leaves": (Leaves, "inner_norm", "the output of inner.0 is used elsewhere, too"),
    "module called twice": (CalledTwice, "inner_norm", "the output of inner.0 is used elsewhere"),
    "items": (Items, "n", "torch.fx cannot trace (the model itself)"),
    "stored": (Stores, "n", "the output of c is used elsewhere, too"),
    "by name": (ByName, "n", "c: (the model itself) calls its forward by name"),
    "untraced": (Untraced, "pair.1", "Untraced.forward calls pair.0, too"),
}


@pytest.mark.parametrize("function", ["fold_conv_bn", "fold_frozen_norms", "drop_redundant_bias"])
@pytest.mark.parametrize("case", LEFT)
def test_left(case: str, function: str) -> None:
    make, name, reason = LEFT[case]
    model = waken(make()).train(function == "drop_redundant_bias")
    call: Callable[[nn.Module], Any] = getattr(fusedtrain, function)
    report = call(model)[1] if function == "fold_conv_bn" else call(model)
    assert len(report) == 0
    assert next(e.reason for e in report.left if e.name == name).startswith(reason), report


class Functional(Net):
    """Operations without a place in a graph, with which the module keeps its forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "stores":
            self.calls += 1
        if self.how == "constant":
            x = x * torch.tensor(3.0)
        if self.how == "branch" and x.sum() > 0:
            x = -x
        n = self.n
        y = F.batch_norm(self.c(x), n.running_mean, n.running_var, n.weight, n.bias)
        return F.relu(self.n2(self.c2(y)))


@pytest.mark.parametrize("how", ["plain", "stores", "constant", "branch"])
def test_rewritten_only_if_exact(how: str) -> None:
    model = waken(Functional(how))
    folded, report = fusedtrain.fold_conv_bn(model)
    assert [e.other for e in report.folded] == ["n2", *["(the model itself)"] * (how == "plain")]
    assert isinstance(folded, torch.fx.GraphModule) == (how == "plain")
    assert [entry.other_type for entry in report.fused] == ["relu"] * (how == "plain")
    x = torch.rand(2, 4, 3, 3)
    with torch.no_grad():
        for value in (x, -x):
            torch.testing.assert_close(folded(value), model(value), rtol=1e-4, atol=1e-5)
    if how == "stores":
        assert (model.calls, folded.calls) == (2, 2)
