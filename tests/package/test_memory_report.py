"""`fusedtrain.memory_report`: bytes by layer and mode, that the model stays, table and chart."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from helpers.norm_models import make
from helpers.recompute import bytes_kept

MODES = ["eager", "store", "recompute", "inplace", "q8"]


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8),
        nn.ReLU(inplace=True), nn.Conv2d(8, 1, 1),
    )  # fmt: skip


def test_every_layer_of_a_small_model() -> None:
    report = fusedtrain.memory_report(small(), torch.randn(2, 3, 10, 10))
    one = 2 * 8 * 100 * 4
    layers = {layer.name: layer for layer in report.layers}
    assert layers["0"].bytes == dict.fromkeys(MODES, one)
    assert layers["0"].savers == ("1",)
    assert layers["1"].bytes["eager"] >= one  # SiLU's input, and the statistics
    assert layers["2"].bytes["eager"] == one
    assert layers["2"].savers == ("3",)
    assert layers["4"].savers[-1] == "6"  # the ReLU works in place
    assert sum(layers[n].bytes["recompute"] for n in ("1", "2", "4")) < one // 4
    small_ones = 4 * 8 * 4  # the two vectors of two norms
    assert report.totals["eager"] == 5 * one + small_ones
    assert report.totals["store"] == 4 * one + small_ones
    assert report.totals["recompute"] == 2 * one + small_ones
    for mode, total in report.totals.items():
        assert sum(layer.bytes[mode] for layer in report.layers) == total


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchvision ResNet, basic", "torchvision EfficientNetV2"])
def test_totals_are_those_of_a_run(name: str) -> None:
    model, x = make(name), torch.randn(2, 3, 32, 32)
    report = fusedtrain.memory_report(model, x)
    measured = {"eager": bytes_kept(model, x)}
    for mode in MODES[1:]:
        fusedtrain.convert(model, memory=mode)
        measured[mode] = bytes_kept(model, x)
    for mode, total in report.totals.items():
        assert measured[mode] - total in (0, x.nbytes)  # the input does not count
    # A converted model has the same totals.
    assert fusedtrain.memory_report(model, x).totals == report.totals


def test_the_model_stays() -> None:
    model, x = small(), torch.randn(2, 3, 10, 10)
    fusedtrain.convert(model, memory="recompute")
    types, state = [type(m) for m in model.modules()], torch.get_rng_state()
    buffers = [b.clone() for b in model.buffers()]
    fusedtrain.memory_report(model, (x,))
    fusedtrain.memory_report(model, {"input": x})
    assert [type(m) for m in model.modules()] == types
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, buffers, model.buffers()))
    assert all(p.grad is None for p in model.parameters())


def test_table_and_chart(tmp_path: Path) -> None:
    report = fusedtrain.memory_report(make("torchvision ResNet, basic"), torch.randn(2, 3, 32, 32))
    text = str(report)
    assert text.splitlines()[0].split() == MODES
    assert "kept for backward" in text
    assert "layer1.0.conv1 (for layer1.0.bn1)" in text
    assert repr(report).startswith("MemoryReport(eager=")
    path = tmp_path / "memory.png"
    report.plot(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 10_000


def test_small_models_are_shown_in_kb() -> None:
    """A table of 0.0 MB says nothing; one unit serves the whole table."""
    report = fusedtrain.memory_report(small(), torch.randn(2, 3, 10, 10))
    kept = str(report).splitlines()[1].split()
    assert kept[3:5] == [f"{report.totals['eager'] / 1e3:.1f}", "kB"]
    assert "MB" not in str(report)
    report.totals = {mode: 1000 * size for mode, size in report.totals.items()}
    assert str(report).splitlines()[1].split()[3:5] == [f"{report.totals['eager'] / 1e6:.1f}", "MB"]
    assert "kB" not in str(report)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = fusedtrain.memory_report(small(), torch.randn(1, 3, 4, 4))
    plain = builtins.__import__

    def missing(name: str, *arguments: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot(tmp_path / "memory.png")


def test_models_without_gradients_or_layers() -> None:
    totals = fusedtrain.memory_report(nn.Identity(), torch.randn(2)).totals
    assert totals == dict.fromkeys(MODES, 0)
    frozen = small().requires_grad_(False)
    report = fusedtrain.memory_report(frozen, torch.randn(2, 3, 4, 4))
    assert set(report.totals.values()) == {0}
    assert "0.0 kB" in str(report)


def test_mistakes() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module"):
        fusedtrain.memory_report(torch.relu, torch.randn(1))
    with pytest.raises(TypeError, match="example_inputs: expected a tensor"):
        fusedtrain.memory_report(small(), 3)

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        fusedtrain.memory_report(Fails(), torch.randn(1))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_the_states_of_an_optimizer() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 3)).bfloat16()
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    optimizer = fusedtrain.optim.AdamW(
        model.parameters(), state_dtype="q8", master_weights="split24"
    )
    assert list(fusedtrain.memory_report(model, x, optimizer).optimizer) == ["parameters"]
    model(x).sum().backward()
    optimizer.step()
    report = fusedtrain.memory_report(model, x, optimizer)
    large, small = 64 * 128, 128 + 128 * 3 + 3  # small parameters have float32 states
    assert report.parameters == large + small
    step = report.optimizer.pop("step")  # one vector of all parameters' counts
    assert 0 < step < 200
    assert report.optimizer == {
        "parameters": 2 * (large + small),
        "exp_avg": large + 4 * small,
        "exp_avg_scale": large // 8,
        "exp_avg_sq": large + 4 * small,
        "exp_avg_sq_scale": large // 8,
        "master_param": large + small,
    }
    table = str(report)
    each = sum(report.optimizer.values()) / report.parameters
    assert f"{each:.2f} B" in next(line for line in table.splitlines() if "and optimizer" in line)
    theirs = torch.optim.AdamW(model.parameters())
    theirs.step()
    assert set(fusedtrain.memory_report(model, x, theirs).optimizer) >= {"exp_avg", "exp_avg_sq"}
    with pytest.raises(TypeError, match=r"optimizer: expected a torch\.optim\.Optimizer, got list"):
        fusedtrain.memory_report(model, x, [])
