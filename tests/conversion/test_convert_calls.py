"""Calls of activations in forwards, own classes of activations, and what is around both."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
from fusedtrain import nn as fused_nn
from fusedtrain.conversion._report import HELP
from helpers.conversion import assert_same, compared, image, outline, reasons, results
from helpers.models import model_of


def swish(x: Tensor) -> Tensor:
    return x * x.sigmoid()


class OwnSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return swish(x)


class OwnMish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(T.softplus(x))


class OwnGELU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = T.gelu

    def forward(self, input: Tensor) -> Tensor:
        return self.act(input)


class Beta(nn.Module):
    """With a number that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.702

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class Public(OwnSwish):
    def derivative(self, x: Tensor) -> Tensor:
        return x


class Called(OwnSwish):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 1


class Mlp(nn.Module):
    """Two layers, and what `after` makes of the first one's output."""

    after: Callable[[nn.Module, Tensor], Tensor] = lambda self, x: T.gelu(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.after(self.first(x)))
        return output


def mlp(after: Callable[[nn.Module, Tensor], Tensor]) -> Mlp:
    torch.manual_seed(0)
    return type("Mlp", (Mlp,), {"after": after})()


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 8)


CALLS: dict[str, tuple[str, Callable[[nn.Module, Tensor], Tensor]]] = {
    "F.gelu": ("gelu", lambda m, x: T.gelu(x)),
    "F.gelu tanh": ("gelu", lambda m, x: T.gelu(x, approximate="tanh")),
    "F.silu": ("silu", lambda m, x: T.silu(x)),
    "F.mish": ("mish", lambda m, x: T.mish(x)),
    "F.elu": ("elu", lambda m, x: T.elu(x, 0.5)),
    "F.leaky_relu": ("leaky_relu", lambda m, x: T.leaky_relu(x, negative_slope=0.2)),
    "F.hardswish": ("hardswish", lambda m, x: T.hardswish(x)),
    "F.elu in place": ("elu", lambda m, x: T.elu(x, inplace=True)),
    "F.relu6": ("relu6", lambda m, x: T.relu6(x)),
    "torch.selu": ("selu", lambda m, x: torch.selu(x)),
    "torch.selu_": ("selu", lambda m, x: torch.selu_(x)),
    "x.sigmoid()": ("sigmoid", lambda m, x: x.sigmoid()),
    "F.tanh": ("tanh", lambda m, x: T.tanh(x)),
    "swish by a function": ("silu", lambda m, x: swish(x)),
    "swish": ("silu", lambda m, x: x * torch.sigmoid(x)),
    "mish": ("mish", lambda m, x: x * T.softplus(x).tanh()),
    "hardswish": ("hardswish", lambda m, x: T.relu6(x + 3) / 6 * x),
    "gelu": ("gelu", lambda m, x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_in_a_forward(name: str) -> None:
    activation, after = CALLS[name]
    report = compared(mlp(after), tokens(), tokens())
    assert outline(report) == [f"call {activation}"]
    assert "converted 1 call in forwards" in str(report)
    assert reasons(report) == []


class Calling(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv2d(3, 4, 1), nn.Parameter(torch.rand(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.conv(x))


# Functions of images, and those of other arguments than numbers.
IMAGE_CALLS: dict[str, list[Callable[[Any, Tensor], Tensor]]] = {
    "glu": [lambda m, x: T.glu(x), lambda m, x: T.glu(x, dim=1)],
    "prelu": [
        lambda m, x: T.prelu(x, m.weight), lambda m, x: x.prelu(m.weight),
        lambda m, x: torch.prelu(x, T.hardtanh(m.weight, 0.0, 1.0)[:1]),
    ],
    "max_pool2d": [
        lambda m, x: T.max_pool2d(x, 2), lambda m, x: torch.max_pool2d(x, (2, 3), ceil_mode=True),
        lambda m, x: T.max_pool2d(x, kernel_size=3, stride=2, padding=1),
    ],
    "mean": [
        lambda m, x: x * x.mean((2, 3), keepdim=True),
        lambda m, x: x - torch.mean(x, dim=[-1, -2], keepdim=True),
    ],
    "adaptive_avg_pool2d": [
        lambda m, x: x * T.adaptive_avg_pool2d(x, 1),
        lambda m, x: x + T.adaptive_avg_pool2d(x, output_size=(1, 1)),
    ],
    "hardtanh": [lambda m, x: T.hardtanh(x, 0, 6)],
    "logsigmoid": [lambda m, x: T.logsigmoid(x)],
    "softsign": [lambda m, x: T.softsign(x)],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "number"),
    [(name, i) for name, forms in IMAGE_CALLS.items() for i in range(len(forms))],
)
def test_calls_of_images(name: str, number: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Calling(IMAGE_CALLS[name][number]).to(dtype), torch.randn(2, 3, 8, 8).to(dtype)
    x[0, :, 0, 0], x[0, :, 1, 1] = 0.0, -0.0
    report = compared(model, x, x, 8 * torch.finfo(dtype).eps)
    assert name in [call.activation for call in report.calls]
    assert not report.left_calls
    proof = report.proof
    assert proof is not None
    assert (proof.saved_after < proof.saved_before) or name != "max_pool2d"
    assert proof.saved_after <= proof.saved_before


@pytest.mark.parametrize("name", ["glu", "prelu", "max_pool2d"])
def test_special_values(name: str) -> None:
    x = torch.randn(2, 4, 8, 8)
    x[0, 0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    model = Calling(IMAGE_CALLS[name][0])
    model.conv = nn.Identity()
    stock = copy.deepcopy(model)
    assert len(fusedtrain.convert(model).calls) == 1
    torch.testing.assert_close(model(x), stock(x), equal_nan=True)


@pytest.mark.parametrize("function", [
    lambda m, x: T.max_pool2d(x, 2, return_indices=True)[0], lambda m, x: T.rrelu(x),
    lambda m, x: T.max_pool2d(x, x.shape[-1]), lambda m, x: T.dropout(x, 0.5),
    lambda m, x: x * x.mean(), lambda m, x: x - x.mean(1, True), lambda m, x: x.mean((2, 3)),
    lambda m, x: x * x.mean((1, 2), keepdim=True),
    lambda m, x: x * x.mean((2, 3), True, dtype=torch.float32),
    lambda m, x: T.adaptive_avg_pool2d(x, 1),
])  # fmt: skip
def test_calls_that_stay(function: Any) -> None:
    assert compared(Calling(function).eval(), torch.randn(2, 3, 8, 8), tolerance=0.0).calls == []


# Own classes, and what becomes of them: another class, a call in their forward, or nothing.
OWN: dict[type[nn.Module], list[str]] = {
    OwnSwish: ["1: module SiLU"], OwnGELU: ["1: module GELU"],
    OwnMish: ["1: call mish"],  # which is float32 under autocast
    Beta: ["1: call quick_gelu"], Public: ["1: call silu"],
    Called: ["1: call silu"],
}  # fmt: skip


@pytest.mark.parametrize("act", OWN)
def test_own_classes(act: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), act(), nn.Linear(8, 8))
    assert outline(compared(model, tokens(), tokens())) == OWN[act]
    fusedtrain.convert(model)
    expected = {OwnSwish: fused_nn.SiLU, OwnGELU: fused_nn.GELU}.get(act, act)
    assert type(model[1]) is expected


def test_a_number_is_watched() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Beta())
    fusedtrain.convert(model)
    model[1].beta = 2.0
    with pytest.warns(UserWarning, match=r"`beta` of a Beta.*revert"):
        got = model(tokens())
    fusedtrain.revert(model)
    assert torch.equal(got, model(tokens()))


def test_hooks_of_an_own_class_fire() -> None:
    model, calls = nn.Sequential(nn.Linear(8, 8), OwnSwish()), []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    fusedtrain.convert(model)
    model(tokens())
    assert calls == [1]


class Net(nn.Module):
    """A norm, an activation by a function, and a way for training alone."""

    def __init__(self, act: Any, moody: bool = False) -> None:
        super().__init__()
        self.conv, self.bn, self.act, self.moody = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), act, moody

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(x)))
        if self.moody and self.training:
            y = y * 0.5
        return T.gelu(y)


