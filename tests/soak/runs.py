"""A run that is killed again and again beside one that is not, and whether they are the same."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import checkpoint, memory, worker

_MARGIN = 40  # steps to go when a run is told to end: both are still before it


class SoakError(Exception):
    """A process failed, or the curves differ."""


class Process:
    """A worker in its folder, started as often as it takes, and what its log says so far.

    It is forked from this process, which has imported everything and trained nothing: a resumed run
    inherits no state from the killed one, and is there within a blink, not 5 seconds.
    """

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        self.samples: list[memory.Sample] = []
        self.ended: int | None = None
        self._read = 0
        self._left: int | None = None  # when an unfinished checkpoint was last written to
        self.dying = False  # has been asked to die while it writes its next checkpoint
        self._arguments = [str(folder), *arguments]
        self.start()

    def start(self) -> None:
        self.dying = False
        self._process = multiprocessing.get_context("fork").Process(
            target=_work, args=(self._arguments, self.folder / "errors.txt"), daemon=True
        )
        self._process.start()

    @property
    def step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    def writing(self) -> int | None:
        """How many bytes of a checkpoint are written so far; None while none is being written."""
        try:
            status = checkpoint.temporary(self.folder / "checkpoint.pt").stat()
        except FileNotFoundError:
            return None
        # A killed process may have left its temporary file, which the next process finds.
        return None if status.st_mtime_ns == self._left else status.st_size

    def look(self) -> None:
        """Reads what the log has got; raises where the process has failed."""
        killed = self.dying and self._process.exitcode == -signal.SIGKILL
        alive = killed or self._process.is_alive()
        log = self.folder / "log.jsonl"
        if log.exists():
            with open(log, "rb") as file:
                file.seek(self._read)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in map(json.loads, whole.splitlines()):
                if "memory" in line:
                    self.samples.append(tuple(line["memory"]))
                elif "end" in line:
                    self.ended = line["end"]
                else:
                    self.rows.append(line)
        if not alive and self.ended is None:
            errors = (self.folder / "errors.txt").read_text()
            raise SoakError(f"a worker ended with status {self._process.exitcode}:\n{errors}")

    def die_while_writing(self, share: float) -> None:
        """The process shall get its SIGKILL where this share of its next checkpoint is written.

        A look from outside would come too late on a busy machine: a checkpoint takes a millisecond.
        """
        request = checkpoint.death(self.folder)
        request.with_suffix(".new").write_text(str(share))
        request.with_suffix(".new").replace(request)
        self.dying = True

    def dead(self) -> bool:
        return not self._process.is_alive()

    def kill(self) -> str:
        """SIGKILL; where it hit, in words."""
        self._process.kill()
        self._process.join()
        if self._process.exitcode != -signal.SIGKILL:
            return ""  # it was at its end already
        size = self.writing()
        if size is not None:
            left = checkpoint.temporary(self.folder / "checkpoint.pt")
            self._left = left.stat().st_mtime_ns
        with contextlib.suppress(SoakError):  # it has not ended by itself
            self.look()
        if size is None:
            return f"after step {self.step}"
        return f"writing the checkpoint of step {self.step} ({size:,} bytes were written)"

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _work(arguments: Sequence[str], errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    worker.main(arguments)


@dataclass
class Outcome:
    """Results of a pair of runs."""

    steps: int
    rows: int  # compared: the steps of the killed run, some of them made several times
    injected: int
    skipped: int
    kills: list[str]
    bits: int  # compared in digests
    digests: int
    growth: memory.Growth | None
    differences: list[str] = field(default_factory=list)

    @property
    def kills_while_writing(self) -> int:
        return sum("writing" in kill for kill in self.kills)

    def failures(self) -> list[str]:
        """Failures that a user must know of, in words."""
        messages = list(self.differences)
        if self.growth is not None and self.growth.too_much:
            messages.append(f"memory grows: {self.growth}")
        return messages


def differences(reference: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    """The first row that is not the reference's of that step; and infs that were not skipped."""
    truth = {row["step"]: row for row in reference}
    for row in rows:
        expected = truth.get(row["step"], {})
        wrong = [n for n in row.keys() | expected.keys() if row.get(n) != expected.get(n)]
        if wrong:
            pairs = (f"{n} is {row.get(n)}, not {expected.get(n)}" for n in sorted(wrong))
            return [f"step {row['step']} differs: {'; '.join(pairs)}"]
    missing = truth.keys() - {row["step"] for row in rows}
    if missing:
        return [f"{len(missing)} steps are missing, the first is {min(missing)}"]
    for row in reference:
        if row["injected"] is not None and not row["skipped"]:
            return [f"step {row['step']} was not skipped: {row['injected']}"]
    return []


