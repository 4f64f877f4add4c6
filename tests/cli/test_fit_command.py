"""`fusedtrain fit`: its table, the plan that it saves, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import fusedtrain
from fusedtrain.cli import main
from fusedtrain.cli._exit import Exit
from helpers.commands import assert_png

SOURCE = """
import torch

def build_model():
    print("printed by the model")
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.SiLU()]
    layers += [torch.nn.Conv2d(8, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.SiLU()]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(8 * 12 * 12, 5))

def samples(n):
    return {"x": torch.randn(n, 3, 16, 16), "y": torch.zeros(n, 5)}

def step(model, batch):
    assert torch.is_autocast_enabled("cpu")
    return torch.nn.functional.mse_loss(model(batch["x"]).float(), batch["y"])

def broken():
    raise KeyError("the layer is broken")
"""
WORDS = ("--input", "3x16x16", "--device", "cpu")


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "network.py").write_text(SOURCE)
    return str(tmp_path / "network.py")


@pytest.mark.usefixtures("one_thread")
def test_table_json_and_plan(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    words = ["fit", f"{place}:build_model", *WORDS, "--batch", "8", "--save", str(saved)]
    picture = tmp_path / "curve.png"
    assert main([*words, "--memory", "1MB", "--json", "--plot", str(picture)]) == Exit.DONE
    assert_png(picture)
    captured = capsys.readouterr()
    seen = json.loads(captured.out)
    assert seen["memory"] == 10**6
    assert seen["partial"] is None
    assert [row["way"] for row in seen["rows"]] == ["eager", "convert", "recompute", "plan"]
    assert all(row["batch"] == 8 and row["peak"] > 0 for row in seen["rows"])
    ways = [row["way"] for row in seen["curve"]]
    assert ways[:4] == ["eager", "convert", "recompute", "plan"]
    peaks = [row["peak"] for row in seen["curve"][3:]]
    assert peaks == sorted(peaks, reverse=True)
    assert captured.err.startswith("fit: the model\n")
    assert "printed by the model" in captured.err
    assert f"{saved} is written" in captured.err
    names: dict[str, object] = {}
    exec(SOURCE, names)
    model = names["build_model"]()
    fusedtrain.convert(model, memory=fusedtrain.MemoryPlan.load(saved))
    model(torch.randn(8, 3, 16, 16)).sum().backward()
    capsys.readouterr()
    # Far too little: everything is shown, and the exit code says that nothing fits.
    saved.unlink()
    assert main([*words, "--memory", "100kB"]) == Exit.FOUND
    captured = capsys.readouterr()
    assert re.search(r"^way +batch +a step +an image +peak +fits", captured.out, re.MULTILINE)
    assert "No way trains batch 8 in 100 kB: the lowest peak is" in captured.out
    assert "is not written: no plan fits" in captured.err
    assert not saved.exists()


@pytest.mark.usefixtures("one_thread")
def test_a_step_in_bfloat16(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", f"{place}:build_model", "--input", f"{place}:samples", "--device", "cpu"]
    words += ["--step", f"{place}:step", "--precision", "bf16", "--memory", "1MB", "--batch", "8"]
    assert main([*words, "--json"]) == Exit.DONE
    seen = json.loads(capsys.readouterr().out)
    assert seen["precision"] == "bf16"
    assert all(row["peak"] > 0 and row["seconds"] for row in seen["rows"])
    # An argument of the wrong kind is one line that names it.
    words[words.index(f"{place}:step")] = f"{place}:broken"
    assert main(words) == Exit.SCRIPT_RAISED
    last = capsys.readouterr().err.splitlines()[-1]
    assert "TypeError: step: expected a function of model and batch: too many" in last


def test_the_model_raises(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", f"{place}:broken", *WORDS, "--memory", "1MB"]
    assert main(words) == Exit.SCRIPT_RAISED
    err = capsys.readouterr().err
    assert 'raise KeyError("the layer is broken")' in err
    assert err.splitlines()[-1].endswith("KeyError: 'the layer is broken'")
    assert "fusedtrain/cli" not in err


def test_the_function_ends_its_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "ends.py"
    script.write_text("import sys\ndef build_model():\n    sys.exit(0)\n")
    words = ["fit", f"{script}:build_model", *WORDS, "--memory", "1MB"]
    assert main(words) == Exit.SCRIPT_RAISED
    assert capsys.readouterr().err.splitlines()[-1].endswith("SystemExit: 0")
