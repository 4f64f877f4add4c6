"""`make gpu`: all that only a machine with a GPU can tell. Installs nothing; uses its python3.

    python3 tools/gpu.py [all | PART | build | predictions] [--minutes 9]

Every call goes on where the last one stopped, for the same sources, GPU and torch: the state is in
build/gpu/results. $RESULTS_DIR (default benchmarks/results) gets all results as things happen.
docs/make_gpu.md has the rest. Without a GPU each part starts all the same: a rehearsal.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import _gpu_numbers
import occupancy
from _checkout import setup_module
from _gpu_parts import FOUND, PART, STATE_RESULTS, Part, find, parts
from _gpu_plugin import SETTINGS, Journal, Progress

ROOT = occupancy.ROOT
GRACE = 8.0  # seconds from SIGINT to SIGKILL
LEAST = GRACE + 17.0  # with fewer seconds left no process is started: pytest collects in 10 to 20
say = partial(print, flush=True)
# Run in another process, since a process that has started CUDA keeps memory of the GPU.
ASK = """
import json, torch
facts = ["", "", torch.__version__, 0]
if torch.cuda.is_available():
    arch = "%d%d" % torch.cuda.get_device_capability()
    facts = [torch.cuda.get_device_name(), arch, torch.__version__, torch.cuda.mem_get_info()[1]]
print(json.dumps(facts))
import fusedtrain
backends = fusedtrain.backend_info().backends
print(json.dumps({name: f"{name}: {b}" for name, b in backends.items() if not b.loaded}))
"""


class Machine(NamedTuple):
    """A GPU ("" for none), the torch that drives it, and why backends are not loaded."""

    gpu: str
    arch: str
    torch: str
    memory: int  # bytes of the GPU
    missing: Mapping[str, str]

    def __str__(self) -> str:
        name = f"{self.gpu}, sm_{self.arch}" if self.gpu else "no GPU: what needs one is skipped"
        cuda = self.missing.get("cuda")
        loaded = f"GPU run without _C_cuda.so: {cuda}" if cuda else "_C_cuda.so is loaded"
        return f"{name}, torch {self.torch}, Python {sys.version.split()[0]}; {loaded}"


def machine() -> Machine:
    """This one."""
    run = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    facts = [json.loads(line) for line in run.stdout.splitlines()]
    if not facts:
        raise SystemExit(f"make gpu cannot run: torch does not work:\n{run.stderr[-2000:]}")
    why = f"fusedtrain cannot be imported: {run.stderr[-300:].strip()}"
    return Machine(*facts[0], *facts[1:] or [{"cpu": why, "cuda": why}])


def slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", (gpu or "no gpu").lower()).strip("-")


def tree_key(m: Machine) -> str:
    """A key of test results: they do not hold for other sources, another GPU or torch."""
    state = hashlib.sha256(f"{m.gpu}\0{m.torch}".encode())
    folders = [ROOT / name for name in ("csrc", "fusedtrain", "tests", "benchmarks")]
    sources = [path for folder in folders for path in folder.rglob("*.*")]
    for path in sorted([*sources, ROOT / "setup.py"]):
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh"):
            state.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return state.hexdigest()[:16]


@dataclass
class Call:
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
        begun, seconds = self.clock(), deadline - self.clock() - GRACE
        limit = str(max(1.0, seconds)) if seconds < float("inf") else "0"  # none
        process = subprocess.Popen(
            ["timeout", "--signal=INT", f"--kill-after={GRACE}", limit, *command], cwd=self.root,
            env={**ours, "PYTHONUNBUFFERED": "1", **environment}, stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT, preexec_fn=_with_parent,
        )  # fmt: skip
        try:
            code = process.wait()
        finally:  # `timeout` has made a group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        cut = self.clock() > deadline - GRACE  # the code may be that of the command
        why = "stopped by the time limit, " if cut else ""
        say(f"[{why}exit {code}, {self.clock() - begun:.0f} s]")
        return code, cut


def _with_parent() -> None:
    """In the child: `timeout` ends with its parent, whatever kills that. SIGINT is heard again
    where a shell has switched it off, as one does for `make gpu &`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def build(c: Call, m: Machine) -> tuple[int, Machine]:
    """In place, for this GPU alone; files that will do are taken, wherever they come from: two have
    the stable ABI, and their sources are known by the contents. Returns the exit code, and what is
    loaded now."""
    package, nvcc = ROOT / "fusedtrain", bool(find("nvcc"))
    record = package / "_build_info.json"
    built = json.loads(record.read_text()) if record.exists() else {}
    no_cuda = "cuda" in m.missing if m.gpu else not (package / "_C_cuda.so").exists()
    stale = built.get("sources") != setup_module().sources_key()
    if stale or "cpu" in m.missing or (nvcc and no_cuda):
        say("build: _C.so or _C_cuda.so is missing, or of other sources")
        environment = {"FUSEDTRAIN_REQUIRE": "cpu,cuda" if nvcc else "cpu"}
        environment |= {"FUSEDTRAIN_CUDA_ARCHS": m.arch} if m.arch else {}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        code, cut = c.run(command, c.end, environment)
        return 2 if cut else int(code != 0), machine()
    say("build: the files are there, of these sources")
    if "autograd" in m.missing:  # that file is for one torch and one Python; its lack is no failure
        c.run([sys.executable, "-m", "fusedtrain", "build-autograd"], c.end, {})
        m = machine()
    return 0, m


