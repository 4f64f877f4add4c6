"""A step of `make gpu`: tests in processes that may die, hang or run out of time, each run once."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from _gpu_plugin import PATHS, STEP, Journal

ROOT = Path(__file__).resolve().parent.parent
GRACE = 20.0  # seconds from SIGINT to SIGKILL
TICK = 0.25  # seconds of real time between two looks at the clock
# With fewer seconds left no process is started, for pytest takes 20 to collect.
LEAST = GRACE + 25.0
say = partial(print, flush=True)


@dataclass(frozen=True)
class Step:
    """Tests that are run by one command."""

    name: str  # in the journal and the results
    command: Sequence[str]  # runs pytest, without the options of the plugin
    kind: str = ""  # of tests (tools/_gpu_plugin.py), "" for all
    sample: bool = False  # whether a sample of the tests will do
    environment: Mapping[str, str] = field(default_factory=dict)
    patience: float = 180.0  # seconds after which a test hangs
    alarm: int | None = None  # the exit code that says: something is wrong beside failed tests


@dataclass
class Context:
    """A call: its journal, its device's name, the folder of its results, the time, and its end."""

    journal: Journal
    device: str
    results: Path
    clock: Callable[[], float] = time.monotonic
    end: float = float("inf")
    root: Path = ROOT

    def run(
        self, command: Sequence[str], deadline: float, environment: Mapping[str, str]
    ) -> tuple[int, bool]:
        """Runs a command, which is over by the deadline: SIGINT asks it to end, so that it can say
        what it knows; 20 s later it is killed, and with it what it has left behind.

        Returns:
            its exit code, and whether the time was up.
        """
        say("$", *(f"{key}={value}" for key, value in environment.items()), *command)
        # Where this is itself a worker's test, pytest would take itself for that worker.
        ours = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        ours["PYTHONPATH"] = os.pathsep.join((str(self.root), str(ROOT / "tools")))
        ours[PATHS] = os.pathsep.join(str(path.resolve()) for path in self.journal.paths)
        begun, cut = self.clock(), False
        process = subprocess.Popen(
            command, cwd=self.root, env={**ours, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, preexec_fn=_with_parent,
        )  # fmt: skip
        try:
            for number, end in ((signal.SIGINT, deadline - GRACE), (signal.SIGKILL, deadline)):
                while process.poll() is None and self.clock() < end:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(TICK)
                if process.returncode is None:
                    cut = True
                    os.killpg(process.pid, number)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        why = "stopped by the time limit, " if cut else ""
        say(f"[{why}exit {code}, {self.clock() - begun:.0f} s]")
        return code, cut


def _with_parent() -> None:
    """In the child: a group of its own, and death with the parent, whatever kills that. SIGINT is
    heard again where a shell has switched it off, as one does for `make gpu &`."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def pytest_command(workers: int = 0) -> list[str]:
    """pytest with a line per test and nothing that stops at a failure."""
    python = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    python += ["--continue-on-collection-errors"]
    if not workers or importlib.util.find_spec("xdist") is None:
        return [*python, "-p", "no:xdist"]
    # A worker that dies is replaced.
    return [*python, "-n", str(workers), "--max-worker-restart=1000"]


def run_step(c: Context, step: Step, deadline: float) -> bool:
    """Runs what has not run yet; returns whether the time was up before all had ended."""
    everything = f"{step.name}: all"
    fruitless = 0

    def judge(name: str, outcome: str, message: str) -> None:
        say(f"{outcome.upper()} {name}: {message}")
        c.journal.end(step.name, name, outcome, message)

    while fruitless < 2:
        if deadline - c.clock() < LEAST:
            return True
        settings = {"kind": step.kind, "sample": step.sample, "patience": step.patience}
        c.journal.append("run", step.name, **settings)
        command = [*step.command, "-p", "_gpu_plugin"]
        code, cut = c.run(command, deadline, {**step.environment, STEP: step.name})
        c.journal.append("ran", step.name)
        if code == step.alarm:
            judge(f"{step.name}: exit {code}", "failed", "the log says what it found")
        flying = [] if cut else c.journal.progress(step.name).flying
        if len(flying) == 1:  # with several in flight nobody knows which one it was
            judge(flying[0], "crashed", f"its process died or hung: exit {code}")
        progress = c.journal.progress(step.name)
        if progress.done:
            if everything in progress.results:
                judge(everything, "passed", "an earlier call could not run it")
            return False
        if cut:
            return True
        fruitless = fruitless + 1 if progress.results.keys() == progress.before else 0
    judge(everything, "error", f"ends again and again without results: exit {code}")
    return False
