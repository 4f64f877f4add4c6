"""The pytest plugin of `make gpu`: which tests a step has, and a journal line as each one ends.

``FUSEDTRAIN_GPU_JOURNAL`` names the journal's files, ``FUSEDTRAIN_GPU_STEP`` the step. Its last
``run`` there has the ``kind`` of its tests ("" for all), whether a ``sample`` of them is enough,
and after how many seconds of ``patience`` a test hangs.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from _gpu_journal import Journal

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.tiers import few

# On the compiler alone, or about the tools: CI has run them.
NO_GPU = ("test_triton.py::test_code", "test_triton.py::test_launches", "test_gpu_tool")
CONTEXT_LOST = 70  # the exit code of a process whose GPU answers nothing but errors
PATHS, STEP = "FUSEDTRAIN_GPU_JOURNAL", "FUSEDTRAIN_GPU_STEP"


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


def died(begun: float, patience: float) -> str:
    """The outcome of a test, begun at that time, whose process is dead."""
    return "hung" if time.time() - begun > patience else "crashed"


class Run:
    """The plugin, in the process that collects and in the workers of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.step = os.environ[STEP]
        self.journal = Journal(*map(Path, os.environ[PATHS].split(os.pathsep)))
        self.progress = self.journal.progress(self.step)
        self.patience: float = self.progress.run["patience"]
        self.worker: str = getattr(config, "workerinput", {}).get("workerid", "")
        self.begun: dict[str, float] = {}
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
            self.begun[nodeid] = time.time()
            self.journal.append("start", self.step, id=nodeid, time=self.begun[nodeid])

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
            outcome = died(self.begun[report.nodeid], self.patience)
        reason = shown.longrepr  # of a skip: file, line, reason
        message = str(reason[2]) if isinstance(reason, tuple) else shown.longreprtext
        seconds = sum(r.duration for r in reports)
        self.journal.end(self.step, report.nodeid, outcome, message, seconds)

    def watch(self) -> None:
        """Ends this process unless the test ends in time, also where Python waits for a kernel."""
        # A second more: the journal's clock begins a little later.
        faulthandler.dump_traceback_later(self.patience + 1, file=self.stderr, exit=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        self.watch()  # pytest stops the watch at a failure

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """A fault of a kernel comes to light at the next wait: that is made part of the test."""
        result = yield
        wait_for_gpu()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Behind an illegal access every call fails: the rest is for another process."""
        self.watch()
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