def run_part(c: Call, part: Part, deadline: float) -> None:
    """Runs what has not run yet, until all has ended or the time is up."""
    patience = min(part.patience, (part.seconds or PART) / 3)
    settings = {"step": part.name, "kind": part.kind, "patience": patience,
                "journal": [str(path.resolve()) for path in c.journal.paths]}  # fmt: skip
    environment = {**part.environment, SETTINGS: json.dumps(settings)}
    fruitless = 0

    def judge(name: str, outcome: str, message: str) -> None:
        say(f"{outcome.upper()} {name}: {message}")
        c.journal.add(part.name, outcome, id=name, message=message)

    while deadline - c.clock() >= LEAST:
        c.journal.add(part.name, "run")
        code, cut = c.run([*part.command, "-p", "_gpu_plugin"], deadline, environment)
        c.journal.add(part.name, "ran")
        if code == FOUND:
            judge(f"{part.name}: exit {code}", "failed", "the log says what it found")
        flying = c.journal.steps()[part.name].flying
        for name, begun in flying.items():
            # With several in flight nobody knows which one it was that ended the process.
            if c.journal.now() - begun > patience or (not cut and len(flying) == 1):
                judge(name, "crashed", f"hung, or its process died: exit {code}")
        p = c.journal.steps()[part.name]
        if cut or p.done:
            return
        fruitless = 0 if len(p.results) > len(p.ended) else fruitless + 1
        if fruitless == 2:
            judge(part.name, "failed", f"ends again and again without results: exit {code}")
            return


