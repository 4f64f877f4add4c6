"""convert and revert: nothing about a model changes but the class of its activations."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from _models import build, timm
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrize

import fusedtrain
from fusedtrain import nn as fused_nn

# Model, what is converted in it, and the relative tolerance of float64 gradients: 1.7e-11 is the
# largest difference measured (EfficientNet, AVX512). MobileNetV3 differs by 3.3e-8, all of it from
# Hardsigmoid: torch's backward multiplies by 1/6 rounded to float32, in float64 as well.
MODELS = {
    "torchvision:resnet50": ({"ReLU": 17, "MaxPool2d": 1}, 1e-10),
    "torchvision:mobilenet_v3_large": ({"Hardswish": 21, "ReLU": 19, "Hardsigmoid": 8}, 1e-7),
    "torchvision:efficientnet_b0": ({"SiLU": 49, "Sigmoid": 16}, 1e-10),
    "timm:efficientnet_b0": ({"SiLU": 49, "Sigmoid": 16}, 1e-10),
    "torchvision:convnext_tiny": ({"GELU": 18}, 1e-10),
    "timm:convnext_tiny": ({"GELU": 18}, 1e-10),
    "timm:caformer_s18": ({"StarReLU": 24, "ReLUSquared": 1}, 1e-10),
}

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


class OwnReLU(nn.ReLU):
    """A subclass, which convert must leave."""


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Net(nn.Module):
    """No nn.Sequential: torch.compile skips the frames of torch.nn itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(5, 5), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.linear(x))
        return y


