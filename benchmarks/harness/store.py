"""Rows go into the files of results as soon as they are measured: a run that is cut keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

# Families of the files bench_<family>.py, which the names of stored rows begin with.
FAMILIES = tuple(
    sorted(
        path.stem.removeprefix("bench_")
        for path in Path(__file__).resolve().parent.parent.glob("bench_*.py")
    )
)
COMPLETE = (0, 1)  # pytest's exit codes of a run to the end: all passed, some failed


def read(path: Path) -> dict[str, Any]:
    """The results in a file; none where there is no file."""
    if not path.exists():
        return {}
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def write(path: Path, results: dict[str, Any]) -> None:
    """Whole or not at all: who is killed here leaves the file as it was."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(results, indent=4) + "\n")
    fresh.replace(path)


def put(path: Path, results: dict[str, Any]) -> None:
    """Adds the rows of these results to the file, in the place of those of the same names."""
    before = read(path)
    fresh = {entry["fullname"]: entry for entry in results["benchmarks"]}
    entries = [fresh.pop(e["fullname"], e) for e in before.get("benchmarks", [])]
    write(path, before | results | {"benchmarks": [*entries, *fresh.values()]})


def drop(path: Path, family: str, measured: Collection[str]) -> None:
    """Takes out what a complete run of the family has not measured: rows of what is no more."""
    before = read(path)
    of_family = f"bench_{family}.py::"
    entries = [
        entry
        for entry in before.get("benchmarks", [])
        if of_family not in entry["fullname"] or entry["fullname"] in measured
    ]
    if entries != before.get("benchmarks", []):
        write(path, before | {"benchmarks": entries})


class Recorder:
    """The pytest plugin behind ``--store FILE``.

    Args:
        config: of pytest.
        paths: the files, each of which gets every row.
        families: whose rows are dropped at the end of a complete run unless they were measured.
    """

    def __init__(
        self, config: pytest.Config, paths: Sequence[Path], families: Sequence[str]
    ) -> None:
        self.config = config
        self.paths = paths
        self.families = families
        self.measured: set[str] = set()
        self._seen = 0
        self._header: dict[str, Any] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A row is stored once its test has passed."""
        report = yield
        benchmarks = self.config._benchmarksession.benchmarks  # type: ignore[attr-defined]
        if call.when == "call":
            fresh, self._seen = benchmarks[self._seen :], len(benchmarks)
            if report.passed and fresh:
                self._store(fresh)
        return report

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Drops stored rows that this run did not measure."""
        if exitstatus in COMPLETE:
            for path in self.paths:
                for family in self.families:
                    drop(path, family, self.measured)

    def _store(self, benchmarks: Sequence[Any]) -> None:
        hook, session = self.config.hook, self.config._benchmarksession  # type: ignore[attr-defined]
        if not self._header:
            commit = hook.pytest_benchmark_generate_commit_info(config=self.config)
            self._header = {"machine_info": session.get_machine_info(), "commit_info": commit}
        results = hook.pytest_benchmark_generate_json(
            config=self.config, benchmarks=benchmarks, include_data=False, **self._header
        )
        hook.pytest_benchmark_update_json(
            config=self.config, benchmarks=benchmarks, output_json=results
        )
        self.measured.update(entry["fullname"] for entry in results["benchmarks"])
        for path in self.paths:
            put(path, results)
