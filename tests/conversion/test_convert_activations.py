"""convert of one activation at a time: the same numbers, and the class that it had is kept."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain import nn as fused_nn
from fusedtrain._graph.modules import has_own_forward
from helpers.conversion import output_and_gradients, timm_class
from helpers.models import timm

# Arguments other than the defaults, so that a lost one shows.
TORCH_ARGUMENTS: dict[str, dict[str, Any]] = {
    "CELU": {"alpha": 0.7},
    "ELU": {"alpha": 0.7},
    "GELU": {"approximate": "tanh"},
    "GLU": {"dim": 0},
    "Hardshrink": {"lambd": 0.2},
    "Hardsigmoid": {},
    "Hardswish": {},
    "Hardtanh": {"min_val": -0.3, "max_val": 0.4},
    "LeakyReLU": {"negative_slope": 0.3},
    "LogSigmoid": {},
    "MaxPool2d": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    "Mish": {},
    "PReLU": {"num_parameters": 5, "init": 0.1},
    "RMSNorm": {"normalized_shape": 5, "eps": 0.1},
    "ReLU": {},
    "ReLU6": {},
    "SELU": {},
    "Sigmoid": {},
    "SiLU": {},
    "Softplus": {"beta": 2.0, "threshold": 3.0},
    "Softshrink": {"lambd": 0.2},
    "Softsign": {},
    "Tanh": {},
    "Tanhshrink": {},
    "Threshold": {"threshold": 0.1, "value": -2.0},
}

TIMM_TARGETS = {
    "activations.Swish": "SiLU",
    "activations.Mish": "Mish",
    "activations.Sigmoid": "Sigmoid",
    "activations.Tanh": "Tanh",
    "activations.HardSwish": "Hardswish",
    "activations.HardSigmoid": "Hardsigmoid",
    "activations.HardMish": "HardMish",
    "activations.PReLU": "PReLU",
    "activations.GELU": "GELU",
    "activations.GELUTanh": "GELU",
    "activations.QuickGELU": "QuickGELU",
    "activations_me.SwishMe": "SiLU",
    "activations_me.MishMe": "Mish",
    "activations_me.HardSigmoidMe": "Hardsigmoid",
    "activations_me.HardSwishMe": "Hardswish",
    "activations_me.HardMishMe": "HardMish",
    "metaformer.StarReLU": "StarReLU",
    "metaformer.SquaredReLU": "ReLUSquared",
}

pytestmark = pytest.mark.usefixtures("one_thread")


def test_table_of_torch_is_complete() -> None:
    ours = {name for name in fused_nn.__all__ if hasattr(nn, name)}
    # Dropout is not converted: it would draw other masks. Group norms keep their class, and layer
    # norms but for memory="recompute".
    assert ours - {"Dropout", "GroupNorm", "LayerNorm"} == set(TORCH_ARGUMENTS)


@pytest.mark.parametrize("inplace", [False, True], ids=["out_of_place", "inplace"])
@pytest.mark.parametrize("name", TORCH_ARGUMENTS)
def test_torch_activation(name: str, inplace: bool) -> None:
    arguments = dict(TORCH_ARGUMENTS[name])
    if "inplace" in inspect.signature(getattr(nn, name)).parameters:
        arguments["inplace"] = inplace
    elif inplace:
        pytest.skip("not a case: the module takes no inplace")
    stock = getattr(nn, name)(**arguments)
    module = copy.deepcopy(stock)
    before = vars(module).copy()
    # With "store" some gain nothing.
    model = nn.Sequential(module)
    report = fusedtrain.convert(model, memory="recompute")
    assert [entry.name for entry in report.converted] == ["0"]
    assert type(module) is getattr(fused_nn, name)
    assert repr(module) == repr(stock)
    assert vars(type(module)(**arguments)).keys() <= vars(module).keys()
    check_same(stock, module, 2e-14)
    assert fusedtrain.revert(model) == 2
    assert type(module) is type(stock)
    assert vars(module) == before


def test_table_of_timm_is_complete() -> None:
    layers = timm().layers
    defined = {
        f"{file}.{name}"
        for file in ("activations", "activations_me")
        for name, cls in vars(getattr(layers, file)).items()
        if inspect.isclass(cls)
        and issubclass(cls, nn.Module)
        and cls.__module__.endswith(f".{file}")
    }
    assert defined == {path for path in TIMM_TARGETS if path.startswith("activations")}


@pytest.mark.parametrize("inplace", [False, True], ids=["out_of_place", "inplace"])
@pytest.mark.parametrize("path", TIMM_TARGETS)
def test_timm_activation(path: str, inplace: bool) -> None:
    stock = timm_class(path)(inplace=inplace)
    module = copy.deepcopy(stock)
    before = vars(module).copy()
    report = fusedtrain.convert(module)
    if inplace and path.endswith((".Sigmoid", ".Tanh", ".StarReLU", ".SquaredReLU")):
        assert [entry for entry in report.left if entry.reason.startswith("inplace=True")]
        assert type(module) is type(stock)
    else:
        assert type(module) is getattr(fused_nn, TIMM_TARGETS[path])
        assert len(report) == 1
        assert not report.left
        assert vars(type(module)()).keys() <= vars(module).keys()
    check_same(stock, module, 2e-14)
    fusedtrain.revert(module)
    assert type(module) is type(stock)
    assert vars(module) == before


def check_same(stock: nn.Module, module: nn.Module, tolerance: float) -> None:
    """The same output, gradients, and contents of the input after the call."""
    torch.manual_seed(0)
    x = 2 * torch.randn(8, 5, dtype=torch.float64)
    if isinstance(stock, nn.MaxPool2d):
        x = x[None]
    stock, module = copy.deepcopy(stock).double(), module.double()
    x_stock, x_fused = x.clone(), x.clone()
    with torch.no_grad():
        expected, output = stock(x_stock), module(x_fused)
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x_fused, x_stock, rtol=tolerance, atol=tolerance)
    assert (output.data_ptr() == x_fused.data_ptr()) == (expected.data_ptr() == x_stock.data_ptr())
    try:
        _, expected_gradients = output_and_gradients(
            nn.Sequential(nn.Identity(), Shifted(), stock), x
        )
    except RuntimeError as error:  # timm's own inplace forms cannot all be differentiated
        assert "inplace operation" in str(error)  # noqa: PT017
        return
    _, gradients = output_and_gradients(nn.Sequential(nn.Identity(), Shifted(), module), x)
    # torch's own: 1/6 and 1/alpha in float32. Against exp(x / 0.7) fused CELU is 6e-17 off.
    loose = 1e-6 if isinstance(module, nn.Hardsigmoid | nn.CELU) else tolerance
    torch.testing.assert_close(gradients, expected_gradients, rtol=loose, atol=loose)


class Shifted(nn.Module):
    """Hands on a tensor that is no leaf and that no one else needs: inplace may overwrite it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01


