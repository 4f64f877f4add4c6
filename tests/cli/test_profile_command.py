"""``fusedtrain profile SCRIPT`` on scripts as people write them, in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusedtrain.advisor import _scripts
from fusedtrain.advisor._scripts import Run
from fusedtrain.cli import main, profile
from fusedtrain.cli._exit import Exit
from helpers.commands import Page, assert_png, environment, fusedtrain, heed_ctrl_c, parsed

MODEL = """\
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.act, self.head = nn.SiLU(), nn.Linear(8, 10)

    def forward(self, x):
        x = self.conv(x)
        x = self.act(self.norm(x))
        return self.head(x.mean((2, 3)))

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((3, 16, 16), float(index)), index % 10

print("runs as", __name__)
"""
LOOP = """\

def main():
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(Images(), 4)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            print("step", number + 1, flush=True)
            after(number + 1)
    finally:
        print("the script has cleaned up")

if __name__ == "__main__":
    main()
"""
NOTHING = "\ndef after(step):\n    pass\n"
RAISES = "\ndef after(step):\n    if step == 5:\n        raise LookupError('no such thing')\n"
PAUSES = "\ndef after(step):\n    time.sleep(0.1)\n"


def line_of(text: str, script: str) -> int:
    return next(n for n, line in enumerate(script.splitlines(), 1) if text in line)


def families(run: dict[str, Any]) -> dict[str, float]:
    return {row["family"]: row["ms"] for row in run["families"]}


@pytest.mark.slow
def test_before_and_after(tmp_path: Path) -> None:
    script = MODEL + NOTHING + LOOP
    (tmp_path / "train.py").write_text(script)
    run = fusedtrain(
        "profile", "--json", "--compare", "--steps", "3", "--warmup", "1", "--plot", "chart.png",
        "--html", "report.html", "--trace", "trace.json", "train.py", folder=tmp_path,
    )  # fmt: skip
    assert run.returncode == Exit.DONE, run.stderr
    result = parsed(run)
    before, after, *_ = result["runs"]
    names = [run["name"] for run in result["runs"]]
    assert len(names) in (4, 6, 8)  # until the steps decide
    assert names == ["as it is", "with fusedtrain"] * (len(names) // 2)
    for one in result["runs"]:
        assert one["end"] == "done"
        assert one["profiled_steps"] == 3
        assert one["steps"] == 1 + 3 + 3 + 1
        times = families(one)
        assert sum(times.values()) == pytest.approx(one["wall_ms"], rel=0.02)
        assert sum(row["share"] for row in one["families"]) == pytest.approx(1.0)
        for name in ("conv", "matmul", "norm", "optimizer", "loader", "idle"):
            assert times[name] > 0, name
        for row in one["families"]:
            if row["family"] in ("conv", "matmul", "norm"):
                assert row["forward"] > 0
                assert row["backward"] > 0
                assert row["forward"] + row["backward"] == pytest.approx(row["ms"])
        assert one["step_ms"] > 0 < one["processor_ms"]
        assert one["tensor_core_share"] is None
    assert after["conversion"] == ["Net: 1 norms, 1 activations converted"]
    assert "conversion" not in before
    # The activation is a part of the norm now. Another program's work only adds to a time.
    pointwise = [families(one)["pointwise"] for one in result["runs"]]
    assert min(pointwise[1::2]) < min(pointwise[::2])
    lines = {(row["operator"], row["pass"]): row["line"] for row in before["top_operators"]}
    conv = f"train.py:{line_of('x = self.conv(x)', script)}"
    assert lines["aten::mkldnn_convolution", "forward"] == conv
    assert lines["aten::convolution_backward", "backward"] == conv
    low, high = result["before_after"]["step"]
    assert 0 < low < high
    assert f"{low:.2f}-{high:.2f}" in result["facts"]["step, before / after"]
    # The script's output is kept off stdout, and the script has ended in peace, each time.
    assert run.stderr.count("runs as __main__") == len(names)
    assert run.stderr.count("step 8") == 0
    assert run.stderr.count("step 7") == len(names)
    assert run.stderr.count("the script has cleaned up") == len(names)
    assert "USDT" not in run.stderr
    assert "Traceback" not in run.stderr
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert_png(tmp_path / "chart.png")
    page = Page((tmp_path / "report.html").read_text())
    assert page.rows[0] == ["family", "ms/step", "%", "with fusedtrain", "%", "before / after"]
    assert page.images


@pytest.fixture
def profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command on a script, in this process; the script has its own."""
    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)

    def run(script: str, *words: str) -> tuple[int, str, str]:
        (tmp_path / "train.py").write_text(script)
        return main(["profile", *words, "train.py"]), *capfd.readouterr()

    return run


