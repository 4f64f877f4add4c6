"""Forwards whose way hangs on the truth of a value: all ways are rewritten, with the decisions."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.flow import trace
from fusedtrain._graph.forward import rewritten_of
from helpers.conversion import compared, outline
from helpers.models import model_of


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))
        self.act = nn.SiLU()


class AsT5(Base):
    """The product comes before the decisions."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.gate(x)) * self.up(x)
        if (
            isinstance(self.down.weight, Tensor)
            and y.dtype != self.down.weight.dtype
            and self.down.weight.dtype != torch.int8
        ):
            y = y.to(self.down.weight.dtype)
        output: Tensor = self.down(y)
        return output


class Tree(Base):
    """Activations before, between and after decisions, and of other kinds on each way."""

    def forward(self, x: Tensor) -> Tensor:
        y = T.gelu(self.gate(x))
        if y.sum() > 0:
            z = y * torch.sigmoid(y)
            if z.mean() > 0.05 and x.shape[0] > 2:
                return T.gelu(z) * self.act(self.up(x))
            z = z + T.elu(y)
        else:
            z = T.mish(y - 1) + x
        output: Tensor = self.down(T.relu(z) + y)
        return output


class Loop(Base):
    """A loop, with any number of ways."""

    def forward(self, x: Tensor) -> Tensor:
        while x.shape[0] > 2:
            x = T.gelu(self.gate(x))[::2]
        return T.silu(x)


class Straddling(Base):
    """The gate is called before the decision, the product comes after it, and only on one way."""

    def forward(self, x: Tensor) -> Tensor:
        opened = self.act(self.gate(x))
        if x.sum() > 0:
            return opened * self.up(x)
        return opened + 1


class StraddlingFormula(Base):
    """One way makes SiLU of a sigmoid that the other way uses as it is."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(x)
        opened = torch.sigmoid(y)
        if x.sum() > 0:
            return y * opened
        return opened + 1


# Rows, scale and shift of random numbers.
_DRAWN = [(4, 1, 0), (2, 1, 0), (4, 3, 2), (2, 3, 2), (4, 1, -4), (2, 4, -3), (8, 2, 1)]
INPUTS = [
    torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)) * scale + shift
    for seed, (rows, scale, shift) in enumerate(_DRAWN)
]


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        (AsT5, ["product SiLU"]),
        (Tree, ["call gelu", "call elu", "call mish"]),
        (Straddling, []),
        (StraddlingFormula, []),
    ],
)
def test_every_way_has_the_numbers_of_the_stock_model(kind: Any, fused: list[str]) -> None:
    for x in INPUTS:
        torch.manual_seed(1)
        assert set(fused) <= set(outline(compared(kind(), x, tolerance=1e-4)))
    torch.manual_seed(1)
    compared(kind(), INPUTS[0], INPUTS[0], tolerance=1e-4)


def test_all_ways_are_taken() -> None:
    """So that the comparison above says something."""
    torch.manual_seed(1)
    model = Tree()
    graph_of = {}
    for x in INPUTS:
        y = T.gelu(model.gate(x))
        z = y * torch.sigmoid(y)
        answers = bool(y.sum() > 0), bool(z.mean() > 0.05), x.shape[0] > 2
        graph_of[answers if answers[0] else (False,)] = x
    assert (False,) in graph_of
    assert {key[1:] for key in graph_of if key[0]} >= {(True, True), (True, False)}


def test_the_product_of_t5() -> None:
    model = AsT5()
    report = fusedtrain.convert(model, INPUTS[0])
    assert [(p.name, p.activation) for p in report.products] == [("", "SiLU")]
    assert report.left_products == []
    # Values that only the other way needs are freed at once.
    assert re.search(r"else:\n +value_\d+ = value_\d+ = None\n", rewritten_of(model).source)
    model.down.bfloat16()  # the way that casts
    assert model(INPUTS[0]).dtype is torch.bfloat16


def test_a_product_across_a_decision_is_in_the_report() -> None:
    report = fusedtrain.convert(Straddling())
    assert report.products == []
    assert [left.type for left in report.left_products] == ["SiLU"]
    assert "its gate" in str(report) or "depends on its input" in str(report)


def test_torch_compile_and_fx_see_it() -> None:
    model = AsT5()
    want = model(INPUTS[0])
    fusedtrain.convert(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(INPUTS[0]), want)
    torch.testing.assert_close(torch.export.export(model, (INPUTS[0],)).module()(INPUTS[0]), want)


class Asserting(Base):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == 8, "eight"
        return T.gelu(self.gate(x))


class Storing(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.last = x.detach()
        return T.gelu(self.gate(x))


class ByMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0 and self.training:
            return T.gelu(self.gate(x))
        return T.silu(self.gate(x))


@pytest.mark.parametrize("kind", [Asserting, Storing, ByMode, Loop])
def test_forwards_that_do_more_stay(kind: Any) -> None:
    for x in INPUTS:
        report = compared(kind(), x, tolerance=1e-4)
        assert report.calls == []
        assert report.left_calls
    model = Asserting()
    fusedtrain.convert(model)
    with pytest.raises((AssertionError, RuntimeError)):
        model(torch.ones(2, 7))


# --- the modes in which a forward is traced


CHOICES: dict[str, Callable[[Any], bool]] = {
    "alike in training with gradients and in evaluation without": (
        lambda self: self.training == torch.is_grad_enabled()
    ),
    "own": lambda self: self.training,
    "child's": lambda self: self.child.training,
    "by name": lambda self: getattr(self.child, "train" + "ing"),
    "from the dictionary": lambda self: self.__dict__["training"],
    "gradients": lambda self: torch.is_grad_enabled(),
}


def choosing(choice: Callable[[Any], bool]) -> Any:
    forward = lambda self, x: T.gelu(x) if choice(self) else T.silu(x)  # noqa: E731
    return model_of(forward, child=nn.Dropout(0.0))


def calling_forward() -> Any:
    return model_of(lambda self, x: self.child.forward(x) + 1, child=choosing(CHOICES["own"]))


@pytest.mark.parametrize("name", [*CHOICES, "of a child's forward"])
def test_a_forward_that_asks_for_its_mode_is_traced_in_all(name: str) -> None:
    model, x = choosing(CHOICES[name]) if name in CHOICES else calling_forward(), torch.randn(5)
    traced = trace(model)
    assert not isinstance(traced, str)
    assert traced.inexact
    stock = copy.deepcopy(model)
    fusedtrain.convert(model)
    for training in (True, False):
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                want, got = (m.train(training)(x) for m in (stock, model))
            torch.testing.assert_close(got, want)
    assert "training" not in vars(nn.Module)


def test_a_forward_that_does_not_is_traced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedtrain._graph import flow

    modes, once = [], flow.trace_once

    def counted(module: nn.Module, choices: Any, mode: Any, *rest: Any) -> Any:
        modes.append(mode)
        return once(module, choices, mode, *rest)

    monkeypatch.setattr(flow, "trace_once", counted)
    assert not isinstance(trace(AsT5()), str)
    assert {mode[2] for mode in modes} == {True, False}
    assert len(set(modes)) == 2
    modes.clear()
    trace(choosing(CHOICES["own"]))
    assert len(set(modes)) == 4
