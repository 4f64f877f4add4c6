"""`make gpu`: all that only a machine with a GPU can tell. Installs nothing; uses its python3.

    python3 tools/gpu.py [all | PART | build | predictions] [--minutes 9] [--keep]

Every call goes on where the last one stopped, for the same sources, GPU and torch: the state is in
build/gpu/results. $RESULTS_DIR (default benchmarks/results) gets all results as things happen.
docs/gpu.md has the rest. Without a GPU each part starts all the same: a rehearsal.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import _gpu_numbers
from _gpu_parts import STATE_RESULTS, Part, find, parts
from _gpu_plugin import SETTINGS, Journal
from _sanitized import setup_module

ROOT = Path(__file__).resolve().parent.parent
PART = 540.0  # seconds at a time of a part that has no limit
GRACE = 8.0  # seconds from SIGINT to SIGKILL
LEAST = GRACE + 17.0  # with fewer seconds left no process is started: pytest collects in 10 to 20
SHOWN = 5  # names of tests that did not run; the journal has all
say = partial(print, flush=True)
# Run in another process, since a process that has started CUDA keeps memory of the GPU.
ASK = """
import json, torch
facts = ["", "", torch.__version__, 0]
if torch.cuda.is_available():
    arch = "%d%d" % torch.cuda.get_device_capability()
    facts = [torch.cuda.get_device_name(), arch, torch.__version__, torch.cuda.mem_get_info()[1]]
print(json.dumps(facts))
"""
ASK_BACKENDS = """
import json, fusedtrain
backends = fusedtrain.backend_info().backends
print(json.dumps({name: "" if b.loaded else f"{name}: {b}" for name, b in backends.items()}))
"""


@dataclass(frozen=True)
class Machine:
    """A GPU (or "" for none) and the torch that drives it."""

    gpu: str
    arch: str
    torch: str
    memory: int = 0  # bytes of the GPU

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", (self.gpu or "no gpu").lower()).strip("-")

    @property
    def workers(self) -> int:
        """Test processes at a time: 8 GB of the GPU for each, for some tests take large tensors."""
        cores = os.cpu_count() or 2
        return max(1, min(8, cores, self.memory // (8 << 30))) if self.gpu else min(2, cores)

    def __str__(self) -> str:
        name = f"{self.gpu}, sm_{self.arch}" if self.gpu else "no GPU: what needs one is skipped"
        return f"{name}, torch {self.torch}, Python {sys.version.split()[0]}"


@functools.cache
def _ask(code: str) -> Any:
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = run.stdout.splitlines()
    return json.loads(lines[-1]) if run.returncode == 0 and lines else run.stderr[-2000:]


def machine() -> Machine:
    """This one."""
    facts = _ask(ASK)
    if isinstance(facts, str):
        raise SystemExit(f"make gpu cannot run: torch does not work:\n{facts}")
    return Machine(*facts)


def why_not(backend: str) -> str:
    """Why a backend is not loaded; "" where it is."""
    answer = _ask(ASK_BACKENDS)
    if isinstance(answer, str):
        return f"fusedtrain cannot be imported: {answer.splitlines()[-1] if answer else '?'}"
    return str(answer[backend])


def tree_key(m: Machine) -> str:
    """A key of test results: they do not hold for other sources, another GPU or torch."""
    state = hashlib.sha256(f"{m.gpu}\0{m.torch}".encode())
    kinds = {".py", ".h", ".cpp", ".cu", ".cuh"}
    folders = [ROOT / name for name in ("csrc", "fusedtrain", "tests", "benchmarks")]
    sources = [p for folder in folders for p in folder.rglob("*") if p.suffix in kinds]
    for path in sorted([*sources, ROOT / "setup.py"]):
        state.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return state.hexdigest()[:16]


@dataclass
class Context:
    """A call: its journal, the folder of its results, the time, and its end."""

    journal: Journal
    results: Path
    clock: Callable[[], float] = time.monotonic
    end: float = float("inf")
    root: Path = ROOT

    def run(
        self, command: Sequence[str], deadline: float, environment: Mapping[str, str]
    ) -> tuple[int, bool]:
        """Runs a command, which is over by the deadline: SIGINT asks it to end, so that it can say
        what it knows; later it is killed, and with it what it has left behind.

        Returns:
            its exit code, and whether the time was up.
        """
        say("$", *(f"{key}={value}" for key, value in environment.items()), *command)
        # Where this is itself a worker's test, pytest would take itself for that worker.
        ours = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        ours["PYTHONPATH"] = os.pathsep.join((str(self.root), str(ROOT / "tools")))
        begun, cut = self.clock(), False
        process = subprocess.Popen(
            command, cwd=self.root, env={**ours, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, preexec_fn=_with_parent,
        )  # fmt: skip
        try:
            for number, end in ((signal.SIGINT, deadline - GRACE), (signal.SIGKILL, deadline)):
                while process.poll() is None and self.clock() < end:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.25)
                if process.returncode is None:
                    cut = True
                    os.killpg(process.pid, number)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        why = "stopped by the time limit, " if cut else ""
        say(f"[{why}exit {code}, {self.clock() - begun:.0f} s]")
        return code, cut


def _with_parent() -> None:
    """In the child: a group of its own, and death with the parent, whatever kills that. SIGINT is
    heard again where a shell has switched it off, as one does for `make gpu &`."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def build(c: Context, m: Machine) -> int:
    """In place, for this GPU alone; files that will do are taken, wherever they come from: two have
    the stable ABI, and their sources are known by the contents. Returns the exit code."""
    package, nvcc = ROOT / "fusedtrain", bool(find("nvcc"))
    record = package / "_build_info.json"
    built = json.loads(record.read_text()) if record.exists() else {}
    fresh = built.get("sources") == setup_module().sources_key()
    lacks_cuda = nvcc and not (package / "_C_cuda.so").exists()
    lacks_cuda |= bool(nvcc and m.gpu and why_not("cuda"))
    if not fresh or lacks_cuda or why_not("cpu"):
        say(f"build: {'_C_cuda.so or _C.so is missing' if fresh else 'no files of these sources'}")
        environment = {"FUSEDTRAIN_REQUIRE": "cpu,cuda" if nvcc else "cpu"}
        environment |= {"FUSEDTRAIN_CUDA_ARCHS": m.arch} if m.arch else {}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        code, cut = c.run(command, c.end, environment)
        _ask.cache_clear()
        return 2 if cut else int(code != 0)
    say("build: the files are there, of these sources")
    if why_not("autograd"):  # that file is for one torch and one Python; its lack is no failure
        c.run([sys.executable, "-m", "fusedtrain", "build-autograd"], c.end, {})
        _ask.cache_clear()
    return 0


