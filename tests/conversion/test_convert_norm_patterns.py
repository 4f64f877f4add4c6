"""The calls after a batch norm that convert makes part of the norm: activations, sums, drops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from fusedtrain import nn as fused_nn
from helpers.conversion import (
    Block,
    Calls,
    assert_same,
    compared,
    image,
    kinds,
    left_of,
    results,
)
from helpers.models import timm, torchvision

pytestmark = pytest.mark.usefixtures("one_thread")
FUNCTIONS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "F.relu": lambda _, y: F.relu(y),
    "F.relu, in place": lambda _, y: F.relu(y, inplace=True),
    "F.relu_": lambda _, y: F.relu_(y),
    "torch.relu": lambda _, y: torch.relu(y),
    "relu": lambda _, y: y.relu(),
    "relu_": lambda _, y: y.relu_(),
    "F.silu": lambda _, y: F.silu(y),
    "F.leaky_relu": lambda _, y: F.leaky_relu(y, 0.3),
    "F.leaky_relu, named": lambda _, y: F.leaky_relu(y, negative_slope=0.3, inplace=True),
    "F.gelu": lambda _, y: F.gelu(y, approximate="tanh"),
    "F.hardtanh": lambda _, y: F.hardtanh(y, -0.4, 0.3),
    "F.softplus": lambda _, y: F.softplus(y, 2.0),
    "torch.sigmoid": lambda _, y: torch.sigmoid(y),
    "tanh": lambda _, y: y.tanh(),
    "F.elu": lambda _, y: F.elu(y, 0.5),
    "torch.celu": lambda _, y: torch.celu(y, 0.5),
    "module": lambda m, y: m.act(y),
    "identity, module": lambda m, y: m.act(m.identity(y)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_call(name: str) -> None:
    torch.manual_seed(0)
    model = Calls(FUNCTIONS[name], act=nn.Mish(), identity=nn.Identity()).double()
    x = image(dtype=torch.float64)
    # torch's float64 backward of CELU has 1 / alpha in float32
    report = compared(model, x, x, 1e-6 if "celu" in name else 1e-12)
    assert len(report.norms) == 1
    fusedtrain.convert(model)
    assert type(model.bn) is nn.BatchNorm2d
    assert nodes_of(model(x)).count("BatchNormActBackward") == 1


def nodes_of(output: Tensor) -> list[str]:
    """Names of the nodes of an output's graph."""
    nodes = [output.grad_fn]
    for node in nodes:
        nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes]
    return [type(node).__name__ for node in nodes]


class Sum(nn.Module):
    def __init__(self, total: Callable[[Tensor, Tensor], Tensor], act: nn.Module | None) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.act, self.total = act or nn.Identity(), total

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.act(self.total(self.bn(self.conv(x)), x))
        return output


def _augmented(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


TOTALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": lambda a, b: a + b,
    "+, swapped": lambda a, b: b + a,
    "+=": _augmented,
    "torch.add": torch.add,
    "torch.add, alpha=1": lambda a, b: torch.add(a, b, alpha=1),
    "add": lambda a, b: a.add(b),
    "add_": lambda a, b: a.add_(b),
}


@pytest.mark.parametrize("act", [None, nn.ReLU(True), nn.SiLU(), nn.Softplus()], ids=str)
@pytest.mark.parametrize("name", TOTALS)
def test_sum(name: str, act: nn.Module | None) -> None:
    torch.manual_seed(0)
    model, x = Sum(TOTALS[name], copy.deepcopy(act)).double(), image(dtype=torch.float64)
    assert [norm.parts[0] for norm in compared(model, x, x, 1e-12).norms] == ["add"]


