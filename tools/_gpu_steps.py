"""A step of `make gpu`: tests in processes that may die, hang or run out of time, each run once."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _gpu_journal import Journal, Outcome, write
from _gpu_process import GRACE, Clock, Ended, Say, run

ROOT = Path(__file__).resolve().parent.parent
LEAST = (
    GRACE + 25.0
)  # seconds: with less left no process is started, for pytest takes 20 to collect
RESTARTS = 30
LOOK = 5.0  # seconds between two looks for a test that hangs


@dataclass(frozen=True)
class Step:
    """Tests that are run by one command.

    Attributes:
        name: in the journal and the results.
        command: what runs pytest, without the options of the plugin.
        kind: of tests (tools/_gpu_plugin.py), "" for all.
        sample: whether a sample of the tests will do.
        environment: settings of its processes.
        patience: seconds after which a test hangs.
        alarm: the exit code by which the command says that it found something, beside failed tests.
    """

    name: str
    command: Sequence[str]
    kind: str = ""
    sample: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    patience: float = 180.0
    alarm: int | None = None


@dataclass
class Context:
    """Shared parts of all steps: the place of the state, functions to print by, the time."""

    journal: Journal
    state: Path
    say: Say
    note: Say  # into the log alone
    clock: Clock
    root: Path = ROOT
    count: int = 0

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join((str(self.root), str(ROOT / "tools")))
        # Where this is itself a worker's test, pytest would take itself for that worker.
        ours = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return {**ours, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}

    def command(
        self, command: Sequence[str], deadline: float, environment: Mapping[str, str]
    ) -> Ended:
        """Runs a command that is no test."""
        self.say(f"$ {' '.join([*(f'{k}={v}' for k, v in environment.items()), *command])}")
        begun = self.clock()
        ended = run(
            command, self.say, self.clock, deadline, self.root, self.environment(environment)
        )
        self.say(f"[{ended.words}, {self.clock() - begun:.0f} s]")
        return ended


def pytest_command(workers: int = 0) -> list[str]:
    """pytest with a line per test and nothing that stops at a failure."""
    python = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    python += ["--continue-on-collection-errors", "-o", "faulthandler_timeout=120"]
    if importlib.util.find_spec("xdist") is None:
        return python
    # A worker that dies is replaced.
    return [*python, "-n", str(workers), "--max-worker-restart=1000"] if workers else python


def run_step(c: Context, step: Step, deadline: float) -> str:
    """Runs what has not run yet.

    Returns:
        "done" where every test has ended, "cut" where the time was up, "broken" where a process
        ends again and again without a result.
    """
    deaths: Counter[str] = Counter()
    everything = f"{step.name}: all"
    fruitless = 0
    for _ in range(RESTARTS):
        if deadline - c.clock() < LEAST:
            return "cut"
        before = c.journal.results(step.name)
        ended, identity = _process(c, step, list(before), deadline)
        if step.alarm is not None and ended.code == step.alarm:
            _judge(
                c, step, f"{step.name}: exit {ended.code}", "failed", "the log says what it found"
            )
        flying = c.journal.in_flight(step.name, identity)
        if ended.by == "hang":
            for name, begun in flying.items():
                if time.time() - begun > step.patience:
                    _judge(c, step, name, "hung", f"no end after {step.patience:.0f} s")
        elif not ended.by:
            deaths.update(flying)
            for name in flying:
                # Any of several tests in flight may be the culprit; one in flight twice is.
                if len(flying) == 1 or deaths[name] == 2:
                    _judge(c, step, name, "crashed", f"its process ended: {ended.words}")
        missing = not_run(c, step)
        if missing is not None and not missing:
            if everything in c.journal.results(step.name):
                _judge(c, step, everything, "passed", "an earlier call could not run it")
            c.journal.append("done", step.name)
            return "done"
        if ended.by == "time":
            return "cut"
        fruitless = (
            0 if flying or len(c.journal.results(step.name)) > len(before) else fruitless + 1
        )
        if fruitless == 2:
            break
    _judge(c, step, everything, "error", f"ends without results: {ended.words}")
    return "broken"


def wanted(c: Context, step: Step) -> list[str] | None:
    """The names of all tests of the step; None where they were never collected."""
    with contextlib.suppress(OSError, ValueError):
        names: list[str] = json.loads(_file(c, step, "wanted").read_text())
        return names
    return None


def not_run(c: Context, step: Step) -> list[str] | None:
    """Tests of the step that have not ended; None where nobody knows which there are."""
    names = wanted(c, step)
    if names is None:
        return None
    results = c.journal.results(step.name)
    return [name for name in names if name not in results]


def summary(results: Mapping[str, Outcome]) -> str:
    """ "12 passed, 1 failed"."""
    counts = Counter(r.outcome for r in results.values())
    return ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()) or "no tests"


def _process(c: Context, step: Step, done: list[str], deadline: float) -> tuple[Ended, str]:
    c.count += 1
    identity = f"{os.getpid()}-{c.count}"
    names = _file(c, step, "wanted")
    names.unlink(missing_ok=True)
    write(_file(c, step, "done"), json.dumps(done))
    plan = {
        "step": step.name, "run": identity, "kind": step.kind, "sample": step.sample,
        "journal": [str(p.resolve()) for p in c.journal.paths], "wanted": str(names.resolve()),
        "done": str(_file(c, step, "done").resolve()),
    }  # fmt: skip
    path = _file(c, step, "plan").resolve()
    write(path, json.dumps(plan))
    command = [*step.command, "-p", "_gpu_plugin"]
    settings = " ".join(f"{k}={v}" for k, v in step.environment.items())
    c.say(f"$ {settings} {' '.join(command)}".replace("$  ", "$ "))
    if done:
        c.say(f"  without {len(done)} tests that have ended")
    begun, looked = c.clock(), time.time()

    def hangs() -> bool:
        nonlocal looked
        now = time.time()
        if now - looked < min(LOOK, step.patience / 2):
            return False
        looked = now
        flying = c.journal.in_flight(step.name, identity).values()
        return any(now - start > step.patience for start in flying)

    environment = c.environment({**step.environment, "FUSEDTRAIN_GPU_STEP": str(path)})
    ended = run(command, c.say, c.clock, deadline, c.root, environment, hangs)
    c.say(f"[{ended.words}, {c.clock() - begun:.0f} s]")
    return ended, identity


def _judge(c: Context, step: Step, name: str, outcome: str, message: str) -> None:
    c.say(f"{outcome.upper()} {name}: {message}")
    c.journal.append("test", step.name, id=name, outcome=outcome, seconds=0.0, message=message)


def _file(c: Context, step: Step, kind: str) -> Path:
    return c.state / f"{step.name.replace(' ', '-')}.{kind}.json"
