"""Results of experiments: a JSON file per device, written anew as soon as a run is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.experiments import FOLDER
from benchmarks.experiments.experiment import Run, Verdict
from benchmarks.harness.clock import setting
from benchmarks.harness.store import read, write
from benchmarks.run import results_path

QUICK = "-quick"  # how the names of files end whose numbers mean nothing
# Results are of the same kind where these fields are equal.
KIND = ("torch", "threads", "backend", "setup", "seed")


@dataclass
class Result:
    """An experiment as it was measured on a device.

    Args:
        machine: device, device_type, backend, torch, threads, allocator (`clock.setting`), seed.
        date: of the beginning, UTC.
        setup: the experiment's sentence, with these settings.
        runs: in the order in which they were measured.
        verdicts: one for each claim; none before all runs are measured.
        error: why the experiment failed; empty where the experiment did not fail.
        seconds: from the beginning to the last run.
    """

    machine: dict[str, Any]
    date: str
    setup: str
    runs: list[Run] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return bool(self.verdicts)

    def same_kind(self, other: Result) -> bool:
        """Whether the other result may stand in the place of this one."""
        first, second = (r.machine | {"setup": r.setup} for r in (self, other))
        return all(first.get(name) == second.get(name) for name in KIND)

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Result:
        """From JSON."""
        runs = [Run(**run) for run in entry["runs"]]
        verdicts = [Verdict(**verdict) for verdict in entry["verdicts"]]
        return cls(**{**entry, "runs": runs, "verdicts": verdicts})


def new_result(device: str, setup: str, seed: int) -> Result:
    """A result without runs, of this machine and moment."""
    machine = setting(device) | {"seed": seed}
    date = machine.pop("date")
    return Result(machine, date, setup)


def path_of(device: str, quick: bool) -> Path:
    """The file of this device: in ``$RESULTS_DIR`` or benchmarks/results."""
    path = results_path(device, QUICK.removeprefix("-") if quick else "")
    return path.parent / FOLDER / path.name


def load(path: Path) -> dict[str, Result]:
    """Name of an experiment -> result."""
    return {name: Result.parse(entry) for name, entry in read(path).items()}


def save(paths: Iterable[Path], name: str, result: Result) -> None:
    """Puts the result into the files, in the place of an older one of this name."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, read(path) | {name: asdict(result)})


def stored(folder: Path) -> Sequence[dict[str, Result]]:
    """The results of all devices, without those of smoke tests."""
    files = sorted((folder / FOLDER).glob("*.json"))
    return [load(path) for path in files if not path.stem.endswith(QUICK)]
