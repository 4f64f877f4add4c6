"""Activations on their own that gain neither time nor memory stay torch's, with a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from fusedtrain.conversion._rules import GAINS_NOTHING
from helpers.conversion import Calls, compared, image, outline, reasons

STAY = {
    "ReLU": nn.ReLU(),
    "ReLU in place": nn.ReLU(inplace=True),
    "LeakyReLU in place": nn.LeakyReLU(0.1, inplace=True),
    "transformer layer": nn.TransformerEncoderLayer(8, 2, 16),
}
GAIN = {"ReLU6": nn.ReLU6(), "Hardtanh": nn.Hardtanh(), "LeakyReLU": nn.LeakyReLU(),
        "ReLU6 in place": nn.ReLU6(inplace=True), "Hardtanh in place": nn.Hardtanh(inplace=True),
        "SiLU in place": nn.SiLU(inplace=True)}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_what_gains_nothing_stays(name: str) -> None:
    model = nn.Sequential(copy.deepcopy(STAY[name]), nn.SiLU())
    kind, state = type(model[0]), dict(vars(model[0]))
    report = fusedtrain.convert(model)
    assert type(model[0]) is kind
    assert vars(model[0]) == state
    assert (reasons(report), outline(report)) == ([f"0: {GAINS_NOTHING}"], ["1: module SiLU"])
    assert GAINS_NOTHING in str(report)
    recomputed = fusedtrain.convert(model, memory="recompute")
    assert recomputed.left == []
    norms = ["0.norm1", "0.norm2"] if name == "transformer layer" else []
    assert [entry.name for entry in recomputed.converted] == ["0", *norms]
    assert fusedtrain.revert(model) == 3 + len(norms)
    assert type(model[0]) is kind


@pytest.mark.parametrize("name", GAIN)
def test_what_saves_less_or_is_faster_is_converted(name: str) -> None:
    """As `gains` says it: torch keeps the input or a clone, and the next layer the output."""
    layers = (nn.Conv2d(3, 4, 1), copy.deepcopy(GAIN[name]), nn.Conv2d(4, 2, 1))
    report = fusedtrain.convert(nn.Sequential(*layers), image())
    assert outline(report) == [f"1: module {name.split()[0]}"]
    if name != "SiLU in place":
        assert report.proof is not None
        assert report.proof.saved_before - report.proof.saved_after == 2 * 4 * 8 * 8 * 4


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "F.relu": lambda self, x: T.relu(x * 2),
    "in place": lambda self, x: T.relu(x * 2, inplace=True),
    "x.relu_()": lambda self, x: (x * 2).relu_(),
    "F.leaky_relu in place": lambda self, x: T.leaky_relu(x * 2, 0.1, inplace=True),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_calls_that_gain_nothing_stay(name: str) -> None:
    model = type("Model", (nn.Module,), {"forward": FORWARDS[name]})()
    report = fusedtrain.convert(model)
    assert (outline(report), reasons(report)) == ([], [GAINS_NOTHING])
    assert not has_own_forward(model)
    again = fusedtrain.convert(model, memory="recompute")
    assert (len(again.calls), again.left_calls) == (1, [])


def test_parts_of_norms_and_products_are_converted() -> None:
    model = nn.Sequential(
        Calls(lambda m, x: T.relu(x)), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        fusedtrain.nn.BatchNormAct2d(4, act_layer=nn.ReLU),
    )  # fmt: skip
    report = compared(model, image(), image())
    assert [norm.name for norm in report.norms] == ["0.bn", "2"]
    assert reasons(report) == []
    report = fusedtrain.convert(Calls(lambda m, x: T.relu(x * 1) * x))
    assert [product.activation for product in report.products] == ["relu"]
    assert report.left_calls == []


def test_a_formula_that_is_relu_has_more_kernels_than_one() -> None:
    report = fusedtrain.convert(Calls(lambda m, x: torch.clamp_min(x * 2, 0) ** 2))
    assert all(left.reason != GAINS_NOTHING for left in report.left_calls)