STUBBORN = """\
import threading, time, torch
p = torch.nn.Parameter(torch.ones(2))
p.grad = torch.ones(2)
optimizer = torch.optim.SGD([p], lr=0.1)
"""
# Script, options, exit code, words of the output.
ENDS = {
    "no step": (
        "import sys\nsys.exit(0)\n", (), Exit.FOUND,
        ["PARTIAL: the script took no optimizer step"],
    ),
    "one step": (
        STUBBORN + "optimizer.step()\n", ("--warmup", "0", "--steps", "2"), Exit.DONE,
        ["as it is: the script ended after 1 optimizer steps; 1 of 2 were profiled"],
    ),
    "exit": (
        "import sys\nsys.exit('no data')\n", (), Exit.SCRIPT_RAISED,
        ["PARTIAL: the script ended with exit status 1 after 0 optimizer steps"],
    ),
    "raises": (
        MODEL + RAISES + LOOP, ("--steps", "3", "--warmup", "1"), Exit.SCRIPT_RAISED,
        ["PARTIAL: the script raised after 5 optimizer steps", "time by family"],
    ),
}  # fmt: skip
SLOW_ENDS = (pytest.param(name, marks=pytest.mark.slow) for name in ("one step", "exit", "raises"))


@pytest.mark.parametrize("name", ["no step", *SLOW_ENDS])
def test_a_script_that_ends_early(profiled: Any, name: str) -> None:
    """The traceback is the script's, and the steps until then are shown."""
    script, words, status, texts = ENDS[name]
    ended, out, errors = profiled(script, *words)
    assert ended == status
    assert all(text in out for text in texts)
    assert ("PARTIAL" in out) == (status != Exit.DONE)
    if name == "raises":
        trace = errors[errors.index("Traceback") :].splitlines()
        assert trace[1] == f'  File "train.py", line {line_of("    main()", script)}, in <module>'
        assert trace[-1].startswith("LookupError: no such thing")
        assert "fusedtrain" not in "".join(trace)


def test_a_process_that_dies(profiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # In place of the child, which would import torch first.
    child = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(_scripts, "command", lambda *words: child)
    status, out, _ = profiled("")
    assert status == Exit.SCRIPT_RAISED
    assert "PARTIAL: the script's process died (status -9)" in out


def test_ctrl_c_before_the_script_has_begun(profiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal interrupts both processes."""
    importing = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    monkeypatch.setattr(_scripts, "command", lambda *words: [sys.executable, "-c", importing])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status, out, _ = profiled("")
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == Exit.STOPPED
    assert "PARTIAL: stopped after 0 optimizer steps" in out


LOOPS = {
    "catches all": """
while True:
    try:
        optimizer.step()
    except BaseException:
        pass
""",
    "leaves a thread": """
threading.Thread(target=time.sleep, args=(1000,)).start()
while True:
    optimizer.step()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_scripts_that_do_not_want_to_end(
    loop: str, profiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_scripts, "_CLEAN_UP", 0.2)
    ended, out, _ = profiled(STUBBORN + LOOPS[loop], "--json", "--steps", "2")
    assert ended == Exit.DONE
    result = json.loads(out)
    assert result["partial"] is None
    assert result["runs"][0]["steps"] == 3 + 2 + 2 + 1


def test_steps_of_the_warm_up_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "in_fresh_process", lambda *a, **k: Run("ended", 2, 0))
    assert main(["profile", "--json", "--compare", __file__]) == Exit.FOUND
    result = json.loads(capsys.readouterr().out)
    why = "the script took 2 optimizer steps, no more than the warm-up: try --warmup 0"
    assert result["partial"] == why
    assert [run["name"] for run in result["runs"]] == ["as it is"]


def _profiled(
    conv: float, norm: float, step: float, processor: float = 0.0, clock: str = profile.ON_HOST
) -> Run:
    rows = [("conv", conv), ("norm", norm), ("idle", 0.0)]
    families = [{"family": name, "ms": ms, "share": ms / (conv + norm)} for name, ms in rows]
    seen = {"families": families, "step_ms": step, "clock": clock, "steps": 10}
    return Run("done", 23, 0, {**seen, "processor_ms": processor} if processor else seen)


@pytest.fixture
def compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[Run]], tuple[int, list[bool], str]]:
    """`--compare` of these runs: its exit code, which of them it asked to convert, its output."""

    def run(runs: list[Run]) -> tuple[int, list[bool], str]:
        converts: list[bool] = []

        def in_fresh_process(module: str, task: dict[str, Any], *words: Any, **options: Any) -> Run:
            converts.append(task["convert"])
            return runs[len(converts) - 1]

        monkeypatch.setattr(profile, "in_fresh_process", in_fresh_process)
        status = main(["profile", "--compare", __file__])
        return status, converts, capsys.readouterr().out

    return run


