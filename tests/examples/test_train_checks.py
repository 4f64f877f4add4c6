"""examples/train.py sees a wrong gradient, a wrong curve and a wrong loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.train_runs import compare_gradients, compare_runs, failed, losses, run


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


Damage = Callable[[torch.Tensor], torch.Tensor]


def _damaged_convert(damage: Damage, only: int | None) -> Callable[[nn.Module], Any]:
    """fusedtrain.convert, with the outputs of the activations sent through ``damage``."""
    convert = fusedtrain.convert

    def damaged(model: nn.Module, **options: Any) -> Any:
        report = convert(model, **options)
        # Not the batch norms that compute them: each output once.
        fused = [m for m in model.modules() if type(m).__module__ == "fusedtrain.nn.activation"]
        assert fused
        for module in fused if only is None else [fused[only]]:
            module.register_forward_hook(lambda _m, _i, output: damage(output))
        return report

    return damaged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "only", "amp"),
    [
        pytest.param(lambda x: _ScaledGradient.apply(x, -1.0), None, "off", id="sign"),
        pytest.param(lambda x: _ScaledGradient.apply(x, 1.05), None, "off", id="5-percent"),
        pytest.param(lambda x: _ScaledGradient.apply(x, 1.05), 4, "off", id="one-block"),
        pytest.param(lambda x: _ScaledGradient.apply(x, 1.05), 4, "bf16", id="one-block-bf16"),
        pytest.param(lambda x: x.detach(), 4, "off", id="no-gradient"),
        pytest.param(lambda x: x + 0.1, 4, "off", id="forward"),
    ],
)
def test_a_wrong_activation_fails_the_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: Damage,
    only: int | None,
    amp: str,
) -> None:
    monkeypatch.setattr(fusedtrain, "convert", _damaged_convert(damage, only))
    status, results = run(tmp_path, "--amp", amp, "--steps", "2")
    assert status == 1
    assert not results["passed"]
    assert any("gradient" in name for name in failed(results))
    assert "does not follow the eager run" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_curve_that_leaves_the_eager_one_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that the first gradient cannot show: an activation that goes wrong later."""
    calls = 0

    def damage(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return _ScaledGradient.apply(x, -1.0 if calls > 9 * 16 else 1.0)

    monkeypatch.setattr(fusedtrain, "convert", _damaged_convert(damage, None))
    status, results = run(tmp_path, "--amp", "off", "--steps", "40", "--lr", "0.1")
    assert status == 1
    assert failed(results)
    assert not any("gradient" in name for name in failed(results))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusedtrain, "convert", _damaged_convert(lambda x: x * float("nan"), 0))
    status, results = run(tmp_path)
    assert status == 1
    assert len(losses(results)[0]) == 1
    assert "losses that are not finite" in failed(results)


def test_tolerance_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.Generator().manual_seed(0)

    def damage(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-4 * torch.rand(x.shape, generator=noise))

    monkeypatch.setattr(fusedtrain, "convert", _damaged_convert(damage, None))
    status, results = run(tmp_path, "--amp", "off", "--tolerance", "1e-9")
    assert status == 1
    assert any(name.startswith("loss, first") for name in failed(results))


def test_renamed_parameters_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"parameters differ.*weight"):
        compare_gradients({}, {"weight": torch.ones(2, 2)})


def test_nothing_to_compare_is_not_a_pass() -> None:
    zero = {"weight": torch.zeros(2, 2)}
    assert not compare_gradients(zero, zero).passed
    assert [check.name for check in compare_runs([], 1, None)] == ["losses that are not finite"]
