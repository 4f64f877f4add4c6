"""The command, in processes of its own: the script runs as Python would run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusedtrain.cli import Exit, main
from helpers import ROOT
from helpers.diagnosis import SCRIPTS
from helpers.processes import Done, environment, run_python

WORKERS = '''
import multiprocessing, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Seen(Dataset):
    """In a worker nothing is watched."""
    def __len__(self):
        return 12

    def __getitem__(self, index):
        hooks = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
        watched = any(hooks) or hasattr(nn.Module.__init__, "__wrapped__")
        modes = len(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
        assert not watched and not modes and os.getpid() != MAIN, (watched, modes)
        return torch.randn(4)

MAIN = int(os.environ.setdefault("MAIN_PID", str(os.getpid())))
print("imported as", __name__)

if __name__ == "__main__":
    print("arguments", sys.argv, os.getcwd(), sys.path[0])
    model = nn.Linear(4, 4)
    assert hasattr(nn.Module.__init__, "__wrapped__")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    for context in ("fork", "spawn"):
        loader = DataLoader(Seen(), batch_size=2, num_workers=1, multiprocessing_context=context)
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    try:
        raise SystemExit("never reached")
    finally:
        print("not ended by the doctor")
'''

RAISES = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU(inplace=True))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train(step):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    if step == 5:
        raise KeyError("of the user")

for step in range(10):
    train(step)
"""


def doctor(*words: str, cwd: Path) -> Done:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("MAIN_PID", None)
    return run_python("-m", "fusedtrain", "doctor", *words, cwd=cwd, env=environment, trains=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    return tmp_path


def test_script_runs_as_python_runs_it(folder: Path) -> None:
    """Its arguments, folder and __main__; workers, forked and spawned, are not watched."""
    script = folder / "sub" / "train.py"
    script.write_text(WORKERS)
    run = doctor("--json", "--steps", "8", "--no-trials", "sub/train.py", "--lr", "-x", cwd=folder)
    assert run.returncode in (0, 1), run.stderr
    report = json.loads(run.stdout)  # what the script prints is on stderr
    assert report["steps"] == 8
    assert report["end"] == "done"
    assert report["partial"] is None
    expected = f"arguments {['sub/train.py', '--lr', '-x']} {folder} {script.parent}"
    assert expected in run.stderr.splitlines()
    assert run.stderr.count("imported as __main__") == 1
    assert run.stderr.count("imported as __mp_main__") == 1
    assert "Traceback" not in run.stderr
    rules = {finding["rule"] for finding in report["findings"]}
    assert rules <= {"small-tensors", "loader-too-slow"}  # a worker that starts is waited for


@pytest.fixture
def called(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command on a script, in this process, which saves an import of torch; the script has its
    own."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(script: str, *words: str) -> tuple[int, str, str]:
        (folder / "train.py").write_text(script)
        return main(["doctor", *words, "train.py"]), *capfd.readouterr()

    return call


# Script, exit code, words of the output.
ENDS = {
    "no step": (
        "import torch\nprint(torch.ones(2).sum())\n", Exit.FOUND,
        ["PARTIAL: the script took no step of an optimizer", "tensor(2.)"],
    ),
    "exit": (  # which is no exception
        "import sys\nsys.exit(7)\n", Exit.SCRIPT_RAISED,
        ["PARTIAL: the script ended with exit status 7 after 0 steps"],
    ),
    "raises": (
        RAISES, Exit.SCRIPT_RAISED,
        ["PARTIAL: the script raised after 6 steps", "[in-place-clone]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["exit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("no step", "raises"))]
)
def test_a_script_that_ends_early(called: Any, name: str) -> None:
    """A script that raises shows its traceback, and the findings so far."""
    script, status, words = ENDS[name]
    ended, output, errors = called(script)
    assert ended == status
    assert all(text in output for text in words)
    if name == "raises":
        trace = errors[errors.index("Traceback") :].splitlines()
        assert trace[1] == '  File "train.py", line 14, in <module>'
        assert trace[-1] == "KeyError: 'of the user'"
        assert "fusedtrain" not in "\n".join(trace)


THREAD = """
import threading
from concurrent.futures import ThreadPoolExecutor
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU(inplace=True))
optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

def train():
    while True:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()

ThreadPoolExecutor().submit(print, "a thread that waits for work until Python ends")
threading.Thread(target=train).start()
"""


@pytest.mark.slow
def test_a_script_that_trains_in_a_thread(called: Any) -> None:
    """It ends before the thread does."""
    status, output, errors = called(THREAD, "--json", "--no-trials", "--steps", "6")
    assert status == Exit.FOUND
    report = json.loads(output)
    assert (report["end"], report["steps"], report["partial"]) == ("done", 6, None)
    assert "in-place-clone" in {finding["rule"] for finding in report["findings"]}
    assert "Traceback" not in errors


@pytest.mark.slow
def test_fix_prints_a_diff_and_nothing_else(folder: Path, called: Any) -> None:
    tiny = (SCRIPTS / "tiny.py").read_text()
    source = tiny.replace("losses = []", "losses = print('of it') or []")
    status, output, errors = called(source, "--fix", "--steps", "6", "--no-trials")
    assert status == Exit.FOUND
    assert output.startswith("--- train.py\n+++ train.py\n@@ ")
    assert "+        losses.append(loss.detach())\n" in output
    assert "of it\n" in errors
    assert "[graph-kept]" in errors
    assert (folder / "train.py").read_text() == source


@pytest.mark.slow
def test_files_of_the_report(folder: Path, called: Any) -> None:
    """A chart, where a finding has a time; and a page."""
    words = ("--plot", "a.png", "--html", "a.html", "--steps", "6")
    status, output, _ = called((SCRIPTS / "faults.py").read_text(), *words)
    assert status == Exit.FOUND
    assert "[loader-without-workers]" in output
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "a.html").read_text()
    assert "loader-without-workers" in page
    assert "data:image/png;base64" in page


def test_there_is_no_such_script(called: Any) -> None:
    status, output, errors = called("", "missing.py")
    assert (status, output) == (Exit.USAGE, "")
    assert "missing.py" in errors


WAITS = """
import os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("running", os.getpid(), worker.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc (Linux)")
def test_what_ends_the_command_ends_the_script(tmp_path: Path) -> None:
    """`timeout` and batch systems send SIGTERM to the command alone."""
    script, folder = tmp_path / "waits.py", tmp_path / "temporary"
    script.write_text(WAITS)
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "fusedtrain", "doctor", str(script)], text=True,
        stdout=subprocess.PIPE, env={**environment(), "TMPDIR": str(folder)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("running"))
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    for pid in map(int, line.split()[1:]):
        with pytest.raises(ProcessLookupError):
            _until_gone(pid)
    assert not list(folder.iterdir())


def _until_gone(pid: int) -> None:
    for _ in range(100):
        os.kill(pid, 0)
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            raise ProcessLookupError
        time.sleep(0.05)
