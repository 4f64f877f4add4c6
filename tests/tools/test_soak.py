"""`make soak` in small: it passes, and each thing that it is there to notice is noticed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from helpers import ROOT
from helpers.processes import run_python
from soak import checkpoint
from soak.recipes import RECIPES
from soak.runs import differences
from soak.training import PARTS, Row, Training

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

STOCHASTIC = next(i for i, r in enumerate(RECIPES) if r.options.get("stochastic_rounding"))


def training(recipe: int, seed: int = 1) -> Training:
    """With seed 1 no inf is injected into the first 16 steps: one makes scalers alike again."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (64, 1, 16, 16), dtype=torch.uint8, generator=generator)
    return Training(RECIPES[recipe], (pixels, torch.arange(64) % 10), seed)


def rows(run: Training, steps: int) -> list[Row]:
    log = [run.step() for _ in range(steps)]
    log[-1]["digest"] = run.digest()
    return log


def resumed(recipe: int, path: Path, forget: tuple[str, ...] = ()) -> list[str]:
    """How a run that is saved after 7 steps and loaded anew differs from one that is not."""
    run = training(recipe)
    rows(run, 7)
    checkpoint.write(path, run.state_dict())
    truth = rows(run, 9)
    run = training(recipe)
    saved = checkpoint.read(path)
    assert saved is not None
    run.load_state_dict(saved, forget)
    return differences(truth, rows(run, 9))


@pytest.mark.parametrize("recipe", range(len(RECIPES)), ids=[r.name for r in RECIPES])
def test_resumed_runs_are_the_uninterrupted_ones(recipe: int, tmp_path: Path) -> None:
    assert resumed(recipe, tmp_path / "checkpoint.pt") == []


@pytest.mark.parametrize("part", PARTS)
def test_a_forgotten_part_is_noticed(part: str, tmp_path: Path) -> None:
    (difference,) = resumed(STOCHASTIC, tmp_path / "checkpoint.pt", (part,))
    assert "differs" in difference


def test_differences() -> None:
    row = {"step": 1, "loss": ["0x1p+0"], "injected": None, "skipped": False}
    after = {**row, "step": 2}
    assert differences([row, after], [row, row, after]) == []
    assert "loss" in differences([row, after], [row, after, {**row, "loss": ["0x1p+1"]}])[0]
    assert "digest" in differences([{**row, "digest": "a"}], [row])[0]
    assert "1 steps are missing, the first is 2" in differences([row, after], [row])[0]
    harmed = {**row, "injected": "inf in loss"}
    assert "not skipped" in differences([harmed], [harmed])[0]


def test_a_checkpoint_whose_writing_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint.write(path, {"step": 1})
    with pytest.raises(Exception, match="pickle"):
        checkpoint.write(path, {"step": 2, "bad": lambda: None})
    assert checkpoint.temporary(path).exists()
    assert checkpoint.read(path) == {"step": 1}
    checkpoint.write(path, {"step": 3})
    assert checkpoint.read(path) == {"step": 3}
    assert not checkpoint.temporary(path).exists()


def soak(*arguments: str) -> tuple[int, str]:
    """Seed 32 plans its kills for the first third: all three have come before the last step."""
    done = run_python(
        "-m", "soak", "--minutes", "4", "--pairs", "1", "--kills", "3",
        "--steps", "160", "--seed", "32", "--recipe", STOCHASTIC, *arguments,
        cwd=ROOT, timeout=300, trains=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_killed_processes() -> None:
    code, text = soak()
    assert code == 0, text
    assert "160 steps of training" in text
    kills = re.search(r"3 kills by SIGKILL, (\d) of them inside the writing", text)
    assert kills is not None, text
    assert int(kills[1]) >= 1  # the second is planned so, the others may be by chance
    assert "bit for bit" in text
    assert "1 runs; the largest growth" in text


def test_planted_faults_are_noticed() -> None:
    code, text = soak("--plant", "random", "leak")
    assert code == 1, text
    assert "FAILED: step" in text
    grown = re.search(r"FAILED: memory grows: \+([\d.]+) MiB .* and \+(\d+) tensors", text)
    assert grown is not None, text
    assert float(grown[1]) > 8  # 80 steps of 256 KiB
    assert 60 < int(grown[2]) < 100
