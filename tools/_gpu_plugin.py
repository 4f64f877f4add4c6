"""The pytest plugin of `make gpu`, and its journal: a JSON line an event, written as it happens.

Events have a step and a time: ``tree`` (sources, machine), ``run`` and ``ran`` (a process of a step
begins, has ended), ``wanted`` (the tests of a step), ``start`` and ``test`` (a test begins, has
ended). The journal lies in build/gpu/results, where the next call reads it, and beside the results.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.tiers import few

# On the compiler alone, or about the tools: CI has run them.
NO_GPU = ("test_triton.py::test_code", "test_triton.py::test_launches", "test_gpu_tool")
CONTEXT_LOST = 70  # the exit code of a process whose GPU answers nothing but errors
SETTINGS = "FUSEDTRAIN_GPU_RUN"  # in the environment: a JSON file, written by run_step() of gpu.py
BAD = ("failed", "error", "crashed")
Event = dict[str, Any]


@dataclass
class Progress:
    """A step so far."""

    wanted: list[str] | None = None  # the names of all tests; None: they were never collected
    results: dict[str, Event] = field(default_factory=dict)  # of tests that have ended, by name
    flying: dict[str, float] = field(default_factory=dict)  # tests that run, and since when
    seconds: float = 0.0  # of all processes

    @property
    def left(self) -> list[str]:
        """The tests that have not ended."""
        return [name for name in self.wanted or () if name not in self.results]

    @property
    def done(self) -> bool:
        return self.wanted is not None and not self.left

    @property
    def bad(self) -> list[str]:
        return [name for name, e in self.results.items() if e["outcome"] in BAD]


class Journal:
    """Events in one file or several equal ones."""

    now = staticmethod(time.time)

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self._read: tuple[int, list[Event]] = (-1, [])  # the file's size, and its events

    def append(self, event: str, step: str = "", **more: Any) -> None:
        """Adds an event, in one write: workers may do so at the same time."""
        line = json.dumps({"event": event, "step": step, "time": self.now(), **more}) + "\n"
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                file.write(line.encode())

    def end(self, step: str, name: str, outcome: str, message: str, seconds: float = 0.0) -> None:
        """Adds the event of a test that has ended."""
        kept = {"seconds": round(seconds, 3), "message": message[-4000:]}
        self.append("test", step, id=name, outcome=outcome, **kept)

    def events(self) -> list[Event]:
        """All events; the last line of a process that was killed may be a half one."""
        path = next((p for p in self.paths if p.exists()), None)
        data = path.read_bytes() if path else b""
        if len(data) != self._read[0]:
            self._read = len(data), []
            for line in data.decode(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    self._read[1].append(json.loads(line))
        return self._read[1]

    def progress(self, step: str) -> Progress:
        """The step so far."""
        p, last = Progress(), None
        for e in (e for e in self.events() if e["step"] == step):
            if e["event"] == "run":
                p.flying, last = {}, e["time"]
            elif e["event"] == "wanted":
                p.wanted = e["ids"]
            elif e["event"] == "start":
                p.flying[e["id"]] = e["time"]
            elif e["event"] == "test":
                p.flying.pop(e["id"], None)
                # The failure that came first says more than the worker's death by it.
                if e["outcome"] != "crashed" or e["id"] not in p.bad:
                    p.results[e["id"]] = e
            if last is not None:
                p.seconds, last = p.seconds + e["time"] - last, e["time"]
        return p

    def begin(self, tree: str, keep: bool) -> str:
        """Goes on with the journal where it is about this tree, and begins a new one otherwise.

        Args:
            tree: what the results are about: the sources, the GPU, torch.
            keep: go on in any case, without what failed.

        Returns:
            what was done, in words.
        """
        kept = self.events()
        trees = [e["tree"] for e in kept if e["event"] == "tree"]
        words = "goes on where the last call stopped"
        if trees[-1:] != [tree]:
            words = (
                "the sources have changed: from the beginning" if trees else "from the beginning"
            )
            steps = {e["step"] for e in kept} if keep else set()
            if steps:
                words = "the sources have changed: what passed is kept, what failed runs again"
            results = [r for step in steps for r in self.progress(step).results.values()]
            # A finding of compute-sanitizer belongs to no test: all of its step run again.
            alarmed = {r["step"] for r in results if r["outcome"] in BAD and ": exit" in r["id"]}
            kept = [r for r in results if r["outcome"] not in BAD and r["step"] not in alarmed]
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(e) + "\n" for e in kept))
        self._read = (-1, [])
        self.append("tree", tree=tree)
        return words


def kind_of(name: str) -> str:
    """Whose kernels the test is about: "cuda", "triton", or "rest"."""
    path, _, test = name.partition("::")
    file = path.rpartition("/")[2]
    words = set(re.split(r"[\[\]-]", test))
    if f"{file}::{test}".startswith(NO_GPU):
        return "rest"
    if file.startswith("test_triton") or "triton" in words:
        return "triton"
    return "cuda" if file.startswith("test_gpu") or "cuda" in words else "rest"


class Run:
    """The plugin, in the process that collects and in the workers of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        # Written before the process begins: workers that start later leave out the same tests.
        self.settings = json.loads(Path(os.environ[SETTINGS]).read_text())
        self.step = self.settings["step"]
        self.journal = Journal(*map(Path, self.settings["journal"]))
        self.worker: str = getattr(config, "workerinput", {}).get("workerid", "")
        self.reports: dict[str, list[pytest.TestReport]] = {}
        self.stderr = os.dup(2)  # pytest captures the other one

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Selects tests of the kind: first one of each function, then a few, then the others."""
        kind = self.settings["kind"]
        chosen = [i for i in items if kind in ("", kind_of(i.nodeid))]
        sample = few(chosen) if kind else set(chosen)
        if self.settings["sample"]:
            chosen = [i for i in chosen if i in sample]
        first = {i.nodeid.partition("[")[0]: i for i in reversed(chosen)}
        chosen.sort(key=lambda i: (i not in first.values(), i not in sample) if kind else
                    first[i.nodeid.partition("[")[0]] is not i)  # fmt: skip
        if self.worker in ("", "gw0"):
            self.journal.append("wanted", self.step, ids=[i.nodeid for i in chosen])
        ended = set(self.settings["ended"])
        chosen = [i for i in chosen if i.nodeid not in ended]
        kept = set(chosen)
        self.config.hook.pytest_deselected(items=[i for i in items if i not in kept])
        items[:] = chosen

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.worker:
            self.journal.end(self.step, report.nodeid, "error", str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if not self.worker:
            self.journal.append("start", self.step, id=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worker:
            return
        self.reports.setdefault(report.nodeid, []).append(report)
        if report.when in ("setup", "call"):
            return
        reports = self.reports.pop(report.nodeid)
        status = self.config.hook.pytest_report_teststatus
        kinds = [(status(report=r, config=self.config)[0], r) for r in reports]
        bad = next(((kind, r) for kind, r in kinds if r.failed), None)
        outcome, shown = bad or next(((kind, r) for kind, r in kinds if kind), ("passed", report))
        if bad and shown.when not in ("setup", "call", "teardown"):  # xdist: a worker has died
            outcome = "crashed"
        reason = shown.longrepr  # of a skip: file, line, reason
        message = str(reason[2]) if isinstance(reason, tuple) else shown.longreprtext
        self.journal.end(
            self.step, report.nodeid, outcome, message, sum(r.duration for r in reports)
        )

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
