"""doctor, profile and tune run the script or model that they are pointed at, and no other file of
the working directory, which may be a folder that somebody else has written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fusedtrain import tune
from fusedtrain.advisor import diagnosis
from helpers.commands import environment

SCRIPT = """\
import sys
from pathlib import Path
import neighbour
import torch
assert str(Path(__file__).resolve().parent) == sys.path[0], sys.path

def build_model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))

if __name__ == "__main__":
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1, fused=True)
    for _ in range(4):
        p.square().sum().backward()
        optimizer.step()
"""
# Modules of Python, of torch's surroundings that may not be installed, torch, and this package.
HOSTILE = ("runpy", "queue", "triton", "torch", "fusedtrain")


@pytest.fixture
def safe_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script beside a folder that is the working directory and has hostile modules."""
    (tmp_path / "safe").mkdir()
    (tmp_path / "safe" / "train.py").write_text(SCRIPT)
    (tmp_path / "safe" / "neighbour.py").write_text("")
    (tmp_path / "hostile").mkdir()
    for name in HOSTILE:
        text = f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n"
        (tmp_path / "hostile" / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path / "hostile")
    monkeypatch.syspath_prepend(str(tmp_path / "hostile"))  # as `python -m` does in this process
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    return "../safe/train.py"


def hostile_modules_that_ran() -> list[str]:
    record = Path("../ran")
    return record.read_text().split() if record.exists() else []


def test_the_hostile_modules_run_where_they_are_found(safe_script: str) -> None:
    subprocess.run([sys.executable, "-c", "import queue"], check=False)
    assert hostile_modules_that_ran() == ["queue"]


@pytest.mark.slow
def test_doctor(safe_script: str) -> None:
    """`profile` starts its script by the same function."""
    report = diagnosis.doctor(safe_script, steps=4, trials=False)
    assert (report.end, report.facts.steps) == ("done", 4)
    assert hostile_modules_that_ran() == []


@pytest.mark.slow
def test_tune(safe_script: str) -> None:
    report = tune(
        f"{safe_script}:build_model", (3, 8, 8), batch=4, budget=60, device="cpu",
        switches=("channels_last",),
    )  # fmt: skip
    assert [trial.name for trial in report.trials] == ["plain fp32"]
    assert hostile_modules_that_ran() == []


@pytest.mark.slow
def test_tune_finds_a_module_of_the_working_directory(safe_script: str) -> None:
    """Where the user names a module, not a file."""
    lines = SCRIPT.splitlines(keepends=True)
    own = [line for line in lines if not line.startswith(("import neighbour", "assert"))]
    Path("chosen.py").write_text("".join(own))
    for name in HOSTILE:
        Path(f"{name}.py").unlink()
    report = tune(
        "chosen:build_model", (3, 8, 8), batch=4, budget=60, device="cpu",
        switches=("channels_last",),
    )  # fmt: skip
    assert [trial.name for trial in report.trials] == ["plain fp32"]
