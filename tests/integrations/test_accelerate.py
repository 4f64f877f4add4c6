"""Accelerate with our optimizers and scaler, against torch's of both."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusedtrain
from helpers import ROOT
from helpers.lightning_runs import assert_equal_parameters, data, network
from helpers.models import accelerate

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """Accelerate keeps its state for the process."""
    yield
    accelerate().state.AcceleratorState._reset_state(True)
    accelerate().state.GradientState._reset_state()


def use_fused_scaler(*arguments: Any) -> None:
    importlib.import_module("fusedtrain.integrations.accelerate").use_fused_scaler(*arguments)


def train(whose: str, clip: float | None, overflow: int | None, every: int = 1) -> Any:
    """The network, and for each step: whether it was skipped, the learning rate, the scale."""
    accelerator = accelerate().Accelerator(cpu=True, gradient_accumulation_steps=every)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model, package = network(), fusedtrain.optim if whose == "ours" else torch.optim
    if whose == "ours":
        use_fused_scaler(accelerator)
        assert isinstance(accelerator.scaler, fusedtrain.amp.GradScaler)
    own = {"max_grad_norm": 0.3} if whose == "ours" and clip is None else {}
    optimizer: Any = package.AdamW(model.parameters(), lr=0.02, **own)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = data(overflow)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    # Accelerate refuses fp16 on the CPU, and unscales before clipping with fp16 alone.
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    rows = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            if accelerator.sync_gradients and (clip is not None or whose == "torch"):
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            assert accelerator.optimizer_step_was_skipped == optimizer.step_was_skipped
            row = (
                optimizer.step_was_skipped,
                schedule.get_last_lr(),
                accelerator.scaler.get_scale(),
            )
            rows.append(row)
    accelerate().state.AcceleratorState._reset_state(True)
    return model, rows


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("clip", [0.3, None], ids=["accelerate clips", "the update clips"])
@pytest.mark.parametrize("overflow", [None, 1, 3])
def test_steps_skips_and_schedules_as_with_torch(
    every: int, clip: float | None, overflow: int | None
) -> None:
    ours, rows = train("ours", clip, overflow, every)
    theirs, expected = train("torch", clip, overflow, every)
    assert rows == expected
    assert any(skipped for skipped, *_ in rows) == (overflow is not None)
    assert_equal_parameters(ours, theirs)


def test_skips_of_torchs_scaler_under_a_hook() -> None:
    """torch's scaler does not call the step, since the hook is to see unscaled gradients."""
    accelerator = accelerate().Accelerator(cpu=True)
    use_fused_scaler(accelerator, torch.amp.GradScaler("cpu"))
    model = network()
    optimizer = accelerator.prepare(fusedtrain.optim.AdamW(model.parameters()))
    optimizer.optimizer.register_step_pre_hook(lambda *_: None)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        accelerator.backward(model(next(iter(data()))[0]).sum() * factor)
        optimizer.step()
        assert optimizer.step_was_skipped == (factor != 1.0)


def test_without_the_call_skipped_steps_are_not_seen() -> None:
    """When Accelerate sees them itself, `use_fused_scaler` has less to do."""
    accelerator = accelerate().Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model = network()
    optimizer = accelerator.prepare(fusedtrain.optim.AdamW(model.parameters()))
    before = [p.clone() for p in model.parameters()]
    accelerator.backward(model(next(iter(data()))[0]).sum() * float("inf"))
    optimizer.step()
    assert optimizer.optimizer.last_step_skipped
    assert not optimizer.step_was_skipped
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)


def test_without_a_scaler_no_step_is_skipped() -> None:
    accelerator = accelerate().Accelerator(cpu=True)
    use_fused_scaler(accelerator)
    assert accelerator.scaler is None
    model = network()
    optimizer, stock = accelerator.prepare(
        fusedtrain.optim.AdamW(model.parameters()), torch.optim.AdamW(network().parameters())
    )
    accelerator.backward(model(next(iter(data()))[0]).sum())
    optimizer.step()
    assert type(optimizer).__name__ == "FusedAcceleratedOptimizer"
    assert type(stock).__name__ == "AcceleratedOptimizer"
    assert not optimizer.step_was_skipped


def test_the_scaler_has_the_settings_of_accelerates() -> None:
    accelerator = accelerate().Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", 2.0**5, 3.0, 0.25, 7)
    use_fused_scaler(accelerator)
    scaler = accelerator.scaler
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (2.0**5, 3.0)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.25, 7)
    accelerator.prepare(fusedtrain.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="call it before"):
        use_fused_scaler(accelerator)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_sharding_has_its_own_scaler(kind: str) -> None:
    accelerator = accelerate().Accelerator(cpu=True)
    accelerator.state.distributed_type = getattr(accelerate().DistributedType, kind)
    with pytest.raises(ValueError, match=f"{kind} has a scaler of its own"):
        use_fused_scaler(accelerator)


def test_without_accelerate_the_error_tells_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fusedtrain.integrations.accelerate"
    for module in [m for m in sys.modules if m.split(".")[0] == "accelerate" or m == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match="pip install accelerate"):
        importlib.import_module(name)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    accelerate()
    path = ROOT / "examples" / "integrations" / "accelerate_loop.py"
    assert len(path.read_text().splitlines()) < 40
    runpy.run_path(str(path), run_name="__main__")
    assert "skipped 0 of" in capsys.readouterr().out


@pytest.mark.parametrize("memory", ["store", "recompute"])
def test_a_converted_model_in_mixed_precision(memory: str) -> None:
    """Accelerate binds `model.forward.__func__` to the model, within autocast."""
    losses = []
    for convert in (True, False):
        accelerator, model = accelerate().Accelerator(cpu=True, mixed_precision="bf16"), network()
        if convert:
            assert len(fusedtrain.convert(model, memory=memory)) > 0
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        model, optimizer, loader = accelerator.prepare(model, optimizer, data(None))
        losses.append([])
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        losses[-1].append(accelerator.unwrap_model(model, keep_fp32_wrapper=False)(x).sum().item())
    assert losses[0] == pytest.approx(losses[1], rel=3e-2)
