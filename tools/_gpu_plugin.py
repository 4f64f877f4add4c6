"""The pytest plugin of `make gpu`: which tests a step has, and a journal line as each one ends.

``FUSEDTRAIN_GPU_STEP`` names a JSON file: the ``step`` and this ``run`` of it, the ``journal``'s
paths, the file ``done`` of tests that have ended, the file ``wanted`` for the names of all that the
step has, the ``kind`` of tests ("" for all), and whether a ``sample`` of them is enough.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from _gpu_journal import Journal, write

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.tiers import few

# On the compiler alone, or about the tools: CI has run them.
NO_GPU = ("test_triton.py::test_code", "test_triton.py::test_launches", "test_gpu_tool")
CONTEXT_LOST = 70  # the exit code of a process whose GPU answers nothing but errors


def kind_of(name: str) -> str:
    """Whose kernels the test is about: "cuda", "triton", or "rest"."""
    path, _, test = name.partition("::")
    file = path.rpartition("/")[2]
    words = set(re.split(r"[\[\]-]", test))
    if f"{file}::{test}".startswith(NO_GPU):
        return "rest"
    if file.startswith("test_triton") or "triton" in words:
        return "triton"
    if file.startswith("test_gpu") or "cuda" in words:
        return "cuda"
    return "rest"


class Step:
    """The plugin, in the process that collects and in the workers of pytest-xdist."""

    def __init__(self, plan: dict[str, Any], config: pytest.Config) -> None:
        self.plan = plan
        self.journal = Journal(*map(Path, plan["journal"]))
        self.worker: str = getattr(config, "workerinput", {}).get("workerid", "")
        self.reports: dict[str, list[pytest.TestReport]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Selects tests of the kind, the GPU's own files first; ended tests are left out."""
        kind = self.plan["kind"]
        chosen = [i for i in items if not kind or kind_of(i.nodeid) == kind]
        chosen.sort(key=lambda i: not i.path.name.startswith("test_gpu"))
        if self.plan["sample"]:
            of_each = few(chosen)
            chosen = [i for i in chosen if i in of_each]
        if self.worker in ("", "gw0"):
            write(Path(self.plan["wanted"]), json.dumps([i.nodeid for i in chosen]))
        done = set(json.loads(Path(self.plan["done"]).read_text()))
        chosen = [i for i in chosen if i.nodeid not in done]
        kept = set(chosen)
        config.hook.pytest_deselected(items=[i for i in items if i not in kept])
        items[:] = chosen

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.worker:
            self._end(report.nodeid, "error", 0.0, str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if not self.worker:
            now = time.time()
            self.journal.append(
                "start", self.plan["step"], run=self.plan["run"], id=nodeid, time=now
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worker:
            return
        reports = self.reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when in ("setup", "call"):
            return
        failed = [r for r in reports if r.failed]
        if failed:
            phases = {"call": "failed", "setup": "error", "teardown": "error"}
            outcome = phases.get(failed[0].when or "", "crashed")  # xdist says so of a dead worker
        elif any(hasattr(r, "wasxfail") for r in reports):
            outcome = "xfailed"
        else:
            outcome = "skipped" if any(r.skipped for r in reports) else "passed"
        shown = failed or [r for r in reports if r.skipped]
        message = "\n".join(_text(r) for r in shown)
        self._end(report.nodeid, outcome, sum(r.duration for r in reports), message)
        del self.reports[report.nodeid]

    def _end(self, name: str, outcome: str, seconds: float, message: str) -> None:
        self.journal.append(
            "test", self.plan["step"], run=self.plan["run"], id=name, outcome=outcome,
            seconds=round(seconds, 3), message=message[-4000:],
        )  # fmt: skip

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """A fault of a kernel comes to light at the next wait: that is made part of the test."""
        result = yield
        wait_for_gpu()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Behind an illegal access every call fails: the rest is for another process."""
        result = yield
        try:
            wait_for_gpu()
        except Exception as error:
            print(f"the GPU is lost to this process: {error}", file=sys.stderr, flush=True)
            os._exit(CONTEXT_LOST)
        return result


def _text(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return str(report.longrepr[2])
    return report.longreprtext


def wait_for_gpu() -> None:
    """Raises what the kernels of this process have left behind."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def pytest_configure(config: pytest.Config) -> None:
    plan = json.loads(Path(os.environ["FUSEDTRAIN_GPU_STEP"]).read_text())
    config.option.cases = "all"  # the step chooses
    config.pluginmanager.register(Step(plan, config))
