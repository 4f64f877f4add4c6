"""The optimizers of examples/train.py: fused ones train as the stock ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.train_runs import RECIPES, Settings, Stepper, failed, losses, run, train_modes


@pytest.mark.slow
def test_optimizer_clip_and_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--amp", "off", "--optimizer", "adamw", "--clip", "0.5", "--ema", "0.9")
    status, results = run(tmp_path, *options)
    assert status == 0, failed(results)
    printed = capsys.readouterr().out
    assert "adamw, batch 8, clip 0.5, EMA 0.9" in printed
    assert "share" in printed
    names = [check["name"] for check in results["checks"]]
    assert [name for name in names if name.startswith("3 equal steps")] == [
        "3 equal steps, change of weights: worst relative error",
        "3 equal steps, change of averages: worst relative error",
    ] * 2  # of both fused modes
    for mode in results["modes"]:
        assert 0 < mode["optimizer_share"] < 1
        assert 0 < mode["optimizer_ms"] < mode["ms_per_step"]
    stock, *both = losses(results)
    assert both == [pytest.approx(stock, rel=1e-4)] * 2
    _, plain = run(tmp_path / "plain", *options[:4])
    assert losses(plain)[0] != pytest.approx(stock, rel=1e-4)


def _small_run(
    settings: Settings, dtype: torch.dtype | None = None, steps: int = 5
) -> list[train_modes.Mode]:
    """A little net trained in all modes; it is smooth, so that rounding is not amplified."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    images, labels = torch.randn(12, 3, 8, 8), torch.randint(0, 5, (12,))
    modes = train_modes.build_modes(
        base, dtype, CPU, compiled=False, channels_last=False, settings=settings
    )
    for _ in range(steps):
        for mode in modes:
            mode.losses.append(
                train_modes.step(mode, [(images, labels)], RECIPES[settings.name].lr)
            )
    return modes


CPU = train_modes.World(torch.device("cpu"))


@pytest.mark.parametrize("settings", [(None, None), (0.1, 0.9)], ids=["plain", "clip-ema"])
@pytest.mark.parametrize("name", RECIPES)
def test_fused_optimizer_reaches_the_loss_of_the_stock_one(
    name: str, settings: tuple[float | None, float | None]
) -> None:
    stock, fused, _ = _small_run(Settings(name, *settings))
    assert fused.losses == pytest.approx(stock.losses, rel=1e-4)
    assert stock.losses[-1] < stock.losses[0]
    assert type(fused.stepper.optimizer).__module__.startswith("fusedtrain")
    averages = stock.stepper.averages()
    assert len(averages) == (4 if settings[1] else 0)
    for ours, theirs in zip(fused.stepper.averages(), averages, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_skipped_steps_harm_neither(name: str) -> None:
    """Under fp16 the first step often overflows: torch's fused SGD would not survive it."""
    torch.manual_seed(0)
    weights = [torch.randn(5, 3), torch.randn(3)]
    ends = []
    for fused in (False, True):
        params: list[torch.Tensor] = [nn.Parameter(w.clone()) for w in weights]
        stepper = Stepper(params, Settings(name), fused=fused, device=CPU.device, scaled=True)
        stepper.set_lr(0.1)
        for factor in (float("inf"), 1.0, 0.5):
            for p, w in zip(params, weights, strict=True):
                p.grad = stepper.scaler.scale(w * factor)
            stepper.step()
        ends.append([p.detach() for p in params])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_torch_fused_kernels_are_used_where_they_are_right() -> None:
    def stock(name: str, params: list[torch.Tensor], scaled: bool) -> Any:
        stepper = Stepper(params, Settings(name), fused=False, device=CPU.device, scaled=scaled)
        return stepper.optimizer.defaults["fused"]

    plain = [nn.Parameter(torch.ones(2, 3, 4, 4))]
    strided = [nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))]
    assert stock("sgd", plain, False)
    assert stock("adamw", plain, True)
    assert not stock("sgd", plain, True)
    assert not stock("adamw", strided, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "name"),
    [
        pytest.param({"lr": 1.02}, "change of weights", id="2-percent"),
        pytest.param({"lr": 0.0}, "change of weights", id="no-op"),
        pytest.param({"ema_decay": 0.89}, "change of averages", id="average"),
        pytest.param({"max_grad_norm": 0.6}, "change of weights", id="clip"),
    ],
)
def test_a_wrong_optimizer_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: dict[str, float], name: str
) -> None:
    step = fusedtrain.optim.SGD._step

    def wrong(self: Any) -> None:
        for group in self.param_groups:
            group["lr"] *= ours.get("lr", 1.0)
        self.ema_decay = ours.get("ema_decay", 0.9)
        self.max_grad_norm = ours.get("max_grad_norm", 0.5)
        step(self)

    monkeypatch.setattr(fusedtrain.optim.SGD, "_step", wrong)
    options = ("--amp", "off", "--steps", "2", "--clip", "0.5", "--ema", "0.9")
    status, results = run(tmp_path, *options)
    assert status == 1
    assert f"3 equal steps, {name}: worst relative error" in failed(results)
