"""examples/train.py with optimizer states of fewer bits, and weights of 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.train_runs import (
    MASTERS,
    RECIPES,
    Settings,
    Stepper,
    compare_updates,
    failed,
    losses,
    run,
    train,
    train_modes,
    updates,
)

CPU = train_modes.World(torch.device("cpu"))


def three_steps(
    settings: Settings, damage: dict[str, Any], dtype: torch.dtype = torch.float32
) -> list[Any]:
    """The checks of three steps, stock beside fused, whose groups get the options ``damage``."""
    torch.manual_seed(0)
    weights = [torch.randn(96, 128) * 0.1, torch.randn(64)]
    weights[0] = weights[0].to(dtype)
    grads = [torch.randn(w.shape).double() * 1e-2 for w in weights]
    lr = RECIPES[settings.name].lr

    def make(params: list[torch.Tensor], fused: bool) -> Stepper:
        scaled = dtype is torch.float16
        stepper = Stepper(
            params, settings, fused=fused, device=CPU.device, scaled=scaled, scale=1024.0
        )
        for group in stepper.optimizer.param_groups if fused else ():
            assert damage.keys() <= group.keys()
            group.update(damage)
        return stepper

    ours = updates(make, True, weights, grads, lr * damage.get("lr", 1.0))
    theirs = updates(make, False, weights, grads, lr)
    checks = [compare_updates("weights", ours.weights, theirs.weights, weights, settings)]
    if settings.ema is not None:
        checks += [compare_updates("averages", ours.averages, theirs.averages, weights, settings)]
    return [*checks, *([train.check_rounding(ours.rounding, dtype)] if dtype.itemsize == 2 else [])]


def momentum_off(name: str) -> dict[str, Any]:
    """Options without momentum, of the rules whose three steps show it."""
    if name in ("adagrad", "rmsprop", "lion"):
        return {}
    if "momentum" in RECIPES[name].options:
        return {"momentum": 0.0} | ({"nesterov": False} if name in ("sgd", "sgdw") else {})
    return {"betas": (0.0, 0.999)}


@pytest.mark.parametrize("states", ["bf16", "q8"])
@pytest.mark.parametrize("name", RECIPES)
def test_rounded_states_pass_and_wrong_steps_do_not(name: str, states: str) -> None:
    settings = Settings(name, 1.0, 0.99, states)
    honest = three_steps(settings, {})
    assert all(check.passed for check in honest)
    assert name == "lion" or honest[0].value > 1e-6  # states are rounded
    for damage in ({"lr": -1.0}, {"lr": 1.3}, momentum_off(name)):
        if damage:
            assert not three_steps(settings, damage)[0].passed, damage


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masters", [kind for kind in MASTERS if kind != "none"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_masters_pass_and_wrong_steps_do_not(name: str, masters: str, dtype: torch.dtype) -> None:
    settings = Settings(name, 1.0, 0.99, masters=masters)
    honest = three_steps(settings, {}, dtype)
    assert len(honest) == 3
    assert all(check.passed for check in honest), honest
    for damage in ({"lr": -1.0}, {"lr": 1.05}, momentum_off(name)):
        assert not three_steps(settings, damage, dtype)[0].passed, damage


def test_weights_that_are_not_their_masters_are_seen() -> None:
    check = train.check_rounding(1.01 * 2.0**-8, torch.bfloat16)
    assert not check.passed
    assert not train.check_rounding(float("nan"), torch.bfloat16).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "damage"),
    [
        pytest.param(("--amp", "off"), {"lr": -1.0}, id="q8-sign"),
        pytest.param(("--amp", "off"), {"momentum": 0.0, "nesterov": False}, id="q8-momentum"),
        pytest.param(("--masters", "split24"), {"lr": -1.0}, id="q8-split24-sign"),
    ],
)
def test_a_wrong_optimizer_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...], damage: dict[str, Any]
) -> None:
    step = fusedtrain.optim.SGD._step

    def wrong(self: Any) -> None:
        for group in self.param_groups:
            group.update({**damage, "lr": group["lr"] * damage.get("lr", 1.0)})
        step(self)

    monkeypatch.setattr(fusedtrain.optim.SGD, "_step", wrong)
    status, results = run(tmp_path, "--steps", "1", "--optimizer-state", "q8", *extra)
    assert status == 1
    assert "3 equal steps, change of weights: worst relative error" in failed(results)


@pytest.mark.slow
def test_states_in_8_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--amp", "off", "--optimizer", "adamw", "--optimizer-state", "q8")
    status, results = run(tmp_path, *options, "--memory", "store", "recompute")
    assert status == 0, failed(results)  # recompute has the losses of store, bit for bit
    printed = " ".join(capsys.readouterr().out.split())
    assert "adamw, q8 states (fused), batch 8" in printed
    eager, fused = results["modes"][:2]
    assert fused["weights_mb"] == eager["weights_mb"]
    count = eager["weights_mb"] / 4
    stock, ours = (mode["optimizer_state_mb"] for mode in (eager, fused))
    assert stock / count == pytest.approx(8, abs=0.01)
    assert 2.25 < ours / count < 3.5  # of larger parameters 2.25, of small ones 8
    each = f"{4 + ours / count:.1f} bytes a parameter instead of {4 + stock / count:.1f}"
    assert f"Weights and optimizer: {each}" in printed
    assert "have float32 states" in printed
    _, other = run(tmp_path / "float32", *options[:4])
    assert losses(other)[0] == losses(results)[0]  # the stock mode is what it was
    assert losses(other)[1] != losses(results)[1]


def test_states_in_bfloat16(tmp_path: Path) -> None:
    status, results = run(tmp_path, "--amp", "off", "--optimizer-state", "bf16", "--steps", "2")
    assert status == 0, failed(results)
    eager, fused = (mode["optimizer_state_mb"] for mode in results["modes"][:2])
    assert fused == pytest.approx(eager / 2, rel=0.01)


@pytest.mark.slow
def test_split_masters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--masters", "split24", "--optimizer-state", "q8", "--steps", "2")
    status, results = run(tmp_path, *options)
    assert status == 0, failed(results)
    printed = " ".join(capsys.readouterr().out.split())
    assert "16-bit weights, split24 masters (fused)" in printed
    fp32, amp, fused, _ = results["modes"]
    assert amp["weights_mb"] == fp32["weights_mb"]
    assert 0.5 < fused["weights_mb"] / fp32["weights_mb"] < 0.53
    # Weights 2, corrections 1, codes of the momentum 1.125 bytes; float32 momentum of small ones.
    each = (fused["weights_mb"] + fused["optimizer_state_mb"]) / (fp32["weights_mb"] / 4)
    assert 4.1 < each < 4.8
    distances = [c for c in results["checks"] if "16-bit weights" in c["name"]]
    assert [check["limit"] for check in distances] == [2.0**-8] * 2
    assert all(check["value"] > 0 for check in distances)


@pytest.mark.parametrize("masters", [kind for kind in MASTERS if kind != "none"])
def test_weights_have_16_bits_and_biases_do_not(masters: str) -> None:
    base = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    first = base[0].weight.detach().clone()
    modes = train_modes.build_modes(
        base, torch.float16, CPU, compiled=False, channels_last=False,
        settings=Settings("adamw", masters=masters),
    )  # fmt: skip
    assert torch.equal(base[0].weight, first)
    fp32, amp, *fused = modes
    assert {p.dtype for mode in (fp32, amp) for p in mode.net.parameters()} == {torch.float32}
    batch = torch.randn(12, 3, 8, 8), torch.randint(0, 5, (12,))
    exact = train_modes.gradients(amp, batch, None)
    for mode in fused:
        for p, theirs in zip(mode.net.parameters(), amp.net.parameters(), strict=True):
            assert p.dtype == (torch.float16 if p.ndim > 1 else torch.float32)
            assert torch.equal(p.float(), theirs)  # all modes start from equal weights
        for name, ours in train_modes.gradients(mode, batch, None).items():
            torch.testing.assert_close(ours, exact[name], rtol=1e-4, atol=1e-6)
        assert all(p.grad is None for p in mode.net.parameters())
        curve = [train_modes.step(mode, [batch], 1e-2) for _ in range(4)]
        assert curve[-1] < curve[0]


@pytest.mark.parametrize("amp", ["off", "auto"])
def test_masters_without_amp(
    amp: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    with pytest.raises(SystemExit) as stopped:
        train.main(["--device", "cpu", "--amp", amp, "--masters", "split24"])
    assert stopped.value.code == 2
    message = "--masters split24 is for weights of 16 bits, and AMP is off; add --amp bf16"
    assert message in capsys.readouterr().err