def small(activation: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), activation or nn.SiLU(), nn.Linear(5, 3))


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    model.zero_grad()
    (y * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return y.detach(), {"input": x.grad, **gradients}


def difference(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    return float((a - b).norm() / max(float(a.norm()), floor))


def snapshot(model: nn.Module) -> list[tuple[str, type, dict[str, Any]]]:
    return [(name, type(m), dict(vars(m))) for name, m in model.named_modules()]


# Real models


@pytest.mark.parametrize("name", MODELS)
def test_model_float64(name: str) -> None:
    counts, tolerance = MODELS[name]
    stock = build(name, torch.float64)
    fused = copy.deepcopy(stock)
    report = fusedtrain.convert(fused)
    assert Counter(entry.target for entry in report.converted) == {
        f"fusedtrain.nn.{kind}": count for kind, count in counts.items()
    }
    assert not report.left
    assert list(fused.state_dict()) == list(stock.state_dict())
    for key, value in stock.state_dict().items():
        assert torch.equal(fused.state_dict()[key], value), key

    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    expected, expected_gradients = run(stock, x)
    output, gradients = run(fused, x)
    assert difference(expected, output) < 1e-11  # measured: 5.3e-13
    assert gradients.keys() == expected_gradients.keys()
    # Biases before batch norm have no gradient but rounding: 1e-3 of the largest is the floor.
    floor = 1e-3 * max(float(gradient.norm()) for gradient in expected_gradients.values())
    for key, gradient in expected_gradients.items():
        assert difference(gradient, gradients[key], floor) < tolerance, key
    for key, value in stock.state_dict().items():  # the running statistics now
        torch.testing.assert_close(fused.state_dict()[key], value, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", MODELS)
def test_model_float32_and_revert(name: str) -> None:
    stock = build(name)
    fused, reverted = copy.deepcopy(stock), copy.deepcopy(stock)
    # Other rounding in batch norm grows to 3e-2 in ResNet-50: see test_convert_batch_norm.py.
    fusedtrain.convert(fused, exclude=[nn.BatchNorm2d])
    assert len(fusedtrain.convert(reverted)) == fusedtrain.revert(reverted) > 0
    x = torch.randn(2, 3, 64, 64)
    expected, expected_gradients = run(stock, x)
    output, gradients = run(fused, x)
    # Largest measured: 8.6e-6 and 3.3e-5 (EfficientNet), over all gradients taken as one vector.
    assert difference(expected, output) < 5e-5
    total = torch.cat([gradient.flatten() for gradient in expected_gradients.values()])
    assert difference(total, torch.cat([g.flatten() for g in gradients.values()])) < 2e-4
    again, again_gradients = run(reverted, x)
    assert torch.equal(again, expected)
    for key, gradient in expected_gradients.items():
        assert torch.equal(again_gradients[key], gradient), key


# One activation at a time


def test_table_of_torch_is_complete() -> None:
    ours = {name for name in fused_nn.__all__ if hasattr(nn, name)}
    # Dropout is not converted: it would draw other masks.
    assert ours - {"Dropout"} == set(TORCH_ARGUMENTS)


@pytest.mark.parametrize("inplace", [False, True], ids=["out_of_place", "inplace"])
@pytest.mark.parametrize("name", TORCH_ARGUMENTS)
def test_torch_activation(name: str, inplace: bool) -> None:
    arguments = dict(TORCH_ARGUMENTS[name])
    if "inplace" in inspect.signature(getattr(nn, name)).parameters:
        arguments["inplace"] = inplace
    elif inplace:
        pytest.skip("takes no inplace")
    stock = getattr(nn, name)(**arguments)
    module = copy.deepcopy(stock)
    before = vars(module).copy()
    assert len(fusedtrain.convert(module)) == 1
    assert type(module) is getattr(fused_nn, name)
    assert repr(module) == repr(stock)
    assert vars(type(module)(**arguments)).keys() <= vars(module).keys()
    check_same(stock, module, 2e-14)
    assert fusedtrain.revert(module) == 1
    assert type(module) is type(stock)
    assert vars(module) == before


def timm_class(path: str) -> type[nn.Module]:
    package = timm().models if path.startswith("metaformer") else timm().layers
    file, name = path.split(".")
    cls: type[nn.Module] = getattr(getattr(package, file), name)
    return cls


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
        _, expected_gradients = run(nn.Sequential(nn.Identity(), Shifted(), stock), x)
    except RuntimeError as error:  # timm's own inplace forms cannot all be differentiated
        assert "inplace operation" in str(error)  # noqa: PT017
        return
    _, gradients = run(nn.Sequential(nn.Identity(), Shifted(), module), x)
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
    assert [entry.name for entry in fusedtrain.convert(model).converted] == ["0"]
    assert [name for name, _ in model.named_modules()] == names == ["", "0", "0.relu"]
    assert list(model.state_dict()) == ["0.scale", "0.bias"]
    assert fusedtrain.convert(model).already == 1
    assert type(act.relu) is nn.ReLU


def test_star_relu_with_hooked_child_is_left_and_its_child_converted() -> None:
    act = timm_class("metaformer.StarReLU")()
    calls: list[int] = []
    act.relu.register_forward_hook(lambda *_: calls.append(1))
    report = fusedtrain.convert(act)
    assert report.left[0].reason == "its relu is replaced, patched or hooked"
    assert [entry.name for entry in report.converted] == ["relu"]
    act(torch.randn(3))
    assert calls == [1]


# What stays


def test_hooks_fire() -> None:
    model = small()
    act = model[1]
    calls: list[str] = []
    act.register_forward_pre_hook(lambda *_: calls.append("pre"))
    act.register_forward_hook(lambda *_: calls.append("forward"))
    act.register_full_backward_pre_hook(lambda *_: calls.append("backward_pre"))
    act.register_full_backward_hook(lambda *_: calls.append("backward"))
    order = ["pre", "forward", "backward_pre", "backward"]
    for change in (lambda _: None, fusedtrain.convert, fusedtrain.revert):
        change(model)
        calls.clear()
        run(model, torch.randn(2, 5))
        assert calls == order


def test_shared_module_is_counted_once_and_stays_shared() -> None:
    act = nn.SiLU()
    model = nn.ModuleDict({"a": nn.Sequential(act), "b": act, "c": nn.SiLU()})
    report = fusedtrain.convert(model)
    assert len(report) == 2
    assert report.shared == {"a.0": ["a.0", "b"]}
    assert model["a"][0] is model["b"] is act
    assert type(act) is fused_nn.SiLU
    assert fusedtrain.revert(model) == 2


def test_flags_parameters_and_dtype_stay() -> None:
    act = nn.PReLU(5, dtype=torch.bfloat16)
    act.weight.requires_grad_(False)
    act.eval()
    act.note = "mine"
    weight = act.weight
    model = nn.Sequential(act, nn.SiLU())
    for change in (fusedtrain.convert, fusedtrain.revert):
        change(model)
        assert model[0] is act
        assert act.weight is weight
        assert not weight.requires_grad
        assert not act.training
        assert model[1].training
        assert act.note == "mine"
        assert weight.dtype == torch.bfloat16
        assert model(torch.randn(4, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 5), nn.PReLU(5), nn.GELU())
        assert len(fusedtrain.convert(model)) == 2
        y = model(torch.empty(2, 5))
    assert y.device.type == "meta"
    assert y.shape == (2, 5)


def test_twice_and_back_twice() -> None:
    model = small()
    original = snapshot(model)
    assert fusedtrain.revert(model) == 0
    assert snapshot(model) == original
    fusedtrain.convert(model)
    converted = snapshot(model)
    report = fusedtrain.convert(model)
    assert len(report) == 0
    assert not report
    assert report.already == 1
    assert snapshot(model) == converted
    assert fusedtrain.revert(model) == 1
    assert snapshot(model) == original
    assert fusedtrain.revert(model) == 0


def test_modules_built_fused_are_not_reverted() -> None:
    model = small(fused_nn.SiLU())
    assert fusedtrain.convert(model).already == 1
    assert fusedtrain.revert(model) == 0
    assert type(model[1]) is fused_nn.SiLU


def by_pickle(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: nn.Module = torch.load(file, weights_only=False)
    return copied


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("timms", [False, True], ids=["torch", "timm"])
def test_copies_can_be_reverted(duplicate: Any, timms: bool) -> None:
    model = small(timm_class("activations.GELU")() if timms else nn.GELU("tanh"))
    kind, keys = type(model[1]), list(vars(model[1]))
    fusedtrain.convert(model)
    copied = duplicate(model)
    x = torch.randn(2, 5)
    assert torch.equal(copied(x), model(x))
    assert type(copied[1]) is fused_nn.GELU
    assert fusedtrain.revert(copied) == 1
    assert type(copied[1]) is kind
    assert list(vars(copied[1])) == keys
    assert type(model[1]) is fused_nn.GELU


def test_checkpoints_fit_both_ways() -> None:
    model = small(nn.PReLU(5))
    saved = copy.deepcopy(model.state_dict())
    fusedtrain.convert(model)
    model.load_state_dict(saved, strict=True)
    small(nn.PReLU(5)).load_state_dict(model.state_dict(), strict=True)


# What is left


def left(module: nn.Module) -> list[tuple[str, str]]:
    kind = type(module)
    report = fusedtrain.convert(nn.Sequential(module))
    assert type(module) is kind
    assert len(report) == 0
    return [(entry.type, entry.reason) for entry in report.left]


def test_left_with_a_reason() -> None:
    assert left(OwnReLU()) == [(f"{__name__}.OwnReLU", "subclass of torch.nn.ReLU")]
    assert left(nn.RReLU()) == [("torch.nn.RReLU", "no fused version")]
    patched = nn.ReLU()
    patched.forward = lambda x: x + 1  # type: ignore[method-assign]
    assert left(patched) == [("torch.nn.ReLU", "its forward is patched")]
    assert patched(torch.zeros(1)) == 1
    parametrized = nn.PReLU()
    parametrize.register_parametrization(parametrized, "weight", Doubled())
    assert [reason for _, reason in left(parametrized)] == ["parametrized"]
    scripted = torch.jit.script(small())
    assert [reason for _, reason in left(scripted)] == ["scripted; convert before scripting"]
    assert left(torch.jit.script(nn.Linear(2, 2))) == []


@pytest.mark.parametrize(
    "module",
    [nn.Softmax(0), nn.Dropout(), nn.MultiheadAttention(4, 2), nn.LogSoftmax(0), nn.BatchNorm1d(3)],
    ids=lambda module: type(module).__name__,
)
def test_no_word_about_what_is_not_pointwise(module: nn.Module) -> None:
    assert left(module) == []


def test_transformer_layer_keeps_its_fast_path() -> None:
    torch.manual_seed(0)
    for activation in ("relu", nn.GELU()):
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation, batch_first=True)
        x = torch.randn(2, 3, 8)
        trained = layer(x)
        with torch.no_grad():
            fast = layer.eval()(x)
        flag = layer.activation_relu_or_gelu
        assert len(fusedtrain.convert(layer)) == (activation != "relu")
        assert layer.activation_relu_or_gelu == flag > 0
        with torch.no_grad():
            assert torch.equal(layer(x), fast)
        torch.testing.assert_close(layer.train()(x), trained)


def nested() -> nn.Module:
    model = nn.Module()
    model.stem = nn.Sequential(nn.SiLU(), nn.ReLU())
    model.stem2 = nn.Sequential(nn.SiLU())
    return model


@pytest.mark.parametrize(
    ("exclude", "names"),
    [
        ([], ["stem.0", "stem.1", "stem2.0"]),
        (["stem.0"], ["stem.1", "stem2.0"]),
        (["stem"], ["stem2.0"]),
        (["stem."], ["stem2.0"]),
        ([nn.SiLU], ["stem.1"]),
        ((nn.ReLU, "stem2"), ["stem.0"]),
        ({nn.Sequential}, []),
        ([""], []),
        ([nn.Conv2d], ["stem.0", "stem.1", "stem2.0"]),
    ],
)
def test_exclude(exclude: Any, names: list[str]) -> None:
    report = fusedtrain.convert(nested(), exclude=exclude)
    assert [entry.name for entry in report.converted] == names
    assert {entry.reason for entry in report.left} <= {"excluded"}
    assert len(report.left) == 3 - len(names)


def test_exclude_one_name_of_a_shared_module() -> None:
    act = nn.SiLU()
    report = fusedtrain.convert(nn.ModuleDict({"a": act, "b": act}), exclude=["b"])
    assert (len(report), len(report.left)) == (0, 1)
    assert type(act) is nn.SiLU


@pytest.mark.parametrize(
    ("exclude", "error", "text"),
    [
        ("stem", TypeError, "exclude: expected a list of module names and types, got 'stem'"),
        (nn.SiLU, TypeError, "exclude: expected a list"),
        (5, TypeError, "exclude: expected a list"),
        ([nn.SiLU()], TypeError, r"exclude: .* got SiLU\(\) among them"),
        (["stem", "head"], ValueError, "exclude: the model has no module named 'head'"),
    ],
)
def test_exclude_errors(exclude: Any, error: type[Exception], text: str) -> None:
    model = nested()
    before = snapshot(model)
    with pytest.raises(error, match=text):
        fusedtrain.convert(model, exclude=exclude)
    assert snapshot(model) == before


@pytest.mark.parametrize("function", [fusedtrain.convert, fusedtrain.revert])
@pytest.mark.parametrize(
    "wrong", [None, nn.ReLU, torch.relu, [nn.ReLU()]], ids=["None", "class", "function", "list"]
)
def test_model_must_be_a_module(function: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got "):
        function(wrong)


def test_revert_refuses_a_class_that_changed_since() -> None:
    model = nn.Sequential(nn.SiLU(), nn.PReLU())
    fusedtrain.convert(model)
    parametrize.register_parametrization(model[1], "weight", Doubled())
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"^1: cannot be reverted, .* ParametrizedPReLU"):
        fusedtrain.revert(model)
    assert snapshot(model) == before
    parametrize.remove_parametrizations(model[1], "weight")
    assert fusedtrain.revert(model) == 2


# The report


def test_report_text() -> None:
    model = nn.Sequential(*(nn.SiLU() for _ in range(11)), nn.LeakyReLU())
    model.append(model[3])
    model.extend([OwnReLU() for _ in range(6)])
    report = fusedtrain.convert(model)
    assert str(report) == "\n".join(
        [
            "converted 12 modules",
            "  11 x torch.nn.SiLU      -> fusedtrain.nn.SiLU",
            "   1 x torch.nn.LeakyReLU -> fusedtrain.nn.LeakyReLU",
            "  shared, counted once: 3 = 12",
            "left 6 modules",
            f"  6 x {__name__}.OwnReLU: subclass of torch.nn.ReLU (13, 14, 15, 16 and 2 more)",
        ]
    )
    assert len(report) == 12
    assert report
    assert report.converted[0] == ("0", "torch.nn.SiLU", "fusedtrain.nn.SiLU")
    assert repr(report) == "ConversionReport(converted=12, left=6, already=0)"
    second = str(fusedtrain.convert(model)).splitlines()
    assert second[:2] == ["converted 0 modules", "already fused: 12 modules"]


def test_report_of_a_lone_activation_and_of_none() -> None:
    assert "no activation modules found" in str(fusedtrain.convert(nn.Linear(2, 2)))
    assert str(fusedtrain.convert(nn.RReLU())).endswith("no fused version ((the model itself))")


# TorchScript, fx, torch.compile


def test_script_of_a_converted_model() -> None:
    model = build("torchvision:resnet18").eval()
    fusedtrain.convert(model)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


@pytest.mark.parametrize("order", ["convert_first", "trace_first"])
def test_fx(order: str) -> None:
    stock = build("torchvision:mobilenet_v3_small").eval()
    model = copy.deepcopy(stock)
    if order == "convert_first":
        assert fusedtrain.convert(model)
        traced = torch.fx.symbolic_trace(model)
    else:
        traced = torch.fx.symbolic_trace(model)
        assert fusedtrain.convert(traced)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(traced(x), stock(x))


@pytest.mark.parametrize("kind", ["Mish", "GELU", "PReLU", "Hardswish"])
def test_compile_of_a_converted_model(kind: str) -> None:
    model = small(getattr(nn, kind)())
    x = torch.randn(4, 5)
    expected, gradients = run(model, x)
    fusedtrain.convert(model)
    output, fused_gradients = run(model, x)
    torch.testing.assert_close(output, expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(fused_gradients, gradients)


@pytest.mark.parametrize("wrapped", [True, False], ids=["torch.compile", "module.compile"])
def test_compiled_graphs_do_not_go_stale(wrapped: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    model = compiled = Net()
    if wrapped:
        compiled = torch.compile(model, backend=counter)
    else:
        model.compile(backend=counter)
    x = torch.randn(4, 5)
    expected = compiled(x)
    report = fusedtrain.convert(compiled)
    assert [entry.name for entry in report.converted] == ["_orig_mod.act" if wrapped else "act"]
    assert type(model.act) is fused_nn.SiLU
    assert counter.frame_count == 1
    torch.testing.assert_close(compiled(x), expected)
    assert counter.frame_count == 2
    assert fusedtrain.revert(compiled) == 1
    assert torch.equal(compiled(x), expected)
    assert counter.frame_count == 2  # the first graph serves again


def test_import_leaves_timm_alone() -> None:
    code = "import sys, fusedtrain; sys.exit('timm' in sys.modules or 'torchvision' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
