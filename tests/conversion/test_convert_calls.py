"""Calls of activations in forwards, own classes of activations, and what is around both."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
from fusedtrain import nn as fused_nn
from fusedtrain._graph.modules import has_own_forward
from helpers.conversion import assert_same, image, results
from helpers.models import Parts, model_of


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


class Gated(nn.Module):
    """The feed-forward part of Llama, Mistral and Gemma."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj, self.act_fn = nn.Linear(12, 8), act

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return output


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 8)


def check(model: nn.Module, x: Tensor) -> Any:
    """The report of a conversion; both models agree, and revert leaves nothing."""
    stock, classes = copy.deepcopy(model), [type(m) for m in model.modules()]
    keys = list(model.state_dict())
    report = fusedtrain.convert(model, x)
    assert list(model.state_dict()) == keys
    for twin in (model, copy.deepcopy(model)):
        assert_same(results(twin, x), results(stock, x), 1e-5)
    again = fusedtrain.convert(model)
    assert (len(again), again.calls, again.left_calls) == (0, [], [])
    return report, classes


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
    model = mlp(after)
    report, classes = check(model, tokens())
    assert [(call.name, call.activation) for call in report.calls] == [("", activation)]
    assert "converted 1 call in forwards" in str(report)
    assert report.left_calls == []
    assert fusedtrain.revert(model) == 1
    assert [type(m) for m in model.modules()] == classes
    assert not has_own_forward(model)


@pytest.mark.parametrize("act", [OwnSwish, OwnGELU])
def test_own_classes_get_the_fused_one(act: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), act(), nn.Linear(8, 8))
    report, classes = check(model, tokens())
    fused = {OwnSwish: fused_nn.SiLU, OwnGELU: fused_nn.GELU}[act]
    assert type(model[1]) is fused
    assert [entry.name for entry in report.converted] == ["1"]
    assert fusedtrain.revert(model) == 1
    assert [type(m) for m in model.modules()] == classes
    assert set(vars(model[1])) == set(vars(act()))


def test_own_mish_keeps_its_class_for_its_float32_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(8, 8), OwnMish())
    report, _ = check(model, tokens())
    assert type(model[1]) is OwnMish
    assert [call.name for call in report.calls] == ["1"]


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
        return super().__call__(x) + 1  # type: ignore[no-any-return]


def test_a_number_is_watched() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Beta())
    check(model, tokens())
    assert type(model[1]) is Beta
    model[1].beta = 2.0
    with pytest.warns(UserWarning, match=r"`beta` of a Beta.*revert"):
        got = model(tokens())
    fusedtrain.revert(model)
    assert torch.equal(got, model(tokens()))


@pytest.mark.parametrize("act", [Public, Called])
def test_classes_with_more_than_a_forward_stay(act: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), act())
    x = tokens()
    want = model(x)
    fusedtrain.convert(model)
    assert type(model[1]) is act
    torch.testing.assert_close(model(x), want)


def test_hooks_of_an_own_class_fire() -> None:
    model, calls = nn.Sequential(nn.Linear(8, 8), OwnSwish()), []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    fusedtrain.convert(model)
    model(tokens())
    assert calls == [1]


GATES: dict[str, Any] = {
    "silu": nn.SiLU, "own": OwnSwish, "gelu tanh": lambda: nn.GELU("tanh"),
    "function": lambda: T.silu, "own function": lambda: swish,
}  # fmt: skip


@pytest.mark.parametrize("name", GATES)
def test_gated_mlps(name: str) -> None:
    model = Gated(GATES[name]())
    report, classes = check(model, tokens())
    assert len(report.products) == 1
    assert report.calls == []
    assert report.proof.saved_after < report.proof.saved_before
    assert fusedtrain.revert(model) > 0
    assert [type(m) for m in model.modules()] == classes


