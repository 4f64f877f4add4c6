"""Runs generated programs, and tells those that fail: `make fuzz ARGS="--examples 2000"`."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Outcome, Task

# Shares of --examples, by which each family takes equally long.
SHARES = {"ops": 0.6, "optimizers": 0.32, "models": 0.02, "edits": 0.06}
EVERY = 5.0  # seconds between lines of progress


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, help="how many cases in all")
    parser.add_argument("--minutes", type=float, help="how long; 1 if neither this nor --examples")
    parser.add_argument(
        "--seed", type=int, help="the same seed draws the same programs; else a new one"
    )
    parser.add_argument("--only", choices=list(SHARES), help="one of the families")
    parser.add_argument("--name", default="", help="generators with this in their name")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--list", action="store_true", help="the names of the generators")
    parser.add_argument("--show", action="store_true", help="print the programs, do not run them")
    return parser.parse_args(arguments)


def _queue(
    options: argparse.Namespace, seed: int, families: list[str]
) -> dict[str, Iterator[Task]]:
    from .engine import tasks

    total = sum(SHARES[family] for family in families)
    return {
        family: tasks(
            family, seed, 10 if family == "models" else 20, options.name,
            10**9 if options.examples is None else round(options.examples * SHARES[family] / total),
        )
        for family in families
    }  # fmt: skip


class Progress:
    """Counts of the cases that have run, and a line about them now and then."""

    def __init__(self) -> None:
        self.began = self.last_report = time.time()
        self.ran: Counter[str] = Counter()
        self.aside: Counter[str] = Counter()
        self.spent: Counter[str] = Counter()
        self.failed: dict[str, Outcome] = {}

    def add(self, outcome: Outcome) -> None:
        family, name = outcome.task.family, outcome.task.name
        self.ran[family] += outcome.ran
        self.aside[family] += outcome.set_aside
        if outcome.failure is not None and name not in self.failed:
            self.failed[name] = outcome
            _tell(outcome)

    def tell(self, now: str) -> None:
        if time.time() - self.last_report >= EVERY:
            self.last_report = time.time()
            counts = ", ".join(f"{n} {family}" for family, n in self.ran.items())
            line = f"{counts or 'starting'}; {len(self.failed)} failed; at {now}"
            print(f"{self.last_report - self.began:4.0f} s: {line}", flush=True)

    def summary(self, families: list[str]) -> int:
        print(f"\nRan for {time.time() - self.began:.0f} s:")
        for family in families:
            aside = self.aside[family]
            rest = f", {aside} set aside (plain torch fails, or a known defect)" if aside else ""
            print(f"  {family}: {self.ran[family]} cases{rest}")
        if not self.failed:
            print("Nothing failed.")
            return 0
        print("Failed: " + ", ".join(self.failed) + ". The programs are above.")
        return 1


def _tell(outcome: Outcome) -> None:
    assert outcome.failure is not None
    alone = ""
    try:
        source = outcome.failure
        if "import timm" in source:  # it imports where torchvision is half installed, too
            source = "from helpers import models; models.timm()\n" + source
        path = os.pathsep.join(sys.path)
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, timeout=120,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        alone = "also alone in a new process" if done.returncode else "NOT alone in a new process"
    except subprocess.TimeoutExpired:
        alone = "and alone takes more than 2 minutes"
    line = "-" * 78
    first = outcome.error.strip().splitlines()
    print(f"\n{line}\n# {outcome.task.name} fails, {alone}:")
    print("\n".join(f"#   {text}" for text in first[:6] if text.strip()))
    print(f"\n{outcome.failure}{line}\n", flush=True)


def _next(queues: dict[str, Iterator[Task]], progress: Progress, busy: Counter[str]) -> Task | None:
    """Next task of the family with the least time so far. A failed generator is not tried again."""
    while queues:
        family = min(queues, key=lambda f: progress.spent[f] + busy[f])
        for task in islice(queues[family], len(_names(family))):
            if task.name not in progress.failed:
                return task
        del queues[family]
    return None


def _names(family: str) -> list[str]:
    from .engine import FAMILIES

    return list(FAMILIES[family])


def run(options: argparse.Namespace, seed: int, families: list[str], folder: str) -> int:
    from .engine import prepare, work  # heavy: the first line is on the screen

    progress = Progress()
    queues = _queue(options, seed, families)
    minutes = options.minutes or (None if options.examples else 1.0)
    deadline = float("inf") if minutes is None else progress.began + 60 * minutes
    waiting: dict[Future[Outcome], tuple[Task, float]] = {}
    now = "the start"
    with ProcessPoolExecutor(options.workers, get_context("spawn"), prepare) as pool:
        while True:
            while len(waiting) < options.workers and time.time() < deadline:
                busy: Counter[str] = Counter()
                for task, began in waiting.values():
                    busy[task.family] += int(time.time() - began) + 1
                following = _next(queues, progress, busy)
                if following is None:
                    break
                following.deadline = deadline
                waiting[pool.submit(work, following, folder)] = following, time.time()
                now = following.name
            if not waiting:
                return progress.summary(families)
            done, _ = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                task, began = waiting.pop(future)
                progress.spent[task.family] += time.time() - began
                try:
                    progress.add(future.result())
                except BrokenProcessPool:
                    print("\nA process died, while one of these programs ran:")
                    for note in sorted(Path(folder).glob("*.py")):
                        print("-" * 78 + f"\n{note.read_text()}")
                    return 1
            progress.tell(now)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"fuzz: seed {seed} (again: --seed {seed}), {options.workers} processes", flush=True)
    families = [options.only] if options.only else list(SHARES)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if options.list:
        for family in families:
            print(f"{family}: {' '.join(_names(family))}")
        return 0
    if options.show:
        from .engine import run_task

        for queue in _queue(options, seed, families).values():
            for task in queue:
                print("\n# ----\n".join(run_task(task, keep=True, run=False).programs))
        return 0
    # Workers spin for each other on a busy machine, and read the variable when they start.
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        return run(options, seed, families, folder)


if __name__ == "__main__":
    sys.exit(main())
