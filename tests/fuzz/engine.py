"""Draws programs with Hypothesis, runs them, and shrinks those that fail."""

from __future__ import annotations

import contextlib
import io
import os
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, strategies as st

from . import conversions, edits, known, modules, ops, optimizers

Programs = st.SearchStrategy[str]

# Family -> what is tried -> the programs of it.
FAMILIES: dict[str, dict[str, Callable[[], Programs]]] = {
    "ops": {**ops.PROGRAMS, **modules.PROGRAMS},
    "optimizers": optimizers.PROGRAMS,
    "models": conversions.PROGRAMS,
    "edits": edits.PROGRAMS,
}
SHRINK_SECONDS = 45.0
SLOW = {"sharded": 2}  # generators whose programs take 4 s, and their cases at a time


@dataclass
class Task:
    """Some cases of one generator, told by a seed."""

    family: str
    name: str
    seed: int
    cases: int
    deadline: float = float("inf")  # as time.time() counts
    shrink_seconds: float = SHRINK_SECONDS


@dataclass
class Outcome:
    """Result of a task."""

    task: Task
    ran: int = 0
    set_aside: int = 0  # programs that fail without fusedtrain, or show a known defect
    failure: str | None = None  # the shortest program that fails
    error: str = ""  # its last lines
    programs: list[str] = field(default_factory=list)


def run_program(source: str) -> str | None:
    """Runs a program as a script is run; returns its error, None where all is well.

    "" where plain torch cannot do what the program asks for: its line `want = ...` raises, or it
    exits by itself.
    """
    rng = torch.get_rng_state()
    modes = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            exec(compile(source, "<fuzz>", "exec"), {"__name__": "fuzzed"})
    except SystemExit:
        return ""
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next(f.lineno or 0 for f in frames if f.filename == "<fuzz>")
        if source.splitlines()[line - 1].lstrip().startswith("want = "):
            return ""
        return "".join(traceback.format_exception_only(error)).strip() or repr(error)
    finally:
        torch.set_rng_state(rng)
        torch.set_grad_enabled(modes[0])
        torch.set_default_dtype(modes[1])
    return None


def seed_of(seed: int, name: str, turn: int) -> int:
    return zlib.crc32(f"{seed}/{name}/{turn}".encode())


def run_task(
    task: Task, keep: bool = False, run: bool = True, notes: Path | None = None
) -> Outcome:
    """Draws and runs the cases of a task.

    Args:
        keep: whether the outcome is to have all the programs.
        run: whether to run them.
        notes: where the program that runs is written down, for those who find this process dead.
    """
    outcome = Outcome(task)
    until = task.deadline

    def case(source: str) -> None:
        nonlocal until
        if time.time() > until:
            return
        if keep:
            outcome.programs.append(source)
        if not run:
            return
        if notes is not None:
            notes.write_text(source)
        error = "" if known.known_in(source) else run_program(source)
        if error is None:
            outcome.ran += outcome.failure is None
        elif error == "":
            outcome.set_aside += outcome.failure is None
        else:
            if outcome.failure is None:
                outcome.ran += 1
                until = time.time() + task.shrink_seconds
            if outcome.failure is None or len(source) <= len(outcome.failure):
                outcome.failure, outcome.error = source, error
            raise AssertionError

    test = hypothesis.given(FAMILIES[task.family][task.name]())(case)
    test = hypothesis.settings(
        max_examples=task.cases,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )(test)
    test = hypothesis.seed(task.seed)(test)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            test()
        except Exception:
            # Hypothesis also objects to a shrink that is cut short (a failure that goes away).
            if outcome.failure is None:
                raise
    if notes is not None:
        notes.unlink(missing_ok=True)
    return outcome


def prepare() -> None:
    """One thread for a worker process."""
    torch.set_num_threads(1)


def work(task: Task, folder: str) -> Outcome:
    """Runs a task; the program of the moment is in the folder, should the process die."""
    return run_task(task, notes=Path(folder) / f"{os.getpid()}.py")


def tasks(family: str, seed: int, cases: int, only: str = "", most: int = 10**9) -> Iterator[Task]:
    """All generators of a family in turn, `cases` at a time, with other seeds every time round."""
    names = [name for name in FAMILIES[family] if only in name]
    turn = 0
    while names and most > 0:
        for name in names:
            if most <= 0:
                return
            some = min(SLOW.get(name, cases), most)
            yield Task(family, name, seed_of(seed, name, turn), some)
            most -= some
        turn += 1
