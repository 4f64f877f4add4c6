"""Tests that are collected once and run many times, each time in a fork of the process that
collected them: a run begins after milliseconds, and what it breaks or imports is gone with it."""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any


class Collected:
    """The tests that pytest finds in `tree` by `arguments`.

    Nothing that is going to change may be imported by the mere collection: a run sees the sources
    of the package as they are when the run imports them, and the tests as they were.
    """

    def __init__(
        self, tree: Path, arguments: list[str], modules: Iterable[str] = (), **environment: str
    ) -> None:
        """`modules` are imported once, for all runs."""
        self.log = tree / "collected.log"
        to_child, requests = os.pipe()
        answers, to_parent = os.pipe()
        sys.stdout.flush()
        self._process = os.fork()
        if self._process == 0:
            os.close(requests)
            os.close(answers)
            try:
                os.environ.update({"OMP_NUM_THREADS": "1", **environment})
                pipes = os.fdopen(to_child), os.fdopen(to_parent, "w")
                _serve(tree, arguments, modules, *pipes, self.log)
            finally:
                os._exit(70)
        os.close(to_child)
        os.close(to_parent)
        self._requests, self._answers = os.fdopen(requests, "w"), os.fdopen(answers)

    def run(self, files: Iterable[str], seconds: float, first: Iterable[str] = ()) -> str:
        """The first test that fails; "" where all pass. `files` may have the beginning of a name
        each: file::test_. Tests run in their order, but those named in `first` before all others.
        `seconds` are of the processor, which a busy machine does not shorten.
        """
        request = json.dumps([list(files), seconds, list(first)])
        print(request, file=self._requests, flush=True)
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError("the tests cannot be collected:\n" + self.log.read_text())
        return str(json.loads(answer))

    def judge(
        self, tests_of: Callable[[Any], tuple[str, ...]], mutants: Any, seconds: float
    ) -> Any:
        """A function that runs the tests of a mutant, first those that noticed one of the same
        tests before.

        Raises:
            RuntimeError: a test fails without a mutant.
        """
        limits, killers = {}, dict[tuple[str, ...], list[str]]()
        for tests in sorted({tests_of(m) for m in mutants}):
            began = time.monotonic()
            if broken := self.run(tests, 20 * seconds):
                raise RuntimeError(broken)
            # A mutant may be slower, and so may be the machine.
            limits[tests] = max(seconds, 4 * (time.monotonic() - began))

        def judged(mutant: Any) -> str:
            tests = tests_of(mutant)
            known = killers.setdefault(tests, [])
            killer = self.run(tests, limits[tests], known)
            if "::" in killer:
                known[:] = [killer, *(k for k in known if k != killer)]
            return killer

        return judged

    def close(self) -> None:
        self._requests.close()
        self._answers.close()
        os.waitpid(self._process, 0)


def _name(nodeid: str) -> str:
    return nodeid.split("/")[-1]


def is_of(nodeid: str, tests: str) -> bool:
    """`tests` is a file, or file::beginning of a name."""
    file, _, beginning = tests.partition("::")
    return nodeid.startswith(f"{file}::{beginning}")


def _serve(
    tree: Path, arguments: list[str], modules: Iterable[str],
    requests: IO[str], answers: IO[str], log: Path,
) -> None:  # fmt: skip
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = True  # a file may change twice within the second that it notices
    sys.path[:0] = [str(tree), str(tree / "tests")]
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    import fusedtrain

    for module in modules:
        importlib.import_module(module)
    assert Path(fusedtrain.__file__).is_relative_to(tree)

    class Plugin:
        failed: IO[str] | None = None

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self, session: Any) -> bool:
            for line in requests:
                files, seconds, first = json.loads(line)
                matching = [i for f in files for i in session.items if is_of(i.nodeid, f)]
                items = list(dict.fromkeys(matching))
                order = {name: place for place, name in enumerate(first)}
                items.sort(key=lambda item: order.get(_name(item.nodeid), len(order)))
                print(json.dumps(self.forked(items, seconds)), file=answers, flush=True)
            return True

        def forked(self, items: list[Any], seconds: float) -> str:
            if not items:
                return "there are no tests"
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    os.setsid()  # its own children end with it
                    limit = math.ceil(seconds)
                    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
                    self.failed = os.fdopen(writer, "w")
                    for item, following in zip(items, [*items[1:], None]):
                        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    os._exit(0)
                finally:
                    os._exit(70)
            os.close(writer)
            with os.fdopen(reader) as names:
                status = _wait(child, seconds)
                name = names.readline().strip() if status is not None else ""
            if status == 0:
                return ""
            return name or (f"not done after {seconds:g} s" if status is None else f"exit {status}")

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed and self.failed is not None:
                print(_name(report.nodeid), file=self.failed, flush=True)
                print(report.longreprtext, flush=True)
                os._exit(1)

    # No terminal reporter: it would print a line for each test.
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:randomly"]
    pytest.main([*options, *arguments], plugins=[Plugin()])
    os._exit(0)


def _wait(child: int, seconds: float) -> int | None:
    """The exit status, or None after so much processor time, or ten times as much by the clock."""
    end = time.monotonic() + 10 * seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return None if code == -signal.SIGXCPU else code
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
