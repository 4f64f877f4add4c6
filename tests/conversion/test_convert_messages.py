"""Messages about compiled, quantised, folded and changed models, where the mistake is made."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.forward import rewritten_of
from fusedtrain.conversion import _trials
from helpers.folding import waken
from helpers.models import timm

QUANTIZATION_WARNS = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def small() -> nn.Sequential:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 1), nn.ELU())
    return waken(nn.Sequential(*layers))


def example() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def converted() -> nn.Sequential:
    model = small()
    fusedtrain.convert(model)
    return model


# --- torch.compile ---


@pytest.mark.parametrize("ran", [False, True])
def test_a_compiled_model(ran: bool) -> None:
    """With an example torch._dynamo raised an AssertionError of a thousand characters."""
    model, x = small(), example()
    compiled = torch.compile(model, backend="aot_eager")
    want = copy.deepcopy(model)(x)
    if ran:
        compiled(x)
    with pytest.warns(UserWarning, match=r"Call convert before torch\.compile.*_orig_mod") as seen:
        report = fusedtrain.convert(compiled, x)
    assert [w.filename for w in seen] == [__file__]
    assert [norm.name for norm in report.norms] == ["_orig_mod.1"]
    assert report.left == []
    assert report.proof is not None
    assert report.rewritten == ["_orig_mod"]
    torch.testing.assert_close(compiled(x), want)
    assert fusedtrain.revert(compiled) == 3
    torch.testing.assert_close(compiled(x), want)


class Parts(nn.Module):
    """Compiled in parts, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.compile(small(), backend="eager"), small()
        self.b.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def test_compiled_parts_are_compared_as_written() -> None:
    model, x = Parts(), example()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fusedtrain.convert(model, x)
    assert [norm.name for norm in report.norms] == ["a._orig_mod.1", "b.1"]
    assert report.left == []


def test_memory_report_of_compiled_models() -> None:
    x = example()
    plain = fusedtrain.memory_report(small(), x)
    with pytest.warns(UserWarning, match=r"memory_report: the model comes from torch\.compile"):
        report = fusedtrain.memory_report(torch.compile(small(), backend="eager"), x)
    assert report.totals == plain.totals
    parts = fusedtrain.memory_report(Parts(), x).totals
    assert parts == {mode: 2 * size for mode, size in plain.totals.items()}


# --- quantisation ---


def quantized() -> nn.Module:
    from torch.ao import quantization

    stubs = quantization.QuantStub(), quantization.DeQuantStub()
    acts = (nn.Hardswish(), nn.MaxPool2d(2), nn.Sigmoid())
    model = nn.Sequential(stubs[0], nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), *acts, stubs[1]).eval()
    model.qconfig = quantization.get_default_qconfig("x86")
    prepared = quantization.prepare(model)
    prepared(example())
    done: nn.Module = quantization.convert(prepared)
    return done


@QUANTIZATION_WARNS
@pytest.mark.parametrize("given", [False, True])
def test_a_quantised_model_is_left(given: bool) -> None:
    model, x = quantized(), example()
    want = model(x)
    report = fusedtrain.convert(model, x if given else None)
    assert len(report) == 0
    assert {entry.name: entry.reason.split(":")[0] for entry in report.left} == dict.fromkeys(
        ("2", "3", "4", "5"), "quantised"
    )
    assert torch.equal(model(x), want)


@QUANTIZATION_WARNS
def test_dynamic_quantisation_computes_in_floats_between() -> None:
    from torch.ao.quantization import quantize_dynamic

    model = quantize_dynamic(nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 4)))
    assert [e.name for e in fusedtrain.convert(model, torch.randn(2, 3)).converted] == ["1"]


@QUANTIZATION_WARNS
def test_observers_that_grow_at_their_first_call_are_put_back() -> None:
    """Restoring them raised "The size of tensor a (8) must match the size of tensor b (0)"."""
    from torch.ao import quantization

    model = small().train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    model = quantization.prepare_qat(model)
    before = [(name, b.clone()) for name, b in model.named_buffers()]
    report = fusedtrain.convert(model, example())
    assert "2" in [entry.name for entry in report.converted]
    for (name, old), (_, new) in zip(before, model.named_buffers(), strict=True):
        assert torch.equal(old, new), name


@pytest.mark.parametrize("wrong", [object(), [(2, 3, 8, 8), (2, 3, 8, 8)]])
def test_an_example_of_another_type_leaves_an_earlier_conversion(wrong: Any) -> None:
    model = converted()
    before = rewritten_of(model)
    with pytest.raises((TypeError, ValueError), match="example_inputs"):
        fusedtrain.convert(model, wrong)
    assert before is not None
    assert rewritten_of(model) is before


def test_nothing_is_off_by_inf_times(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = (float("inf"), "what has a gradient")
    monkeypatch.setattr(_trials, "excess", lambda *_: answer)
    with pytest.raises(RuntimeError, match=r"\(what has a gradient differs altogether\)"):
        fusedtrain.convert(small(), example())


# --- fold_frozen_norms ---


@pytest.mark.parametrize("timms", [False, True], ids=["torch", "timm"])
@pytest.mark.parametrize(
    "function",
    [
        lambda m: fusedtrain.convert(m),
        lambda m: fusedtrain.convert(m, example()),
        lambda m: fusedtrain.drop_redundant_bias(m),
    ],
)
def test_folded_norms_say_how_to_undo_it(function: Callable[[nn.Module], Any], timms: bool) -> None:
    """They were left since "its forward is patched"."""
    model, x = small().eval(), example()
    if timms:
        model[1] = waken(timm().layers.BatchNormAct2d(8, apply_act=False))
    expected = model(x)
    fusedtrain.convert(model)
    fusedtrain.revert(model)
    assert len(fusedtrain.fold_frozen_norms(model)) == 1
    report = function(model)
    (left,) = (entry for entry in report.left if entry.name == "1")
    assert "fold_frozen_norms has changed its forward: fusedtrain.revert first" in left.reason
    torch.testing.assert_close(model(x), expected)
    fusedtrain.revert(model)
    assert torch.equal(model(x), expected)
    assert "1" not in [
        entry.name for entry in function(model.eval()).left if "fold" in entry.reason
    ]


def test_a_dropped_bias_says_how_to_undo_it() -> None:
    model = small().train()
    assert len(fusedtrain.drop_redundant_bias(model)) == 1
    report = fusedtrain.fold_frozen_norms(model)
    assert ["drop_redundant_bias" in entry.reason for entry in report.left] == [True]
    fusedtrain.revert(model)
    assert fusedtrain.fold_frozen_norms(model).left == []


# --- repr ---


def test_repr_is_that_of_the_stock_model() -> None:
    model = converted()
    assert repr(model) == repr(small())


class SwishFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        return gradient * sigmoid * (1 + x * (1 - sigmoid))


class ReversedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class MemoryEfficientSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return SwishFunction.apply(x)


class Reverses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ReversedGradient.apply(x)


def test_an_activation_that_is_an_autograd_function_is_listed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), MemoryEfficientSwish(), Reverses(), nn.SiLU())
    report = fusedtrain.convert(model, torch.randn(2, 3))
    assert [(left.name, left.reason) for left in report.left] == [
        ("1", "its forward applies SwishFunction, a torch.autograd.Function")
    ]
    assert len(report.converted) == 1
