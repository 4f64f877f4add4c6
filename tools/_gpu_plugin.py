"""The pytest plugin of `make gpu`, and its journal: a JSON line an event, written as it happens.

Events have a step and a time: ``call`` (a call begins, with the key of its sources), ``run`` and
``ran`` (a process of a step begins, has ended), ``wanted`` (the tests of a step), ``start`` (a test
begins), and its outcome: ``passed``, ``skipped``, ``failed`` or ``crashed``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.tiers import few

CONTEXT_LOST = 70  # the exit code of a process whose GPU answers nothing but errors
SETTINGS = "FUSEDTRAIN_GPU_RUN"  # in the environment: JSON that run_part() of gpu.py writes


@dataclass
class Progress:
    """A step so far."""

    wanted: list[str] | None = None  # the names of all tests; None: they were never collected
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # of tests that have ended
    ended: set[str] = field(default_factory=set)  # tests that had when the last process began
    flying: dict[str, float] = field(default_factory=dict)  # tests that run, and since when
    seconds: float = 0.0  # of all processes
    last: float = 0.0  # time of the last event

    @property
    def left(self) -> list[str]:
        return [name for name in self.wanted or () if name not in self.results]

    @property
    def done(self) -> bool:
        return self.wanted is not None and not self.left

    @property
    def bad(self) -> list[str]:
        return [n for n, e in self.results.items() if e["event"] in ("failed", "crashed")]

    def add(self, e: dict[str, Any]) -> None:
        """Takes an event in."""
        event, name = e["event"], e.get("id", "")
        if event == "run":
            self.results.pop(e["step"], None)  # that its command did not work
            self.flying, self.ended, self.last = {}, {*self.results}, e["time"]
        elif event == "wanted":
            self.wanted = e["ids"]
        elif event == "start":
            self.flying[name] = e["time"]
        elif name:
            self.flying.pop(name, None)
            # The failure that came first says more than the worker's death by it.
            if event != "crashed" or name not in self.bad:
                self.results[name] = e
        self.seconds, self.last = self.seconds + e["time"] - self.last, e["time"]


class Journal:
    """Events in equal files: where the next call finds them, and beside the results."""

    now = staticmethod(time.time)

    def __init__(self, *paths: Path) -> None:
        self.paths = paths

    def add(self, step: str, event: str, **more: Any) -> None:
        """Adds an event, in one write and as a new line: the last one may be half a line."""
        line = "\n" + json.dumps({"step": step, "event": event, "time": self.now(), **more})
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                file.write(line.encode())

    def steps(self) -> defaultdict[str, Progress]:
        """All steps so far, of the sources of the last call."""
        steps: defaultdict[str, Progress] = defaultdict(Progress)
        tree, path = "", self.paths[0]
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                e = json.loads(line)
                if e["event"] == "call" and e["tree"] != tree:
                    steps.clear()
                    tree = e["tree"]
                steps[e["step"]].add(e)
        return steps


def kind_of(name: str) -> str:
    """The backend whose kernels the test is about, "cuda" or "triton"; else ""."""
    words = {*re.split(r"[\[\]-]", name.partition("::")[2])}
    if name.startswith("tests/backends/triton") or "triton" in words:
        return "triton"
    return "cuda" if name.startswith("tests/backends/gpu") or "cuda" in words else ""


class Run:
    """The plugin, in the process that collects and in the workers of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.settings = json.loads(os.environ[SETTINGS])
        self.step = self.settings["step"]
        self.journal = Journal(*map(Path, self.settings["journal"]))
        self.worker: str = getattr(config, "workerinput", {}).get("workerid", "")
        self.reports: defaultdict[str, list[pytest.TestReport]] = defaultdict(list)
        self.stderr = os.dup(2)  # pytest captures the other one

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Selects tests of the kind: first one of each function, then a few, then the others."""
        kind = self.settings["kind"]
        chosen = [i for i in items if not kind or kind == kind_of(i.nodeid)]
        sample = few(chosen)
        if self.step.startswith("triton"):  # which compiles for a second a case
            chosen = [i for i in chosen if i in sample]
        first = {*{i.nodeid.partition("[")[0]: i for i in reversed(chosen)}.values()}
        chosen.sort(key=lambda i: (i not in first, i not in sample))
        if self.worker in ("", "gw0"):
            self.journal.add(self.step, "wanted", ids=[i.nodeid for i in chosen])
        # Workers that start later leave out the same tests.
        ended = self.journal.steps()[self.step].ended
        left = dict.fromkeys(i for i in chosen if i.nodeid not in ended)
        config.hook.pytest_deselected(items=[i for i in items if i not in left])
        items[:] = left

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.worker:
            why = str(report.longrepr)
            self.journal.add(self.step, "failed", id=report.nodeid, message=why[-4000:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if not self.worker:
            self.journal.add(self.step, "start", id=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worker:
            return
        self.reports[report.nodeid].append(report)
        if report.when in ("setup", "call"):
            return
        reports = self.reports.pop(report.nodeid)
        shown = max(reports, key=lambda r: ("passed", "skipped", "failed").index(r.outcome))
        # The report of pytest-xdist on a worker that has died is of no phase.
        died = shown.failed and shown.when not in ("call", "setup", "teardown")
        reason = shown.longrepr  # of a skip: file, line, reason
        message = str(reason[2]) if isinstance(reason, tuple) else shown.longreprtext
        more = {"seconds": sum(r.duration for r in reports), "message": message[-4000:]}
        event = "crashed" if died else shown.outcome
        self.journal.add(self.step, event, id=report.nodeid, **more)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Ends this process unless the test ends in time, also where Python waits for a kernel."""
        seconds = self.settings["patience"]  # again: pytest stops the watch at a failure
        faulthandler.dump_traceback_later(seconds, file=self.stderr, exit=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """A fault of a kernel comes to light at the next wait: that is made part of the test."""
        result = yield
        wait_for_gpu()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Behind an illegal access every call fails: the rest is for another process."""
        self.pytest_runtest_teardown()
        result = yield
        try:
            wait_for_gpu()
        except Exception as error:
            print(f"the GPU is lost to this process: {error}", file=sys.stderr, flush=True)
            os._exit(CONTEXT_LOST)
        faulthandler.cancel_dump_traceback_later()
        return result


def wait_for_gpu() -> None:
    """Raises what the kernels of this process have left behind."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def pytest_configure(config: pytest.Config) -> None:
    config.option.cases = "all"  # the step chooses
    config.pluginmanager.register(Run(config))