class Whole(Parts):
    """A model that torch.fx cannot trace, and that might call any part of it."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = getattr(self, "mlp")(x) * float(len(x))  # noqa: B009
        return output


def test_a_gate_that_others_may_call_goes_on_working() -> None:
    model, x = Whole(mlp=Gated(nn.SiLU())), tokens()
    report, _ = check(model, x)
    assert len(report.products) == 1
    torch.testing.assert_close(model.mlp.act_fn(x), T.silu(x))
    for twin in (model, pickle.loads(pickle.dumps(model))):
        calls: list[int] = []
        before = twin(x)
        twin.mlp.act_fn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.testing.assert_close(twin(x), before)
        assert calls == [1]
    compiled = torch.compile(model.mlp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model.mlp(x))


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
    model = Net(act, moody)
    stock, x = copy.deepcopy(model), image()
    report = fusedtrain.convert(model, x)
    assert [norm.parts for norm in report.norms] == [(part,)]
    assert [call.activation for call in report.calls] == ["gelu"]
    for training in (True, False, True):
        assert_same(results(model.train(training), x), results(stock.train(training), x), 1e-5)
    assert fusedtrain.revert(model) > 0
    assert_same(results(model, x), results(stock, x), 1e-5)


def test_a_norm_before_mish_by_softplus_stays() -> None:
    model = Net(lambda x: x * T.softplus(x).tanh())
    report = fusedtrain.convert(model, image())
    assert report.norms == []
    assert "under autocast" in report.left[0].reason
    assert [call.activation for call in report.calls] == ["mish", "gelu"]


def test_compile_export_and_script() -> None:
    class Both(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = swish(self.last(T.gelu(self.first(x))))
            return output

    model, x = Both(), tokens()
    want = model(x)
    report = fusedtrain.convert(model)
    assert len(report.calls) == 2
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), want)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), want)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), want)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), want)


def test_copies_of_a_forward_with_two_ways() -> None:
    model = nn.Sequential(Net(swish, True))
    x = image()
    stock = copy.deepcopy(model)
    fusedtrain.convert(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for training in (True, False):
            want = results(copy.deepcopy(stock).train(training), x)
            assert_same(results(copy.deepcopy(twin).train(training), x), want, 1e-5)


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
        assert_same(results(model, x), results(stock, x), 1e-5)


def test_a_gate_that_its_product_cannot_take_is_fused_on_its_own() -> None:
    model, x = mlp(OVERWRITING["the input between"]), tokens()
    stock = copy.deepcopy(model)
    report = fusedtrain.convert(model)
    assert "overwritten in between" in report.left_products[0].reason
    assert [call.activation for call in report.calls] == ["sigmoid"]
    assert not report.left_calls
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
    reasons = {(left.name, left.type): left.reason for left in report.left_calls}
    assert "depends on its input" in reasons["a", "gelu"]
    assert "depends on its input" in reasons["a", "silu"]
    assert "torch.fx cannot trace its forward" in reasons["b", "mish"]
    assert reasons["c", "gelu"] == "excluded"
    assert reasons["d", "elu"] == "its arguments are not numbers"
    assert "left 5 calls in forwards" in str(report)
    assert len(report) == 0


class Printing(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        print("forward")
        return T.gelu(x)


def test_a_forward_that_prints_goes_on_printing(capsys: pytest.CaptureFixture[str]) -> None:
    model = Printing()
    report = fusedtrain.convert(model)
    assert [left.reason for left in report.left_calls] == ["its forward prints"]
    capsys.readouterr()
    model(tokens())
    assert capsys.readouterr().out == "forward\n"


def test_an_unknown_formula_is_listed() -> None:
    report = fusedtrain.convert(
        nn.Sequential(nn.Linear(2, 2), model_of(lambda self, x: x * torch.erf(x)))
    )
    assert [(left.name, left.reason) for left in report.left] == [
        ("1", "no fused version of its formula")
    ]


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_transformer_layers(kind: Any) -> None:
    torch.manual_seed(0)
    layer = kind(8, 2, 16, 0.0, "gelu", batch_first=True)
    x = (torch.randn(2, 3, 8),) * (2 if kind is nn.TransformerDecoderLayer else 1)
    stock = copy.deepcopy(layer)
    report = fusedtrain.convert(layer, x)
    assert [entry.target for entry in report.converted] == ["fusedtrain.functional.gelu"]
    assert fusedtrain.convert(layer).already == 1
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(twin(*x), stock(*x))
    assert fusedtrain.revert(layer) == 1
    assert layer.activation is stock.activation
