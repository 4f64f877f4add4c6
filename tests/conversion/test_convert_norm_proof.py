"""convert with an example: a wrong kernel is found and undone; the report."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.conversion import _proof, _trials
from fusedtrain.conversion._conversion import Conversion
from fusedtrain.ops import batch_norm as _batch_norm, batch_norm_autograd as _autograd
from helpers.conversion import Block, image, left_of, small, snapshot
from helpers.norm_models import make

pytestmark = pytest.mark.usefixtures("one_thread")


def _plant(monkeypatch: pytest.MonkeyPatch, only: Callable[..., bool] = lambda *_: True) -> None:
    """A kernel of the backward that has a wrong sign."""
    right = _autograd._backward

    def wrong(grad: Tensor, *rest: Any) -> Any:
        gradients = right(grad, *rest)
        return (-gradients[0], *gradients[1:]) if only(grad) else gradients

    monkeypatch.setattr(_batch_norm, "_cpp", None)
    monkeypatch.setattr(_autograd, "_backward", wrong)


def _replace_forward(monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any]) -> None:
    """In all calls of the op that Python makes, which are all."""
    monkeypatch.setattr(_batch_norm, "_cpp", None)
    for module in (_batch_norm, _autograd):
        monkeypatch.setattr(module, "_forward", forward)


def test_finding_changes_nothing_and_right_swaps_are_installed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(Block(), nn.GELU(), nn.Conv2d(4, 4, 3, groups=4))
    before, events = snapshot(model), list[tuple[str, bool]]()
    for name in ("install", "uninstall"):
        right = getattr(Conversion, name)

        def noted(self: Any, name: str = name, right: Any = right) -> None:
            events.append((name, snapshot(model) == before))
            right(self)

        monkeypatch.setattr(Conversion, name, noted)
    assert fusedtrain.convert(model, image(channels=4)).norms
    assert events == [("install", True)]


def test_wrong_backward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(Block(), small(), nn.Conv2d(4, 2, 1)), image(channels=4)
    model[1][0] = nn.Conv2d(4, 4, 3)
    original = snapshot(model)
    _plant(monkeypatch)
    report = fusedtrain.convert(model, x)
    assert not report.norms
    undone = [entry for entry in report.left if entry.reason.startswith("undone: the gradient of ")]
    assert [entry.name for entry in undone] == ["0.bn1", "0.bn2", "1.1"]
    assert len(left_of(report)) == 4
    assert [entry.name for entry in report.converted] == ["1.2"]
    assert fusedtrain.revert(model) == 1
    assert snapshot(model) == original


def test_only_the_wrong_one_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3),
                          nn.BatchNorm2d(5), nn.ReLU())  # fmt: skip
    _plant(monkeypatch, lambda grad: grad.shape[1] == 4)
    report = fusedtrain.convert(model, image(12))
    assert [norm.name for norm in report.norms] == ["4"]
    assert [entry.name for entry in left_of(report)] == ["1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_wrong_forward_is_caught(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    right = _batch_norm._forward

    def wrong(input: Tensor, residual: Tensor | None, *rest: Any) -> Any:
        return right(input, None if residual is None else -residual, *rest)

    _replace_forward(monkeypatch, wrong)
    report = fusedtrain.convert(nn.Sequential(Block()).to(dtype), image(channels=4, dtype=dtype))
    assert [norm.name for norm in report.norms] == ["0.bn1"]
    left = {entry.name: entry.reason for entry in report.left}
    assert left["0.bn2"].startswith("undone: ")
    assert left["0.shortcut.1"] == "the sum is written over its other operand"


@pytest.mark.slow
def test_under_autocast_float32_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to 16 bits grows to half of the gradients, here: it would allow any mistake."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(6))), image(8, channels=4)
    with torch.autocast("cpu", torch.bfloat16):
        report = fusedtrain.convert(copy.deepcopy(model), x)
        assert report.proof is not None
        assert len(report.norms) == 12, report
        assert report.proof.precision == "float32"
        assert 0 < report.proof.gradient_error < 1e-3
        assert "yes (in float32: largest" in str(report)
        right = _autograd._backward

        def wrong(grad: Tensor, *rest: Any) -> Any:
            gradients = right(grad, *rest)
            return (gradients[0] * 1.01, *gradients[1:])

        monkeypatch.setattr(_batch_norm, "_cpp", None)
        monkeypatch.setattr(_autograd, "_backward", wrong)
        assert not fusedtrain.convert(model, x).norms


def test_a_mistake_of_16_bits_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small(), image()
    _plant(monkeypatch, lambda grad: grad.dtype is torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        report = fusedtrain.convert(model, x)
    assert not report.norms
    assert "differs under autocast" in report.left[0].reason


def test_a_mistake_of_16_bits_names_the_layer() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    errors = _proof.Errors(layers={id(model[0]): 0.1, id(model[1]): math.nan})
    trials: Any = SimpleNamespace(model=model)
    assert _trials._Trials._mistaken(trials, errors, _proof.Errors()) == "1"


def test_a_model_in_16_bits_is_compared_in_float64() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6))).bfloat16()
    report = fusedtrain.convert(model, image(8, channels=4, dtype=torch.bfloat16))
    assert report.proof is not None
    assert report.proof.precision == "float64"
    assert report.proof.gradient_error < 1e-9


class Casting(nn.Sequential):
    """Enters autocast itself, as models do that DataParallel runs."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output: Tensor = super().forward(input)
        return output


