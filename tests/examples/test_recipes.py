"""The recipes of examples/recipes run, learn, and say what they have won."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers import ROOT
from helpers.models import onnxruntime


def recipe(name: str, monkeypatch: pytest.MonkeyPatch, folder: str = "recipes") -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples" / folder), *sys.path])
    return importlib.import_module(name)


def numbers(pattern: str, printed: str) -> list[float]:
    match = re.search(pattern, printed)
    assert match is not None, printed
    return [float(number) for number in match.groups()]


@pytest.mark.slow
def test_fine_tuning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    module = recipe("finetune_frozen", monkeypatch)
    assert module.main(["--steps", "2", "--batch-size", "4"]) == 0
    printed = capsys.readouterr().out
    assert "folded 20 norms" in printed
    assert "folds while frozen: 20 norms" in printed
    assert "after fine-tuning everything" in printed


@pytest.mark.slow
def test_segmentation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe("segment_unet", monkeypatch).main(["--steps", "10", "--batch-size", "2"]) == 0
    printed = capsys.readouterr().out
    peak, eager = numbers(r"peak: ([\d.]+) MB instead of ([\d.]+)\n", printed)
    assert peak <= 0.5 * eager + 0.1
    first, last = numbers(r"loss: ([\d.]+) at first, ([\d.]+) after", printed)
    assert last < first


@pytest.mark.parametrize("memory", ["store", "recompute"])
def test_diffusion(
    memory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = recipe("diffusion_unet", monkeypatch)
    assert module.main(["--steps", "12", "--batch-size", "2", "--memory", memory]) == 0
    printed = capsys.readouterr().out
    assert "fused 7 group norms with what follows" in printed
    first, last = numbers(r"loss: ([\d.]+) at first, ([\d.]+) after", printed)
    assert last < first
    assert "error of the averaged weights" in printed


def test_detection(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The exported graph has no norm, and a batch of another size."""
    runtime = onnxruntime()
    torch = pytest.importorskip("torch")
    path = tmp_path / "detector.onnx"
    module = recipe("detect_onnx", monkeypatch)
    assert module.main(["--steps", "10", "--batch-size", "8", "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "folded 5 norms" in printed
    first, last = numbers(r"loss: ([\d.]+) at first, ([\d.]+) after", printed)
    assert last < first
    session = runtime.InferenceSession(str(path))
    images = torch.randn(3, 3, module.SIZE, module.SIZE).numpy()
    (output,) = session.run(None, {session.get_inputs()[0].name: images})
    assert output.shape == (3, 5, 8, 8)
    assert b"BatchNormalization" not in path.read_bytes()


def test_gpt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe("gpt_small_states", monkeypatch).main(["--steps", "10"]) == 0
    printed = capsys.readouterr().out
    (size,) = numbers(r"optimizer: ([\d.]+) bytes a parameter", printed)
    assert size < 3.5  # two states of a byte, a correction, scales; small ones are float32
    first, last = numbers(r"loss: ([\d.]+) at first, ([\d.]+) after", printed)
    assert last < first - 1


def test_gan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe("gan_one_scaler", monkeypatch).main(["--steps", "12", "--width", "8"]) == 0
    first, last = numbers(r"step 1: critic ([\d.]+),[^\n]*\nstep 12: critic ([\d.]+)",
                          capsys.readouterr().out)  # fmt: skip
    assert last < first


def test_the_curve_of_rounding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """After one step the three curves differ by rounding alone, and all three are drawn."""
    module = recipe("rounding", monkeypatch, folder="")
    path = tmp_path / "rounding.svg"
    assert module.main(["--steps", "2", "--width", "8", "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    for name in (module.OURS, module.CONTROL):
        (distance,) = numbers(rf"{name}: loss [\d.]+ at step 2, ([\d.e-]+) from stock", printed)
        assert 0 < distance < 0.05
    assert path.read_text().count("at the end") == 3
