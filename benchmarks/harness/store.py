"""Rows go into the files of results as soon as they are measured: a run that is cut keeps them."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Collection, Generator, Sequence
from datetime import datetime, timezone
from functools import cache
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
    """The pytest plugin that stores rows, and shows those that no ``--store FILE`` asks for.

    Args:
        paths: the files, each of which gets every row.
        families: whose rows are dropped at the end of a complete run unless they were measured.
        show: prints the rows of a file; called at the end if there are no paths.
    """

    def __init__(
        self, paths: Sequence[Path], families: Sequence[str], show: Callable[[Path], object]
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.paths = paths or [Path(self._folder.name) / "rows.json"]
        self.families = families
        self.show = None if paths else show
        self.measured: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A row is stored once its test has passed."""
        report = yield
        race = getattr(item, "funcargs", {}).get("race")
        if call.when == "call" and report.passed and race is not None and race.entry:
            self.measured.add(item.nodeid)
            entry = {"name": item.name, "fullname": item.nodeid, **race.entry}
            for path in self.paths:
                put(path, {**provenance(), "benchmarks": [entry]})
        return report

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Drops stored rows that this run did not measure."""
        if exitstatus in COMPLETE:
            for path in self.paths:
                for family in self.families:
                    drop(path, family, self.measured)

    def pytest_terminal_summary(self) -> None:
        """Shows the rows."""
        if self.show is not None and self.measured:
            print()
            self.show(self.paths[0])


def provenance() -> dict[str, Any]:
    """Machine, commit and time of a row. The host's name and kernel are nobody's business."""
    from fusedtrain.advisor.bench.clock import device_name  # tools/gpu.py comes before the build

    cpu = {"brand_raw": device_name("cpu"), "count": os.cpu_count()}
    machine = {"machine": platform.machine(), "system": platform.system(), "cpu": cpu}
    return {
        "machine_info": {**machine, "python_version": platform.python_version()},
        "commit_info": _commit(),
        "datetime": datetime.now(timezone.utc).isoformat(),
    }


@cache
def _commit() -> dict[str, Any]:
    """The commit of the working tree; empty outside of a clone."""
    git = ["git", "-C", str(Path(__file__).parent)]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        head, changes = (
            subprocess.check_output([*git, *words], text=True, stderr=subprocess.DEVNULL).strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
        return {"id": head, "dirty": bool(changes)}
    return {}
