"""The pytest plugin of `make gpu`, and its journal: a JSON line an event, so that nothing is lost.

The journal lies in build/gpu/results, where the next call finds it, and beside the results. Its
events, each with its time: ``tree`` (the sources and the machine it is about), ``run`` and ``ran``
(a process of a step's tests begins, has ended), ``wanted`` (the names of all tests of a step),
``start`` and ``test`` (a test begins, has ended).

``FUSEDTRAIN_GPU_JOURNAL`` names the journal's files, ``FUSEDTRAIN_GPU_STEP`` the step. Its last
``run`` has the ``kind`` of its tests ("" for all), whether a ``sample`` of them is enough, and
after how many seconds of ``patience`` a test hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.tiers import few

# On the compiler alone, or about the tools: CI has run them.
NO_GPU = ("test_triton.py::test_code", "test_triton.py::test_launches", "test_gpu_tool")
CONTEXT_LOST = 70  # the exit code of a process whose GPU answers nothing but errors
PATHS, STEP = "FUSEDTRAIN_GPU_JOURNAL", "FUSEDTRAIN_GPU_STEP"
TAGS = {"failed": "failure", "error": "error", "crashed": "error"}  # of JUnit, for bad outcomes
CONTROL = {n: "?" for n in range(32) if n not in (9, 10, 13)}  # characters that XML cannot hold
Event = dict[str, Any]


@dataclass
class Progress:
    """A step so far."""

    results: dict[str, Event] = field(default_factory=dict)  # of tests that have ended, by name
    wanted: list[str] | None = None  # the names of all tests; None: they were never collected
    run: Event = field(default_factory=dict)  # the last process
    before: set[str] = field(default_factory=set)  # tests that had ended when it began
    flying: list[str] = field(default_factory=list)  # tests that it has begun and not ended
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
        return [name for name, e in self.results.items() if e["outcome"] in TAGS]

    @property
    def passed(self) -> list[Event]:
        return [e for e in self.results.values() if e["outcome"] not in TAGS]


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
        p, last = Progress(), 0.0
        for e in self.events():
            if e["step"] != step:
                continue
            if e["event"] == "run":
                p.run, p.before, p.flying, last = e, set(p.results), [], e["time"]
            elif e["event"] == "wanted":
                p.wanted = e["ids"]
            elif e["event"] == "start":
                p.flying.append(e["id"])
            elif e["event"] == "test":
                p.flying = [name for name in p.flying if name != e["id"]]
                # The failure that came first says more than the worker's death by it.
                if e["outcome"] != "crashed" or e["id"] not in p.bad:
                    p.results[e["id"]] = e
            if p.run:
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
        kept, words = self.events(), "goes on where the last call stopped"
        trees = [e["tree"] for e in kept if e["event"] == "tree"]
        if trees[-1:] != [tree]:
            words = "the sources have changed: " * bool(trees)
            if trees and keep:
                steps = {e["step"]: self.progress(e["step"]) for e in kept}
                # A finding of compute-sanitizer belongs to no test: all of its step run again.
                alarms = [n for n, p in steps.items() if any(f"{n}: exit" in b for b in p.bad)]
                kept = [e for n, p in steps.items() if n not in alarms for e in p.passed]
                words += "what passed is kept, what failed runs again"
            else:
                kept, words = [], words + "from the beginning"
        for path in self.paths:
            write(path, "".join(json.dumps(e) + "\n" for e in kept))
        self._read = (-1, [])
        self.append("tree", tree=tree)
        return words

    def junit(self, path: Path, steps: Iterable[str]) -> None:
        """JUnit XML of these steps; tests that are wanted and have not ended are skipped ones."""
        root = ElementTree.Element("testsuites")
        cut = {"outcome": "not run", "seconds": 0.0, "message": "the part was cut"}
        for step in steps:
            p, totals = self.progress(step), dict.fromkeys(("failure", "error", "skipped"), 0)
            suite = ElementTree.SubElement(root, "testsuite", name=step)
            for name, e in {**p.results, **dict.fromkeys(p.left, cut)}.items():
                file, _, test = name.translate(CONTROL).partition("::")
                names = {"classname": file, "name": test or file, "time": f"{e['seconds']:.3f}"}
                case = ElementTree.SubElement(suite, "testcase", names)
                if e["outcome"] != "passed":
                    text = f"{e['outcome']}: {e['message']}".translate(CONTROL)
                    tag = TAGS.get(e["outcome"], "skipped")
                    totals[tag] += 1
                    ElementTree.SubElement(case, tag, message=text.split("\n")[0]).text = text
            failures, errors, skipped = map(str, totals.values())
            suite.attrib |= {"tests": str(len(suite)), "failures": failures, "errors": errors}
            suite.set("skipped", skipped)
        write(path, ElementTree.tostring(root, encoding="unicode") + "\n")


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


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
        self.step = os.environ[STEP]
        self.journal = Journal(*map(Path, os.environ[PATHS].split(os.pathsep)))
        self.progress = self.journal.progress(self.step)
        self.worker: str = getattr(config, "workerinput", {}).get("workerid", "")
        self.reports: dict[str, list[pytest.TestReport]] = {}
        self.stderr = os.dup(2)  # pytest captures the other one

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Selects tests of the kind, the GPU's own files first; ended tests are left out."""
        run = self.progress.run
        chosen = [i for i in items if run["kind"] in ("", kind_of(i.nodeid))]
        chosen.sort(key=lambda i: not i.path.name.startswith("test_gpu"))
        if run["sample"]:
            of_each = few(chosen)
            chosen = [i for i in chosen if i in of_each]
        names = [i.nodeid for i in chosen]
        if self.worker in ("", "gw0") and names != self.progress.wanted:
            self.journal.append("wanted", self.step, ids=names)
        chosen = [i for i in chosen if i.nodeid not in self.progress.before]
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
        if bad and shown.when not in ("setup", "call", "teardown"):  # xdist tells of a dead worker
            outcome = "crashed"
        reason = shown.longrepr  # of a skip: file, line, reason
        message = str(reason[2]) if isinstance(reason, tuple) else shown.longreprtext
        seconds = sum(r.duration for r in reports)
        self.journal.end(self.step, report.nodeid, outcome, message, seconds)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Ends this process unless the test ends in time, also where Python waits for a kernel."""
        seconds = self.progress.run["patience"]  # again: pytest stops the watch at a failure
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