@pytest.mark.parametrize("within", [False, True])
def test_statistics_behind_a_rounding_to_16_bits(within: bool) -> None:
    """They are float32, and 120 times further off than float32 explains."""
    torch.manual_seed(0)
    layers = [(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(3)]
    model, x = Casting(nn.Sequential(*sum(layers, ()))), image(12, channels=8)
    with torch.autocast("cpu", torch.bfloat16, enabled=within):
        report = fusedtrain.convert(model, x)
    assert len(report.norms) == 3, report
    assert report.proof is not None
    assert report.proof.precision == "float64"


def test_wrong_statistics_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _batch_norm._forward

    def wrong(*arguments: Any) -> Any:
        output = right(*arguments)
        arguments[5].mul_(1.01)
        return output

    _replace_forward(monkeypatch, wrong)
    report = fusedtrain.convert(small(), image())
    assert not report.norms
    assert report.left[0].reason.startswith("undone: the buffer 1.running_mean")


def test_wrong_together_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each norm is right where it is the only one that is fused."""
    model = nn.Sequential(Block(), nn.Conv2d(4, 4, 1))
    original, calls = snapshot(model), list[int]()
    right, run = _batch_norm._forward, _trials.run

    def counting(*arguments: Any) -> Any:
        calls.append(1)
        return right(*arguments)

    def fresh(*arguments: Any, **options: Any) -> Any:
        calls.clear()
        return run(*arguments, **options)

    _replace_forward(monkeypatch, counting)
    monkeypatch.setattr(_trials, "run", fresh)
    _plant(monkeypatch, lambda grad: len(calls) > 1)
    with pytest.raises(RuntimeError, match=r"differs from the original one .*; nothing is conv"):
        fusedtrain.convert(model, image(channels=4))
    assert snapshot(model) == original


@pytest.mark.slow
def test_a_model_that_amplifies_rounding_is_proven_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two values a channel: the gradient through the norm is nothing but rounding."""
    torch.manual_seed(0)
    model = make("torchvision ResNet, bottleneck")
    x = image(16)
    report = fusedtrain.convert(copy.deepcopy(model), x)
    assert len(report.norms) == 13
    assert report.proof is not None
    assert report.proof.gradient_noise > 3e-3
    _plant(monkeypatch)
    assert not fusedtrain.convert(model, x).norms


@pytest.mark.parametrize("always", [False, True], ids=["a flip", "a mistake"])
def test_gradients_alone_differ_a_little(monkeypatch: pytest.MonkeyPatch, always: bool) -> None:
    """3 % in float32: a ReLU flipped if one example alone shows that; else a kernel is wrong."""
    right, seen = _autograd._backward, list[Tensor]()

    def wrong(grad: Tensor, input: Tensor, *rest: Any) -> Any:
        gradients = right(grad, input, *rest)
        seen.append(input.detach().clone())
        close = input.shape == seen[0].shape and bool((input - seen[0]).abs().max() < 1e-6)
        if input.dtype == torch.float32 and (always or close):
            gradients = (gradients[0] * 1.03, *gradients[1:])
        return gradients

    monkeypatch.setattr(_batch_norm, "_cpp", None)
    monkeypatch.setattr(_autograd, "_backward", wrong)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    report = fusedtrain.convert(model, image(12))
    assert len(report.norms) == (0 if always else 1)
    reasons = [entry.reason for entry in report.left if entry.name == "1"]
    assert [reason.startswith("undone: the gradient of ") for reason in reasons] == [True] * always


def test_a_model_that_returns_more_than_tensors() -> None:
    class Named(Block):
        def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
            return {"y": super().forward(x) * scale, "n": 3}

    example = {"x": image(channels=4), "scale": torch.ones(1)}
    assert fusedtrain.convert(Named(), example).proof is not None


def test_an_example_that_the_model_refuses_changes_nothing() -> None:
    model = nn.Sequential(Block(), small())
    original = snapshot(model)
    with pytest.raises(RuntimeError, match="channels"):
        fusedtrain.convert(model, image(channels=5))
    assert snapshot(model) == original


def test_proof_of_a_model_in_eval_mode_and_of_a_frozen_one() -> None:
    model, x = nn.Sequential(Block(), Block()).eval(), image(channels=4)
    assert len(fusedtrain.convert(model, x).norms) == 4
    assert not model.training
    model = nn.Sequential(Block()).requires_grad_(False)
    assert fusedtrain.convert(model, x).proof is not None


def test_report_text() -> None:
    model = nn.Sequential(Block(), Block(), nn.BatchNorm2d(4), nn.PReLU())
    text = str(fusedtrain.convert(model)).splitlines()
    assert text == [
        "converted 3 modules",
        "  2 x torch.nn.ReLU  -> fusedtrain.nn.ReLU",
        "  1 x torch.nn.PReLU -> fusedtrain.nn.PReLU",
        "fused 4 batch norms with what follows",
        "  2 x torch.nn.BatchNorm2d + ReLU",
        "  2 x torch.nn.BatchNorm2d + add + ReLU",
        "  not run on an example (example_inputs=None)",
        "left 1 module",
        "  1 x torch.nn.BatchNorm2d: PReLU has no kernel inside of batch norm (2)",
        "6 biases before norms do nothing: drop_redundant_bias before convert",
    ]
    report = fusedtrain.convert(nn.Sequential(Block()), image(channels=4))
    assert repr(report) == "ConversionReport(converted=1, norms=2, left=0, already=0)"
    line = str(report).splitlines()[3]
    assert line.startswith("  1 x torch.nn.BatchNorm2d + ReLU        saved 0.00")
    assert "MB, error " in line
    assert str(report).splitlines()[5].startswith("on the example: saved for backward 0.0")


class _SevenTimes(torch.autograd.Function):
    """GELU with seven times its gradient, whatever its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return nn.functional.gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 7 * gradient


class _Focal(nn.Module):
    """A focal loss of exponent 1.5. Its slope is NaN for p > 1, which rounding alone makes of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3), nn.Sigmoid())
        with torch.no_grad():
            self.layers[2].bias[0] = 45.0

    def forward(self, x: Tensor) -> Tensor:
        p = self.layers(x)
        return (1 - p) ** 1.5 * -torch.log(p)


def test_a_nan_of_the_noise_alone_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _Focal(), torch.randn(5, 4)
    watched = [model.layers[1], model.layers[3]]
    stock, _ = _proof.run(model, x, watched)
    _, noise = _proof.run(model, x, watched, stock, noise=True)
    assert not all(map(math.isfinite, (noise.outputs, *noise.gradients.values())))
    wrong = _proof.Errors(outputs=3.0, gradients=dict.fromkeys(noise.gradients, 5.0))
    assert _trials.excess(wrong, noise)[0] > 1e3
    lost = _proof.Errors(outputs=math.inf, gradients=dict.fromkeys(noise.gradients, math.inf))
    assert _trials.excess(lost, noise)[0] == math.inf

    monkeypatch.setattr(fusedtrain.nn.GELU, "forward", lambda self, x: _SevenTimes.apply(x))
    report = fusedtrain.convert(model, x)
    assert type(model.layers[1]) is nn.GELU
    assert [entry.name for entry in report.left if "gradient" in entry.reason] == ["layers.1"]