def test_noise_is_no_gain(compared: Any) -> None:
    """Each run before is slower than each after; only norms are so by more than runs vary."""
    runs = [_profiled(12, 8, 20), _profiled(7, 2, 11), _profiled(8, 9, 17), _profiled(7.5, 2.1, 12)]
    status, converts, out = compared([*runs, *runs])
    assert status == Exit.DONE
    assert converts == [False, True] * 3  # three of each decide the step
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert [rows["conv"][i] for i in (1, 3)] == ["10.667", "7.167"]
    assert rows["conv"][5:] == ["undecided:", "0.85-2.52"]
    assert [rows["norm"][i] for i in (1, 3, 5)] == ["8.333", "2.033", "3.46-4.84"]
    assert len(rows["idle"]) == 5
    assert "step, as it is: 20, 17, 20 ms" in out
    assert "step, before / after: 1.31-2.13" in out
    assert "interval of the ratio, of 3 runs each" in " ".join(out.split())
    assert "processor" not in out


BUSY = [(20.0, 10.0), (30.0, 8.0), (50.0, 10.2), (21.0, 8.1)]  # of a step: wall and processor
EVEN = [(20.0, 10.0), (20.1, 10.1), (20.1, 10.1), (20.0, 10.0)]


@pytest.mark.parametrize(
    ("times", "clock", "turns", "line"),
    [
        (BUSY, profile.ON_HOST, 4, "undecided: 0.03-54.14; by processor time 1.15-1.37"),
        # It says nothing about kernels, and all turns are taken.
        (BUSY, "kernels on the GPU", 8, "undecided: 0.50-3.20"),
        (EVEN, profile.ON_HOST, 8,
         "undecided: 0.99-1.01; by processor time undecided: 0.99-1.01"),
    ],
)  # fmt: skip
def test_processor_time_decides_on_a_busy_machine(
    compared: Any, times: list[tuple[float, float]], clock: str, turns: int, line: str
) -> None:
    """Turns end where nothing is decided."""
    runs = [_profiled(12, 8, *each, clock=clock) for each in times]
    _, converts, out = compared([*runs, *runs])
    assert len(converts) == turns
    assert f"step, before / after: {line}" in out.splitlines()


def test_one_pair_of_runs_is_not_compared(compared: Any) -> None:
    status, _, out = compared([_profiled(12, 8, 20), _profiled(7, 4, 11), Run("stopped", 0, 130)])
    assert status == Exit.STOPPED
    assert "The runs cannot be compared" in out
    assert "1.71" not in out


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_seen(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL + PAUSES + LOOP)
    command = [sys.executable, "-m", "fusedtrain", "profile", "--warmup", "1", "--steps", "50"]
    process = subprocess.Popen(
        [*command, "train.py"], cwd=tmp_path, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line == "step 4\n":
            break
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == Exit.STOPPED, error
    assert "the script has cleaned up" in out
    assert "PARTIAL: stopped after" in out
    assert "optimizer steps" in out
    assert "time by family" in out
    assert "Traceback" not in error