def call(c: Call, m: Machine, name: str) -> int:
    """Runs a part, or all; returns the exit code: 0 all is well, 1 a failure, 2 only cut."""
    known = parts(m.gpu, slug(m.gpu), min(8, os.cpu_count() or 2, m.memory >> 33) if m.gpu else 2)
    chosen = [part for part in known if name in ("all", part.name, part.name.split()[0])]
    if not chosen and name != "build":
        names = dict.fromkeys(part.name.split()[0] for part in known)
        raise SystemExit(f"no part {name}: there are build, predictions, {', '.join(names)}")
    steps = c.journal.steps()
    kept = sum(len(p.results) for p in steps.values())
    say(f"make gpu, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}: {m}")
    say(f"  goes on behind {kept} results" if kept else "  from the beginning")
    code, m = build(c, m)
    if code:
        say("CUT: build; the same command goes on" if code == 2 else "FAILED: build")
        return code
    limited = [part for part in chosen if part.seconds and name == "all"]
    refused: dict[str, int] = {}  # exit codes by probe
    for number, part in enumerate([*limited, *chosen]):
        p = steps[part.name]
        seconds = part.seconds - p.seconds if number < len(limited) else PART
        deadline = min(c.clock() + seconds, c.end)
        if p.done or part.skip or deadline - c.clock() < LEAST:
            continue
        say(f"== gpu-{part.name}: {m}")
        if part.probe and part.probe not in refused:
            command = ["sh", "-c", part.probe]
            refused[part.probe] = c.run(command, min(c.clock() + 60, deadline), {})[0]
        if refused.get(part.probe):
            part.skip = f"this fails here: {part.probe}"
        else:
            run_part(c, part, deadline)
        steps = c.journal.steps()
        _tell(part, steps[part.name])
        if part.name == "rows":
            path = c.results / f"{slug(m.gpu)}.json"
            say(_gpu_numbers.table(_gpu_numbers.first_rows(path, m.gpu)))
    left = [part.name for part in chosen if not part.skip and not steps[part.name].done]
    failed = [part.name for part in chosen if steps[part.name].bad]
    for words, names in (("failed", failed), ("to be continued, the same command goes on", left)):
        if names:
            say(f"make gpu: {words}: {', '.join(names)}")
    code, word = (1, "failed") if failed else (2, "cut") if left else (0, "done")
    say(f"make gpu: {word}; see {c.results}")
    return code


def _tell(part: Part, p: Progress) -> None:
    """Prints the results of a part."""
    counts = Counter(e["event"] for e in p.results.values())
    words = ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()) or "no tests"
    words += f"; {len(p.left)} NOT RUN, first {p.left[0]}" if p.left else ""
    say(f"gpu-{part.name}: {f'skipped: {part.skip}' if part.skip else words}; {p.seconds:.0f} s")
    for name in p.bad:
        lines = p.results[name]["message"].strip().splitlines() or ["?"]
        why = next((line for line in reversed(lines) if line.startswith("E ")), lines[-1])
        say(f"{p.results[name]['event'].upper()}: {part.name}: {name}: {why[:300]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("part", nargs="?", default="all", help="all (default), build, or a part")
    parser.add_argument("--minutes", type=float, default=0.0, help="of this call; 0: no limit")
    options, begun = parser.parse_args(), time.monotonic()
    if options.part == "predictions":  # on a CPU, before: the machine code takes half a minute
        return occupancy.keep_predictions()
    end = begun + 60 * options.minutes if options.minutes else float("inf")
    m, state = machine(), ROOT / STATE_RESULTS
    results = Path(os.environ.get("RESULTS_DIR") or ROOT / "benchmarks/results").resolve()
    results.mkdir(parents=True, exist_ok=True)
    os.environ["RESULTS_DIR"] = str(results)
    for path in state.rglob(f"{slug(m.gpu)}*.json*"):  # of earlier calls
        copy = results / path.relative_to(state)
        copy.parent.mkdir(exist_ok=True)
        if not copy.exists():
            shutil.copy2(path, copy)
    journal = Journal(*(folder / f"{slug(m.gpu)}-gpu.jsonl" for folder in (state, results)))
    journal.add("", "call", tree=tree_key(m))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that children end with this
    # The log gets what this process and its children print. In a session of its own, tee outlives a
    # signal to this group.
    log = ["tee", "-a", results / f"{slug(m.gpu)}-gpu.log"]
    with subprocess.Popen(log, stdin=subprocess.PIPE, start_new_session=True) as tee:
        assert tee.stdin is not None
        os.dup2(tee.stdin.fileno(), 1)
        try:
            return call(Call(journal, results, end=end), m, options.part)
        finally:
            os.dup2(2, 1)


if __name__ == "__main__":
    sys.exit(main())
