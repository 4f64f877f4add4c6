"""A small project whose tests `make gpu` runs, and its clock."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import _gpu_parts
import gpu
from _gpu_parts import Part, pytest_command
from _gpu_plugin import Journal
from gpu import GRACE, Context, Machine

H200 = Machine("NVIDIA H200", "90", "2.11.0+cu130", 139 << 30)


def parts_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """The parts of a machine with a GPU and all programs, which this process takes for its own."""
    found = _gpu_parts.find
    monkeypatch.setattr(_gpu_parts, "find", lambda name: found(name) or f"/somewhere/{name}")
    parts = _gpu_parts.parts(H200.gpu, H200.slug, 8)
    monkeypatch.setattr(gpu, "parts", lambda *facts: parts)
    monkeypatch.setattr(gpu, "why_not", lambda backend: "")
    monkeypatch.setattr(gpu, "tree_key", lambda m: "tree")
    monkeypatch.setattr(gpu, "build", lambda c, m: 0)
    return parts


SPEED = 2
# The clock stands still until a slow test has begun. Then it is JUMP, GRACE before DEADLINE.
JUMP, DEADLINE = 100.0, 100.0 + GRACE

# A test's action is in a file, so that a second call finds the machine mended.
TESTS = """
import os, pathlib, pytest, signal, time
HERE = pathlib.Path(__file__).parent
NAMES = {names!r}

@pytest.mark.parametrize("name", NAMES)
def test_it(name):
    with (HERE / "ran").open("a") as log:
        print(name, file=log)
    what = (HERE / name).read_text() if (HERE / name).exists() else ""
    if what == "slow":
        time.sleep(100)
    elif what == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(100)
    elif what == "fail":
        raise AssertionError("wrong numbers \\x1b[31m in red")
    elif what:
        os.kill(os.getpid(), getattr(signal, what))
"""


class Project:
    """Tests by name, and what each does: "" passes; "slow", "deaf", "fail", or a signal's name."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder / "project"
        self.folder.mkdir()
        self.results = folder / "results"
        self.names = names
        (self.folder / "test_small.py").write_text(TESTS.format(names=list(names)))
        (self.folder / "pytest.ini").write_text("[pytest]\n")
        self.slow: set[str] = set()
        self._begun: float | None = None

    def clock(self) -> float:
        """Seconds."""
        if self._begun is None and self.slow & {*self.ran()}:
            self._begun = time.monotonic()
        return 0.0 if self._begun is None else JUMP + SPEED * (time.monotonic() - self._begun)

    def does(self, name: str, what: str) -> None:
        (self.slow.add if what in ("slow", "deaf") else self.slow.discard)(name)
        self._begun = None
        (self.folder / name).write_text(what)

    def ran(self) -> list[str]:
        """The names of all tests that were begun, by all processes."""
        path = self.folder / "ran"
        return path.read_text().split() if path.exists() else []

    def context(self) -> Context:
        """As a new call makes it."""
        state = self.folder / "build/gpu/results"
        journal = Journal(state / "a-gpu.jsonl", self.results / "a-gpu.jsonl")
        journal.begin("tree", keep=False)
        return Context(journal, self.results, self.clock, root=self.folder)

    def part(self, name: str = "cuda", workers: int = 0, patience: float = 180.0) -> Part:
        if workers:
            pytest.importorskip("xdist")
        # Plugins that take 2.5 of the 3.2 s of a start.
        unused = [f"-pno:{plugin}" for plugin in ("hypothesispytest", "benchmark", "anyio")]
        command = [*pytest_command(workers), *unused]
        return Part(name, command, patience=patience)

    def outcomes(self, step: str = "cuda") -> dict[str, str]:
        """From the copy of the journal that lies with the results."""
        results = Journal(self.results / "a-gpu.jsonl").progress(step).results
        return {
            name.partition("[")[2].rstrip("]") or name: e["outcome"] for name, e in results.items()
        }


PREDICTED = {("pool", "", "forward", "float16"): 600.0, ("pool", "", "forward", "float32"): 1.0}


def rows(path: Path, first: bool = False) -> list[str]:
    """Writes a file of results, and returns the names of its rows."""
    entries: list[dict[str, Any]] = [
        {"fullname": "benchmarks/bench_memory.py::t", "extra_info": {"op": "memory"}}
    ]
    for op, numel, speed in (("a", 10, 900.0), ("b", 7, 50.0), ("a", 1000, 580.0)):
        info = {"op": op, "pass": "forward", "dtype": "float16", "numel": numel,
                "gb_per_s": {"fusedtrain": speed}, "percent_of_copy": 80.0,
                "first": first}  # fmt: skip
        entries.append(
            {"fullname": f"benchmarks/bench_pool.py::t[{op}{numel}]", "extra_info": info}
        )
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"benchmarks": entries}))
    return [str(entry["fullname"]) for entry in entries]
