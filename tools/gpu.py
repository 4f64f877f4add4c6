"""`make gpu`: what only a machine with a GPU can tell. Installs nothing; uses its own python.

    python3 tools/gpu.py [all | build | cuda | triton | bench | experiments | sanitize | compile
                         | rest] [--minutes 9] [--keep] [--whole]

Every call goes on where the last one stopped, for the same sources, GPU and torch: the state is in
build/gpu. $RESULTS_DIR (default benchmarks/results) gets, as things happen, <device>-gpu.log,
<device>-gpu.jsonl (a line per test), <device>-gpu.xml (JUnit), <device>.json (benchmarks) and
experiments/<device>.json. A part takes 9 minutes at most. docs/gpu.md tells the rest. Without a GPU
each part starts all the same: a rehearsal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import _gpu_machine
import _gpu_numbers
from _gpu_journal import Journal
from _gpu_parts import STATE_RESULTS, Part, parts, sanitizer_refuses
from _gpu_steps import LEAST, ROOT, Context, not_run, run_step, summary, wanted
from benchmarks.experiments import FOLDER
from benchmarks.harness.store import drop

PART = 9 * 60.0  # seconds
NAMES = ("cuda", "triton", "bench", "experiments", "sanitize", "compile", "rest")
SHOWN = 5  # names of tests that did not run; the log and the XML have all


def run_part(c: Context, part: Part, deadline: float) -> str:
    """Runs the steps of a part that are not done.

    Returns:
        "done", "cut" or "broken".
    """
    state = "done"
    for step in part.steps:
        if not c.journal.done(step.name):
            ended = run_step(c, step, deadline)
            if ended == "done" and step.name.startswith("bench "):
                drop_old_rows(c, step.name)
            state = ended if state == "done" or ended == "cut" else state
        c.say(f"  {step.name}: {summary(c.journal.results(step.name))}")
    for step in part.steps:
        for name, result in c.journal.results(step.name).items():
            if result.bad:
                c.say(f"FAILED: {step.name}: {name}: {result.outcome}")
        if not c.journal.done(step.name):
            missing = not_run(c, step)
            if missing is None:
                c.say(f"NOT RUN: {step.name}: not begun")
                continue
            for number, name in enumerate(missing):
                (c.say if number < SHOWN else c.note)(f"NOT RUN: {step.name}: {name}")
            if len(missing) > SHOWN:
                c.say(f"NOT RUN: {step.name}: {len(missing) - SHOWN} more; the log has their names")
    return state


def drop_old_rows(c: Context, step: str) -> None:
    """Rows of an older run, which this one has not measured: they may be of ops that are wrong."""
    measured = {name for name, r in c.journal.results(step).items() if r.outcome == "passed"}
    for folder in (Path(os.environ["RESULTS_DIR"]), c.root / STATE_RESULTS):
        for path in folder.glob(f"{c.state.name}.json"):
            drop(path, step.removeprefix("bench "), measured)


def share(pattern: str, *folders: Path) -> None:
    """Each folder gets the files that another one has: either may be new at this call."""
    for source in folders:
        for path in source.glob(pattern):
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                if not (folder / path.name).exists():
                    shutil.copy2(path, folder)


def bad(c: Context, part: Part) -> bool:
    """Whether a test of the part failed."""
    return any(r.bad for step in part.steps for r in c.journal.results(step.name).values())


class Call:
    """One call of this file: some parts, within the time."""

    def __init__(self, c: Context, m: _gpu_machine.Machine, results: Path, minutes: float) -> None:
        self.c, self.m, self.results = c, m, results
        self.end = c.clock() + 60 * minutes if minutes else float("inf")
        self.known: dict[str, Part] = {}

    def deadline(self) -> float:
        return min(self.c.clock() + PART, self.end)

    def run(self, names: list[str], keep: bool, whole: bool) -> int:
        """Runs these parts; returns the exit code: 0 all is well, 1 a failure, 2 only cut."""
        c, m = self.c, self.m
        c.say(f"make gpu, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC: {m}")
        c.say(f"  {c.journal.begin(_gpu_machine.tree_key(m), keep)}")
        self.known = parts(m, whole)
        built = _gpu_machine.build(c, m, self.end)
        if built != "done":
            c.say("FAILED: build" if built == "broken" else "CUT: build; the same command goes on")
            return 1 if built == "broken" else 2
        header = f"{m}; {_gpu_machine.kernels(m.gpu)}"
        states = {}
        try:
            for name in names:
                states[name] = self._part(self.known[name], header)
        finally:
            self._write_xml()
        failed = [n for n, s in states.items() if s == "broken" or bad(c, self.known[n])]
        cut = [n for n, s in states.items() if s == "cut"]
        if failed:
            c.say(f"make gpu: failed: {', '.join(failed)}")
        if cut:
            c.say(f"make gpu: to be continued, the same command goes on: {', '.join(cut)}")
        c.say(f"make gpu: {'failed' if failed else 'cut' if cut else 'done'}; see {self.results}")
        return 1 if failed else 2 if cut else 0

    def _part(self, part: Part, header: str) -> str:
        c = self.c
        c.say(f"== gpu-{part.name}: {header}")
        c.say(f"  {part.title}")
        if part.skip:
            c.say(f"  skipped: {part.skip}")
            return "done"
        if self.deadline() - c.clock() < LEAST and not all(
            c.journal.done(s.name) for s in part.steps
        ):
            c.say("  not begun: the time of this call is up")
            return "cut"
        deadline = self.deadline()
        anew = part.name == "sanitize" and not any(c.journal.results(s.name) for s in part.steps)
        if anew and sanitizer_refuses(c, deadline):
            c.say("  skipped: compute-sanitizer does not run here")
            return "done"
        state = run_part(c, part, deadline)
        if part.name in ("bench", "compile"):
            path = self.results / f"{self.m.slug}.json"
            expected = _gpu_numbers.predictions(self.m.gpu, self.m.arch)
            for line in _gpu_numbers.table(path, expected):
                c.say(line)
        c.say(f"gpu-{part.name}: {state}{', with failures' if bad(c, part) else ''}")
        self._write_xml()
        return state

    def _write_xml(self) -> None:
        steps = [step for part in self.known.values() for step in part.steps]
        names = {step.name: wanted(self.c, step) or [] for step in steps}
        self.c.journal.junit(self.results / f"{self.m.slug}-gpu.xml", names)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("part", nargs="?", default="all", choices=("all", "build", *NAMES))
    parser.add_argument("--minutes", type=float, default=0.0, help="of this call; 0: no limit")
    parser.add_argument(
        "--keep", action="store_true",
        help="the sources have changed: keep what passed, run again what failed",
    )  # fmt: skip
    parser.add_argument("--whole", action="store_true", help="Triton: every case, no sample")
    options = parser.parse_args()
    if lacking := _gpu_machine.missing():
        print("make gpu cannot run:", *lacking, sep="\n  ")
        return 1
    m = _gpu_machine.machine()
    results = Path(os.environ.get("RESULTS_DIR") or ROOT / "benchmarks/results").resolve()
    state = ROOT / "build" / "gpu" / m.slug
    results.mkdir(parents=True, exist_ok=True)
    os.environ["RESULTS_DIR"] = str(results)
    for folder in (".", FOLDER):
        share(f"{m.slug}*.json", results / folder, ROOT / STATE_RESULTS / folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that children end with this
    with (results / f"{m.slug}-gpu.log").open("a") as log:

        def note(line: str) -> None:
            print(line, file=log, flush=True)

        def say(line: str) -> None:
            print(line, flush=True)
            note(line)

        name = f"{m.slug}-gpu.jsonl"
        c = Context(Journal(state / name, results / name), state, say, note, time.monotonic)
        names = [] if options.part == "build" else [options.part]
        call = Call(c, m, results, options.minutes)
        return call.run(
            list(NAMES) if options.part == "all" else names, options.keep, options.whole
        )


if __name__ == "__main__":
    sys.exit(main())