@pytest.mark.parametrize("moody", [False, True])
@pytest.mark.parametrize(
    ("act", "part"), [(swish, "SiLU"), (OwnSwish(), "SiLU"), (T.relu, "ReLU"),
                      (lambda x: T.relu6(x + 3) / 6 * x, "Hardswish"), (T.hardswish, "Hardswish")],
)  # fmt: skip
def test_norms_take_calls_and_formulas(act: Any, part: str, moody: bool) -> None:
    torch.manual_seed(0)
    report = compared(Net(act, moody), image(), image(), modes=(True, False, True))
    assert outline(report)[:2] == [f"bn: norm {part}", "call gelu"]


def test_a_norm_before_mish_by_softplus_stays() -> None:
    report = fusedtrain.convert(Net(lambda x: x * T.softplus(x).tanh()), image())
    assert outline(report) == ["call mish", "call gelu"]
    assert "under autocast" in report.left[0].reason


class Both(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = swish(self.last(T.gelu(self.first(x))))
        return output


class Product(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(T.silu(self.first(x)) * self.first(x))
        return output


@pytest.mark.parametrize("kind", [Both, Product])
def test_compile_export_and_script(kind: type[Mlp]) -> None:
    model, x = kind(), tokens()
    want = model(x)
    assert len(outline(fusedtrain.convert(model))) == (2 if kind is Both else 1)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), want)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), want)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), want)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), want)
    torch.testing.assert_close(torch.jit.script(model)(x), want)


