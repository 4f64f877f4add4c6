"""`make gpu`: what only a machine with a GPU can tell. Installs nothing; uses its own python.

    python3 tools/gpu.py [all | build | cuda | triton | bench | experiments | sanitize | compile
                         | rest] [--minutes 9] [--keep] [--whole] [--from FOLDER]

Every call goes on where the last one stopped, for the same sources, GPU and torch: the state is in
build/gpu, or comes from the results of another machine (--from). $RESULTS_DIR (default
benchmarks/results) gets, as things happen, <device>-gpu.log, <device>-gpu.jsonl (a line per test),
<device>-gpu.xml (JUnit), <device>.json (benchmarks) and experiments/<device>.json. A part takes 9
minutes at most. docs/gpu.md tells the rest. Without a GPU each part starts all the same: a
rehearsal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import _gpu_machine
from _gpu_journal import Journal
from _gpu_numbers import table
from _gpu_parts import STATE_RESULTS, Part, parts, sanitizer_refuses
from _gpu_steps import LEAST, ROOT, Context, run_step, say
from benchmarks.experiments import FOLDER
from benchmarks.harness.store import drop
from occupancy import predictions

NEEDED = ("torch", "pytest", "hypothesis", "ninja", "setuptools")
PART = 9 * 60.0  # seconds
NAMES = ("cuda", "triton", "bench", "experiments", "sanitize", "compile", "rest")
SHOWN = 5  # names of tests that did not run; the log and the XML have all


def call(c: Context, m: _gpu_machine.Machine, names: Sequence[str], keep: bool, whole: bool) -> int:
    """Runs these parts; returns the exit code: 0 all is well, 1 a failure, 2 only cut."""
    say(f"make gpu, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC: {m}")
    say(f"  {c.journal.begin(_gpu_machine.tree_key(m), keep)}")
    known = parts(m, whole)
    built = _gpu_machine.build(c, m, c.end)
    if built != "done":
        say("FAILED: build" if built == "broken" else "CUT: build; the same command goes on")
        return 1 if built == "broken" else 2
    header = f"{m}; {_gpu_machine.kernels(m.gpu)}"
    ends = {"cut": [], "failed": []}
    for part in (known[name] for name in names):
        say(f"== gpu-{part.name}: {header}\n  {part.title}")
        try:
            cut = run_part(c, part)
            if part.name in ("bench", "compile") and not part.skip:
                path, expected = c.results / f"{m.slug}.json", predictions(m.gpu, m.arch)
                say(*table(path, expected), sep="\n")
        finally:
            steps = [step.name for p in known.values() for step in p.steps]
            c.journal.junit(c.results / f"{m.slug}-gpu.xml", steps)
        failed = any(c.journal.progress(step.name).bad for step in part.steps)
        say(f"gpu-{part.name}: {'cut' if cut else 'done'}{', with failures' * failed}")
        ends["cut"] += [part.name] * cut
        ends["failed"] += [part.name] * failed
    if ends["failed"]:
        say(f"make gpu: failed: {', '.join(ends['failed'])}")
    if ends["cut"]:
        say(f"make gpu: to be continued, the same command goes on: {', '.join(ends['cut'])}")
    code, word = (1, "failed") if ends["failed"] else (2, "cut") if ends["cut"] else (0, "done")
    say(f"make gpu: {word}; see {c.results}")
    return code


def run_part(c: Context, part: Part) -> bool:
    """Runs the steps of a part that are not done; returns whether the time was up before."""
    deadline, cut = min(c.clock() + PART, c.end), False
    before = [c.journal.progress(step.name) for step in part.steps]
    if not part.skip and not all(p.done for p in before):
        if deadline - c.clock() < LEAST:
            say("  not begun: the time of this call is up")
            return True
        new = not any(p.results for p in before)
        if part.name == "sanitize" and new and sanitizer_refuses(c, deadline):
            part.skip = "compute-sanitizer does not run here"
    if part.skip:
        say(f"  skipped: {part.skip}")
        return False
    for step in part.steps:
        if not c.journal.progress(step.name).done:
            ended = run_step(c, step, deadline)
            cut = cut or ended == "cut"
            if ended == "done" and step.name.startswith("bench "):
                drop_old_rows(c, step.name)
        progress = c.journal.progress(step.name)
        counts = Counter(e["outcome"] for e in progress.results.values())
        words = ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common())
        say(f"  {step.name}: {words or 'no tests'}")
        for name in progress.bad:
            say(f"FAILED: {step.name}: {name}: {progress.results[name]['outcome']}")
        left = progress.left if progress.wanted is not None else ["not begun"]
        for name in left[:SHOWN]:
            say(f"NOT RUN: {step.name}: {name}")
        if left[SHOWN:]:
            with (c.results / f"{c.state.name}-gpu.log").open("a") as log:
                log.writelines(f"NOT RUN: {step.name}: {name}\n" for name in left[SHOWN:])
            say(f"NOT RUN: {step.name}: {len(left) - SHOWN} more; the log has their names")
    return cut


def drop_old_rows(c: Context, step: str) -> None:
    """Rows of an older run, which this one has not measured: they may be of ops that are wrong."""
    results = c.journal.progress(step).results
    measured = {name for name, e in results.items() if e["outcome"] == "passed"}
    for folder in (c.results, c.root / STATE_RESULTS):
        for path in folder.glob(f"{c.state.name}.json"):
            drop(path, step.removeprefix("bench "), measured)


def share(pattern: str, sources: Sequence[Path], targets: Sequence[Path]) -> None:
    """Each target gets the files that it lacks, of the first source that has them."""
    for path in (path for source in sources for path in source.glob(pattern)):
        for target in targets:
            target.mkdir(parents=True, exist_ok=True)
            if not (target / path.name).exists():
                shutil.copy2(path, target)


@contextlib.contextmanager
def logged(path: Path) -> Iterator[None]:
    """The log gets what this process and its children print."""
    # In a session of its own: a signal to all of this group leaves it alone.
    tee = subprocess.Popen(["tee", "-a", path], stdin=subprocess.PIPE, start_new_session=True)
    assert tee.stdin is not None
    stdout = os.dup(1)
    os.dup2(tee.stdin.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        tee.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            tee.wait(5)  # a process that has left its group may hold the pipe


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("part", nargs="?", default="all", choices=("all", "build", *NAMES))
    parser.add_argument("--minutes", type=float, default=0.0, help="of this call; 0: no limit")
    parser.add_argument(
        "--keep", action="store_true",
        help="the sources have changed: keep what passed, run again what failed",
    )  # fmt: skip
    parser.add_argument("--whole", action="store_true", help="Triton: every case, no sample")
    parser.add_argument("--from", dest="earlier", type=Path, help="results of an earlier call")
    options = parser.parse_args()
    if lacking := [name for name in NEEDED if find_spec(name) is None]:
        print(f"make gpu cannot run: not installed for {sys.executable}:", *lacking)
        return 1
    m = _gpu_machine.machine()
    results = Path(os.environ.get("RESULTS_DIR") or ROOT / "benchmarks/results").resolve()
    results.mkdir(parents=True, exist_ok=True)
    os.environ["RESULTS_DIR"] = str(results)
    targets = [results, ROOT / STATE_RESULTS]  # either may be new at this call
    sources = [*targets, *filter(None, [options.earlier])]
    for part in (".", FOLDER):
        share(f"{m.slug}*.json*", [s / part for s in sources], [t / part for t in targets])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that children end with this
    state, name = ROOT / "build" / "gpu" / m.slug, f"{m.slug}-gpu"
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    journal = Journal(*(target / f"{name}.jsonl" for target in reversed(targets)))
    names = {"all": NAMES, "build": ()}.get(options.part, (options.part,))
    with logged(results / f"{name}.log"):
        c = Context(journal, state, results, end=end)
        return call(c, m, names, options.keep, options.whole)


if __name__ == "__main__":
    sys.exit(main())