def test_timm_of_older_versions() -> None:
    class Fake(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inplace = True  # which timm's Mish kept, and ignored

    for module, name in [("layers.activations", "Mish"), ("layers.activations_jit", "MishJit")]:
        Fake.__module__, Fake.__qualname__ = f"timm.models.{module}", name
        model = nn.Sequential(Fake())
        assert len(fusedtrain.convert(model)) == 1
        assert type(model[0]) is fused_nn.Mish
        assert model[0].inplace is False
        fusedtrain.revert(model)
        assert type(model[0]) is Fake
        assert model[0].inplace is True


def test_star_relu_child_is_not_a_module_of_its_own() -> None:
    act = timm_class("metaformer.StarReLU")()
    model = nn.Sequential(act)
    names = [name for name, _ in model.named_modules()]
    report = fusedtrain.convert(model)
    assert [entry.name for entry in report.converted] == ["0"]
    # One op does it all: a fused sum in a forward of its own would be in the way.
    assert not report.branches
    assert not has_own_forward(act)
    assert [name for name, _ in model.named_modules()] == names == ["", "0", "0.relu"]
    assert list(model.state_dict()) == ["0.scale", "0.bias"]
    assert fusedtrain.convert(model).already == 1
    assert type(act.relu) is nn.ReLU


RELU_CHANGES: dict[str, Callable[[Any], object]] = {
    "hook": lambda act: act.relu.register_forward_hook(lambda *args: args[2] * 0.5),
    "another": lambda act: setattr(act, "relu", nn.Tanh()),
    "forward": lambda act: setattr(act.relu, "forward", torch.tanh),
    "in place": lambda act: setattr(act.relu, "inplace", True),
}


@pytest.mark.parametrize("change", RELU_CHANGES)
@pytest.mark.parametrize("name", ["StarReLU", "SquaredReLU"])
@pytest.mark.parametrize("after", [nn.Conv2d, nn.BatchNorm2d])
def test_the_relu_of_timms_class_changes_later(after: Any, name: str, change: str) -> None:
    act = timm_class(f"metaformer.{name}")()
    stock = nn.Sequential(after(2, 2) if after is not nn.Conv2d else after(2, 2, 1), act).double()
    model = copy.deepcopy(stock)
    assert len(fusedtrain.convert(model).converted) == 1
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    results = []
    for one in (stock, model):
        RELU_CHANGES[change](one[1])
        between = one[0](x)
        results.append((one(x), between, one[1](between)))
    torch.testing.assert_close(*results)


def test_star_relu_with_hooked_child_is_left() -> None:
    act = timm_class("metaformer.StarReLU")()
    calls: list[int] = []
    act.relu.register_forward_hook(lambda *_: calls.append(1))
    report = fusedtrain.convert(act)
    assert report.left[0].reason == "its relu is replaced, patched or hooked"
    assert report.converted == []
    act(torch.randn(3))
    assert calls == [1]


class Adds(nn.Module):
    """Writes over the output of its last part."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.parts(x)
        y += x
        return y


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("act", [nn.LeakyReLU(0.1), nn.ReLU6(), nn.Softplus()], ids=str)
def test_an_output_that_is_written_over(act: nn.Module, nested: bool) -> None:
    """Torch keeps the input of these, ours the output."""
    act = copy.deepcopy(act)
    parts = (nn.Linear(4, 4), nn.Sequential(act) if nested else act)
    model, x = Adds(*parts), torch.randn(2, 4)
    report = fusedtrain.convert(model)
    (left,) = report.left
    assert left.reason == "what backward would need is overwritten later"
    model(x).sum().backward()
    assert fusedtrain.convert(nn.Sequential(*parts)).converted
