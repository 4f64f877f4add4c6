"""`make gpu`: what only a machine with a GPU can tell. Installs nothing; uses its own python.

    python3 tools/gpu.py [all | PART] [--minutes 9] [--keep] [--whole] [--from FOLDER]

Every call goes on where the last one stopped, for the same sources, GPU and torch: the state is in
build/gpu, or comes from the results of another machine (--from). $RESULTS_DIR (default
benchmarks/results) gets all results as things happen. docs/gpu.md tells the rest. Without a GPU
each part starts all the same: a rehearsal.
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
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import _gpu_machine
from _gpu_numbers import measured, predicted, table
from _gpu_parts import PART, STATE_RESULTS, Part, parts, sanitizer_refuses
from _gpu_plugin import Journal
from _gpu_steps import LEAST, ROOT, Context, run_step, say
from benchmarks.experiments import FOLDER
from benchmarks.harness.store import drop

SHOWN = 5  # names of tests that did not run; the XML has all


def call(c: Context, m: _gpu_machine.Machine, name: str, keep: bool, whole: bool) -> int:
    """Runs a part, or all; returns the exit code: 0 all is well, 1 a failure, 2 only cut."""
    say(f"make gpu, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC: {m}")
    say(f"  {c.journal.begin(_gpu_machine.tree_key(m), keep)}")
    known = parts(m, whole)
    if name not in ("all", "build", *known):
        raise SystemExit(f"no part {name}: there are build, {', '.join(known)}")
    built = _gpu_machine.build(c, m, c.end)
    if built != "done":
        say("FAILED: build" if built == "broken" else "CUT: build; the same command goes on")
        return 1 if built == "broken" else 2
    why = _gpu_machine.why_not("cuda")
    header = f"{m}; {f'GPU run without _C_cuda.so: {why}' if why else '_C_cuda.so is loaded'}"
    chosen = [part for part in known.values() if name in ("all", part.name)]
    limited = [part for part in chosen if part.seconds and name == "all"]
    cut: dict[str, bool] = {}
    for number, part in enumerate([*limited, *chosen]):
        steps = [c.journal.progress(step.name) for step in part.steps]
        had = sum(step.seconds for step in steps)
        seconds = part.seconds - had if number < len(limited) else PART
        begins = seconds >= LEAST and (c.end - c.clock() >= LEAST or all(p.done for p in steps))
        if begins and cut.get(part.name, True):
            say(f"== gpu-{part.name}: {header}")
            try:
                cut[part.name] = run_part(c, part, min(c.clock() + seconds, c.end))
                if part.name in ("rows", "bench", "compile") and not part.skip:
                    rows = measured(c.results / f"{m.slug}.json", predicted(m.gpu, m.arch))
                    say(*table(rows, part.name == "rows"), sep="\n")
            finally:
                every = [step.name for p in known.values() for step in p.steps]
                c.journal.junit(c.results / f"{m.slug}-gpu.xml", every)
            bad = any(c.journal.progress(step.name).bad for step in part.steps)
            say(f"gpu-{part.name}: {'cut' if cut[part.name] else 'done'}{', with failures' * bad}")
    failed = [p.name for p in chosen if any(c.journal.progress(s.name).bad for s in p.steps)]
    if failed:
        say(f"make gpu: failed: {', '.join(failed)}")
    if to_do := [part.name for part in chosen if cut.get(part.name, True)]:
        say(f"make gpu: to be continued, the same command goes on: {', '.join(to_do)}")
    code, word = (1, "failed") if failed else (2, "cut") if to_do else (0, "done")
    say(f"make gpu: {word}; see {c.results}")
    return code


def run_part(c: Context, part: Part, deadline: float) -> bool:
    """Runs the steps of a part that are not done; returns whether the time was up before."""
    cut = False
    new = not any(c.journal.progress(step.name).results for step in part.steps)
    probed = part.name in ("memcheck", "sanitize") and part.steps and new
    if probed and sanitizer_refuses(c, deadline):
        part.skip, part.steps = "compute-sanitizer does not run here", []
    if part.skip:
        say(f"  skipped: {part.skip}")
    for step in part.steps:
        if not c.journal.progress(step.name).done:
            cut = run_step(c, step, deadline) or cut
            if step.name.startswith("bench ") and c.journal.progress(step.name).done:
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
            say(f"NOT RUN: {step.name}: {len(left) - SHOWN} more; the XML has their names")
    return cut


def drop_old_rows(c: Context, step: str) -> None:
    """Rows of an older run, which this one has not measured: they may be of ops that are wrong."""
    results = [e for s in (step, "rows") for e in c.journal.progress(s).results.values()]
    names = {e["id"] for e in results if e["outcome"] == "passed"}
    for folder in (c.results, c.root / STATE_RESULTS):
        drop(folder / f"{c.device}.json", step.removeprefix("bench "), names)


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
    parser.add_argument("part", nargs="?", default="all", help="all (default), build, or a part")
    parser.add_argument("--minutes", type=float, default=0.0, help="of this call; 0: no limit")
    keep = "the sources have changed: keep what passed, run again what failed"
    parser.add_argument("--keep", action="store_true", help=keep)
    parser.add_argument("--whole", action="store_true", help="Triton: every case, no sample")
    parser.add_argument("--from", dest="earlier", type=Path, help="results of an earlier call")
    options = parser.parse_args()
    begun = time.monotonic()
    m = _gpu_machine.machine()
    results = Path(os.environ.get("RESULTS_DIR") or ROOT / "benchmarks/results").resolve()
    results.mkdir(parents=True, exist_ok=True)
    os.environ["RESULTS_DIR"] = str(results)
    targets = [results, ROOT / STATE_RESULTS]  # either may be new at this call
    sources = [*targets, *filter(None, [options.earlier])]
    for part in (".", FOLDER):
        share(f"{m.slug}*.json*", [s / part for s in sources], [t / part for t in targets])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that children end with this
    end = begun + 60 * options.minutes if options.minutes else float("inf")
    journal = Journal(*(target / f"{m.slug}-gpu.jsonl" for target in reversed(targets)))
    with logged(results / f"{m.slug}-gpu.log"):
        c = Context(journal, m.slug, results, end=end)
        return call(c, m, options.part, options.keep, options.whole)


if __name__ == "__main__":
    sys.exit(main())