OVERWRITING: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "the input between": lambda m, x: torch.sigmoid(x) * x.mul_(2),
    "the input later": lambda m, x: (x * torch.sigmoid(x), x.mul_(2))[0],
    "the output": lambda m, x: T.relu6(x).add_(1),
    "in place": lambda m, x: x.mul_(torch.sigmoid(x)),
}


@pytest.mark.parametrize("name", OVERWRITING)
def test_memory_that_is_overwritten(name: str) -> None:
    model, x = mlp(OVERWRITING[name]), tokens()
    stock = copy.deepcopy(model)
    report = fusedtrain.convert(model)
    assert not any(call.activation in ("silu", "relu6") for call in report.calls)
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x))
    if name == "the output":  # torch keeps the input of ReLU6, and the model can be trained
        assert "overwritten" in report.left_calls[0].reason
    if name == "the input between":  # the product cannot take its gate, which is fused on its own
        assert "overwritten in between" in report.left_products[0].reason
        assert (outline(report), report.left_calls) == (["call sigmoid"], [])
    if name in ("the output", "the input between"):
        assert_same(results(model, x), results(stock, x), 1e-5)


def test_left_calls_have_reasons() -> None:
    class Branching(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            assert x.sum() > 0
            return T.gelu(x) if x.sum() > 1 else T.silu(x)

    class Untraced(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return T.mish(x) * float(len(x))

    model = nn.ModuleDict(
        {
            "a": Branching(),
            "b": Untraced(),
            "c": mlp(Mlp.after),
            "d": mlp(lambda m, x: T.elu(x, m.a)),
        }
    )
    model["d"].a = nn.Parameter(torch.ones(()))
    report = fusedtrain.convert(model, exclude=["c"])
    left = {(left.name, left.type): left.reason for left in report.left_calls}
    assert "depends on its input" in left["a", "gelu"]
    assert "depends on its input" in left["a", "silu"]
    assert "torch.fx cannot trace its forward" in left["b", "mish"]
    assert left["c", "gelu"] == "excluded"
    assert left["d", "elu"] == "its arguments are not numbers"
    assert "left 5 calls in forwards" in str(report)
    assert len(report) == 0


def test_the_page_and_the_report_help_alike() -> None:
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    for words in ("slope at 0", "used elsewhere", "works in place"):
        assert f"{HELP[words]} |" in page, words
    for words in ("writes over its output", "torch.autograd.Function"):
        assert f"| {HELP[words]}" in page, words


class Printing(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        print("forward")
        return T.gelu(x)


def test_a_forward_that_prints_goes_on_printing(capsys: pytest.CaptureFixture[str]) -> None:
    model = Printing()
    assert reasons(fusedtrain.convert(model)) == ["its forward prints"]
    capsys.readouterr()
    model(tokens())
    assert capsys.readouterr().out == "forward\n"


def test_an_unknown_formula_is_listed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), model_of(lambda self, x: x * torch.erf(x)))
    assert reasons(fusedtrain.convert(model)) == ["1: no fused version of its formula"]


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_transformer_layers(kind: Any) -> None:
    torch.manual_seed(0)
    layer = kind(8, 2, 16, 0.0, "gelu", batch_first=True)
    x = (torch.randn(2, 3, 8),) * (2 if kind is nn.TransformerDecoderLayer else 1)
    stock = copy.deepcopy(layer)
    report = fusedtrain.convert(layer, x)
    names = [entry.target.rpartition(".")[2] for entry in report.converted]
    attention = ["scaled_dot_product_attention"] * len(x)
    assert names == ["gelu", *attention]
    assert fusedtrain.convert(layer).already == len(names)
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(twin(*x), stock(*x))
    assert fusedtrain.revert(layer) == len(names)
    assert layer.activation is stock.activation