@pytest.mark.parametrize(
    "total",
    [
        lambda a, b: torch.add(a, b, alpha=2),
        lambda a, b: a + 1,
        lambda a, b: a + a,
        lambda a, b: a - b,
        lambda a, b: a + torch.ones(3, 1, 1),
    ],
    ids=["alpha", "number", "itself", "difference", "constant"],
)
def test_no_sum_of_that_kind(total: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert not compared(Sum(total, nn.ReLU()), image(), image(), 1e-6).norms


def test_sum_over_the_other_operand_is_left() -> None:
    model = Sum(lambda a, b: _augmented(b * 2, a), nn.ReLU())
    report = fusedtrain.convert(model)
    assert not report.norms
    assert left_of(report)[0].reason == "the sum is written over its other operand"


def test_broadcast_and_promoted_residuals() -> None:
    class Gate(Sum):
        def forward(self, x: Tensor) -> Tensor:
            z = self.bn(self.conv(x)) + x.mean((2, 3), keepdim=True)
            output: Tensor = self.act(z)
            return output

    assert len(compared(Gate(torch.add, nn.ReLU()), image(), image()).norms) == 1

    for name, dtype in {"+": torch.float32, "+=": torch.bfloat16}.items():
        model = Sum(TOTALS[name], nn.ReLU())
        model.conv.bfloat16()
        forward = model.conv.forward
        model.conv.forward = lambda x, forward=forward: forward(x.bfloat16())
        stock = copy.deepcopy(model)
        fusedtrain.convert(model)
        assert model(image()).dtype == stock(image()).dtype == dtype


@pytest.mark.parametrize("library", ["timm", "torchvision", "fusedtrain"])
def test_drop_follows_its_module(library: str) -> None:
    drop: Any
    if library == "timm":
        drop = timm().layers.DropPath(0.5)
    elif library == "torchvision":
        drop = torchvision().ops.StochasticDepth(0.5, "row")
    else:
        drop = fused_nn.DropPath(0.5)
    torch.manual_seed(0)
    model = Block(nn.SiLU(), drop).double()
    stock, x = copy.deepcopy(model), image(channels=4, dtype=torch.float64)
    report = fusedtrain.convert(model, x)
    assert [norm.parts for norm in report.norms] == [
        ("SiLU",), (type(drop).__name__, "add", "SiLU")
    ]  # fmt: skip
    assert_same(results(model, x), results(stock, x), 1e-12)
    for each in (model, stock):
        each.eval()
    assert_same(results(model, x), results(stock, x), 1e-12)
    for each in (model, stock):
        each.train()
        setattr(each.drop, "p" if library == "torchvision" else "drop_prob", 0.9)
    assert_same(results(model, x), results(stock, x), 1e-12)


def test_batch_mode_of_stochastic_depth_is_left() -> None:
    drop = torchvision().ops.StochasticDepth(0.5, "batch")
    report = fusedtrain.convert(Block(drop=drop), image(channels=4))
    assert kinds(report) == {"ReLU": 1}
    assert [entry.reason for entry in report.left] == [
        "StochasticDepth has no kernel inside of batch norm",
        "the sum is written over its other operand",
    ]


def test_other_ranks() -> None:
    for norm, x in [(nn.BatchNorm1d(4), (6, 4)), (nn.BatchNorm1d(4), (3, 4, 5)),
                    (nn.BatchNorm3d(4), (2, 4, 3, 3, 3))]:  # fmt: skip
        data = torch.randn(x, dtype=torch.float64)
        report = compared(nn.Sequential(norm, nn.Tanh()).double(), data, data, 1e-12)
        assert report.norms[0].target == "fusedtrain.functional.batch_norm_act"


def test_norm_options_stay() -> None:
    norm = nn.BatchNorm2d(4, eps=0.1, momentum=None, affine=False, track_running_stats=False)
    model, text = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU()), repr(norm)
    assert compared(model, image(), image()).norms
    fusedtrain.convert(model)
    assert repr(norm) == text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_half_precision(dtype: torch.dtype, layout: torch.memory_format) -> None:
    model = nn.Sequential(Block(), Block()).to(dtype)
    x = image(channels=4, dtype=dtype).to(memory_format=layout)
    report = fusedtrain.convert(model, x)
    assert len(report.norms) == 4
    assert not report.left


def test_autocast() -> None:
    model = nn.Sequential(Block(), Block())
    stock, x = copy.deepcopy(model), image(channels=4)
    with torch.autocast("cpu", torch.bfloat16):
        report = fusedtrain.convert(model, x)
        assert_same({"": model(x)}, {"": stock(x)}, 5e-2)
    assert len(report.norms) == 4