def run_part(c: Context, part: Part, deadline: float) -> bool:
    """Runs what has not run yet; returns whether the time was up before all had ended."""
    everything, fruitless = f"{part.name}: all", 0
    patience = min(part.patience, (part.seconds or PART) / 3)

    def judge(name: str, outcome: str, message: str) -> None:
        say(f"{outcome.upper()} {name}: {message}")
        c.journal.end(part.name, name, outcome, message)

    while fruitless < 2:
        if deadline - c.clock() < LEAST:
            return True
        ended = [*c.journal.progress(part.name).results]
        file = c.journal.paths[0].parent / "run.json"
        settings = {
            "step": part.name, "kind": part.kind, "sample": part.sample, "ended": ended,
            "patience": patience, "journal": [str(p.resolve()) for p in c.journal.paths],
        }  # fmt: skip
        file.write_text(json.dumps(settings))
        c.journal.append("run", part.name)
        command = [*part.command, "-p", "_gpu_plugin"]
        environment = {**part.environment, SETTINGS: str(file.resolve())}
        code, cut = c.run(command, deadline, environment)
        c.journal.append("ran", part.name)
        if part.alarm and code == part.alarm:
            judge(f"{part.name}: exit {code}", "failed", "the log says what it found")
        flying = c.journal.progress(part.name).flying
        # With several in flight nobody knows which one it was that ended the process.
        died = [*flying] if not cut and len(flying) == 1 else []
        hung = [name for name, begun in flying.items() if c.journal.now() - begun > patience]
        for name in died or hung:
            judge(name, "crashed", f"hung, or its process died: exit {code}")
        progress = c.journal.progress(part.name)
        if progress.done:
            if everything in progress.results:
                judge(everything, "passed", "an earlier call could not run it")
            return False
        if cut:
            return True
        fruitless = fruitless + 1 if len(progress.results) == len(ended) else 0
    judge(everything, "error", f"ends again and again without results: exit {code}")
    return False