class Killer:
    """Decides when the next SIGKILL comes: at a share of the run, and how."""

    def __init__(self, kills: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._shares = sorted(self._random.uniform(0.0, 0.95) for _ in range(kills))
        self._started_at = 0
        self.done: list[str] = []

    def visit(self, process: Process, share: float) -> None:
        """Kills the process and starts it again, where it is time."""
        if process.dying:
            if process.dead():
                self._restart(process)
            return
        if (
            len(self.done) == len(self._shares)
            or share < self._shares[len(self.done)]
            or process.step <= self._started_at  # let it live to see a step
            or process.ended is not None
        ):
            return
        if len(self.done) % 2 == 1:
            process.die_while_writing(self._random.random())
        else:
            time.sleep(self._random.uniform(0, 0.03))
            self._restart(process)

    def _restart(self, process: Process) -> None:
        hit = process.kill()
        if not hit:
            return
        process.start()
        self.done.append(hit)
        self._started_at = process.step


def run_pair(
    folder: Path, arguments: Sequence[str], kills: int, steps: int, seed: int, deadline: float,
    tell: Callable[[int, int, Sequence[str]], None], faults: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Both runs at once, to the last step or to the deadline.

    Args:
        folder: new; of logs and checkpoints.
        arguments: of the worker, for both.
        kills: how often one of them is killed.
        steps: the last step.
        seed: of the moments of the kills.
        deadline: by `time.monotonic`.
        tell: is called often with both steps and the kills so far.
        faults: arguments of the killed run alone, planted by tests.
    """
    arguments = [*arguments, "--seed", str(seed), "--steps", str(steps)]
    killer, started = Killer(kills, seed), time.monotonic()
    processes = []
    try:
        processes.append(reference := Process(folder / "uninterrupted", arguments))
        processes.append(killed := Process(folder / "killed", [*arguments, *faults]))
        told_to_end = False
        while reference.ended is None or killed.ended is None:
            for process in processes:
                process.look()
            now = time.monotonic()
            time_gone = (now - started) / (deadline - started)
            killer.visit(killed, max(killed.step / steps, time_gone))
            tell(reference.step, killed.step, killer.done)
            if not told_to_end and now > deadline:
                told_to_end = True
                _write_end(folder / "end", max(reference.step, killed.step) + _MARGIN)
            time.sleep(0.02)
    finally:
        for process in processes:
            process.stop()
    digests = [row for row in killed.rows if "digest" in row]
    return Outcome(
        steps=reference.step,
        rows=len(killed.rows),
        injected=sum(row["injected"] is not None for row in reference.rows),
        skipped=sum(row["skipped"] for row in reference.rows),
        kills=killer.done,
        bits=sum(row["bits"] for row in digests),
        digests=len(digests),
        growth=memory.growth(reference.samples),
        differences=differences(reference.rows, killed.rows),
    )


def _write_end(path: Path, step: int) -> None:
    """As a whole: the workers look at every step."""
    new = path.with_suffix(".new")
    new.write_text(str(step))
    new.replace(path)
