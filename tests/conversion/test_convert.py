"""convert and revert: nothing about a model changes but the class of its activations."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fusedtrain
from fusedtrain import nn as fused_nn
from helpers.conversion import Doubled, output_and_gradients, small_linear, snapshot, timm_class

pytestmark = pytest.mark.usefixtures("one_thread")


class OwnReLU(nn.ReLU):
    """A subclass, which convert must leave."""


def test_hooks_fire() -> None:
    model = small_linear()
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
        output_and_gradients(model, torch.randn(2, 5))
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


def test_modules_built_fused_are_not_reverted() -> None:
    model = small_linear(fused_nn.SiLU())
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
    model = small_linear(timm_class("activations.GELU")() if timms else nn.GELU("tanh"))
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
    model = small_linear(nn.PReLU(5))
    saved = copy.deepcopy(model.state_dict())
    fusedtrain.convert(model)
    model.load_state_dict(saved, strict=True)
    small_linear(nn.PReLU(5)).load_state_dict(model.state_dict(), strict=True)


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
    patched.forward = lambda x: x + 1
    assert left(patched) == [("torch.nn.ReLU", "its forward is patched")]
    assert patched(torch.zeros(1)) == 1
    parametrized = nn.PReLU()
    parametrize.register_parametrization(parametrized, "weight", Doubled())
    assert [reason for _, reason in left(parametrized)] == ["parametrized"]
    scripted = torch.jit.script(small_linear())
    assert [reason for _, reason in left(scripted)] == ["scripted; convert before scripting"]
    assert left(torch.jit.script(nn.Linear(2, 2))) == []
    assert left(nn.Sequential(torch.jit.script(Doubled()))) == []


@pytest.mark.parametrize(
    "module",
    [nn.Softmax(0), nn.Dropout(), nn.MultiheadAttention(4, 2), nn.LogSoftmax(0), nn.BatchNorm1d(3)],
    ids=lambda module: type(module).__name__,
)
def test_no_word_about_what_is_not_pointwise(module: nn.Module) -> None:
    assert left(module) == []


def test_transformer_layer_keeps_its_fast_path() -> None:
    torch.manual_seed(0)
    for activation in ("gelu", nn.GELU()):
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation, batch_first=True)
        x = torch.randn(2, 3, 8)
        trained = layer(x)
        with torch.no_grad():
            fast = layer.eval()(x)
        flag = layer.activation_relu_or_gelu
        assert len(fusedtrain.convert(layer)) == 1  # the function, or the module
        assert layer.activation_relu_or_gelu == flag > 0
        with torch.no_grad():
            assert torch.equal(layer(x), fast)
        torch.testing.assert_close(layer.train()(x), trained)


def nested() -> nn.Module:
    model = nn.Module()
    model.stem = nn.Sequential(nn.SiLU(), nn.ELU())
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
        ((nn.ELU, "stem2"), ["stem.0"]),
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


def test_revert_refuses_a_class_or_forward_that_changed_since() -> None:
    model = nn.Sequential(nn.SiLU(), nn.PReLU())
    fusedtrain.convert(model)
    parametrize.register_parametrization(model[1], "weight", Doubled())
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"^1: cannot be reverted, .* ParametrizedPReLU"):
        fusedtrain.revert(model)
    assert snapshot(model) == before
    parametrize.remove_parametrizations(model[1], "weight")
    model[0].forward = model[0].forward  # bound to the fused class, as accelerate keeps it
    with pytest.raises(RuntimeError, match=r"^0: cannot be reverted, since its forward"):
        fusedtrain.revert(model)
    del model[0].forward
    assert fusedtrain.revert(model) == 2


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
            "what would help",
            "  subclass of: use the class itself, if its forward is all that is needed",
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
    assert str(fusedtrain.convert(nn.RReLU())).splitlines()[2] == (
        "  1 x torch.nn.RReLU: no fused version ((the model itself))"
    )