def call(c: Context, m: Machine, name: str, keep: bool) -> int:
    """Runs a part, or all; returns the exit code: 0 all is well, 1 a failure, 2 only cut."""
    say(f"make gpu, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC: {m}")
    say(f"  {c.journal.begin(tree_key(m), keep)}")
    known = parts(m.gpu, m.slug, m.workers)
    chosen = [part for part in known if name in ("all", part.name, part.name.split()[0])]
    if not chosen and name != "build":
        names = dict.fromkeys(part.name.split()[0] for part in known)
        raise SystemExit(f"no part {name}: there are build, predictions, {', '.join(names)}")
    if code := build(c, m):
        say("CUT: build; the same command goes on" if code == 2 else "FAILED: build")
        return code
    why = why_not("cuda")
    header = f"{m}; {f'GPU run without _C_cuda.so: {why}' if why else '_C_cuda.so is loaded'}"
    begun: set[str] = set()
    limited = [part for part in chosen if part.seconds and name == "all"]
    for number, part in enumerate([*limited, *chosen]):
        had = c.journal.progress(part.name)
        seconds = part.seconds - had.seconds if number < len(limited) else PART
        if had.done or part.skip or min(seconds, c.end - c.clock()) < LEAST:
            continue
        say(f"== gpu-{part.name}: {header}")
        if part.probe and part.name not in begun and c.run(part.probe, c.clock() + 60, {})[0]:
            part.skip = f"{Path(part.probe[0]).name} does not run here"
        else:
            begun.add(part.name)
            run_part(c, part, min(c.clock() + seconds, c.end))
        _tell(c, part)
        if part.rows:
            rows = _gpu_numbers.measured(c.results / f"{m.slug}.json", m.gpu)
            say(*_gpu_numbers.table(rows, part.name == "rows"), sep="\n")
    left = [p.name for p in chosen if not p.skip and not c.journal.progress(p.name).done]
    failed = [p.name for p in chosen if c.journal.progress(p.name).bad]
    for words, names in (("failed", failed), ("to be continued, the same command goes on", left)):
        if names:
            say(f"make gpu: {words}: {', '.join(names)}")
    code, word = (1, "failed") if failed else (2, "cut") if left else (0, "done")
    say(f"make gpu: {word}; see {c.results}")
    return code


def _tell(c: Context, part: Part) -> None:
    """Prints the results of a part."""
    p = c.journal.progress(part.name)
    counts = Counter(e["outcome"] for e in p.results.values())
    words = ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()) or "no tests"
    say(f"gpu-{part.name}: {f'skipped: {part.skip}' if part.skip else words}, {p.seconds:.0f} s")
    for name in p.bad:
        lines = p.results[name]["message"].strip().splitlines() or ["?"]
        why = next((line for line in reversed(lines) if line.startswith("E ")), lines[-1])
        say(f"FAILED: {part.name}: {name}: {p.results[name]['outcome']}: {why[:300]}")
    for name in p.left[:SHOWN]:
        say(f"NOT RUN: {part.name}: {name}")
    if p.left[SHOWN:]:
        say(f"NOT RUN: {part.name}: {len(p.left) - SHOWN} more")


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


def share(slug: str, *folders: Path) -> None:
    """Each folder gets the results that it lacks and another one has: either may be new."""
    for source in folders:
        for path in [*source.glob(f"{slug}*.json*"), *source.glob(f"experiments/{slug}*.json*")]:
            for target in (folder / path.relative_to(source) for folder in folders):
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    shutil.copy2(path, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("part", nargs="?", default="all", help="all (default), build, or a part")
    parser.add_argument("--minutes", type=float, default=0.0, help="of this call; 0: no limit")
    keep = "the sources have changed: keep what passed, run again what failed"
    parser.add_argument("--keep", action="store_true", help=keep)
    options = parser.parse_args()
    if options.part == "predictions":  # on a CPU, before: the machine code takes half a minute
        return _gpu_numbers.predict()
    begun = time.monotonic()
    m = machine()
    results = Path(os.environ.get("RESULTS_DIR") or ROOT / "benchmarks/results").resolve()
    results.mkdir(parents=True, exist_ok=True)
    os.environ["RESULTS_DIR"] = str(results)
    folders = ROOT / STATE_RESULTS, results
    share(m.slug, *folders)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that children end with this
    end = begun + 60 * options.minutes if options.minutes else float("inf")
    journal = Journal(*(folder / f"{m.slug}-gpu.jsonl" for folder in folders))
    with logged(results / f"{m.slug}-gpu.log"):
        return call(Context(journal, results, end=end), m, options.part, options.keep)


if __name__ == "__main__":
    sys.exit(main())
