"""The order of `make gpu`: two calls, played with a false clock, have a result of every family."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fusedtrain.reference import FAMILIES as KERNELS
from helpers import ROOT
from helpers.processes import run_python

sys.path.insert(0, str(ROOT / "tools"))

import _gpu_parts
import gpu
from _gpu_parts import FIRST, Part
from _gpu_plugin import SETTINGS, Journal, kind_of
from gpu import Call, Machine

pytestmark = [
    pytest.mark.slow,
    # Names of backends are names of parts here.
    pytest.mark.launches_nothing("kernels run in other processes, if at all"),
]
FOREVER = float("inf")
H200 = Machine("NVIDIA H200", "90", "2.11.0+cu130", 139 << 30, {})
ORDER = ["machine", "kernels", "rows", "memcheck", "ncu", "plans", "networks conv_bn"]
CASES, ROWS = 20, 5  # of a family
# Seconds of a test; of a case of a kernel on 8 processes.
SECONDS = {"machine": 5.0, "kernels": 0.45, "rows": 3.0, "memcheck": 3.0, "ncu": 20.0,
           "plans": 25.0}  # fmt: skip


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """The parts of a machine with a GPU, which this process takes for its own."""
    parts = _gpu_parts.parts(H200.gpu, "nvidia-h200", 8)
    monkeypatch.setattr(gpu, "parts", lambda *facts: parts)
    monkeypatch.setattr(gpu, "build", lambda c, m: (0, m))
    return parts


class Gone(BaseException):
    """The machine was taken away."""


class Simulated(Call):
    """A machine on which each test takes so long, by a false clock; `bad` tests hang or crash.

    One test at a time: a hang stops all that comes after it, which is worse than eight processes.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, bad: Mapping[str, str] | None = None,
        gone: float = FOREVER, **seconds: float,
    ) -> None:  # fmt: skip
        super().__init__(Journal(folder / "j"), folder, lambda: self.now)
        self.now, self.bad, self.gone, self.refuses = 0.0, dict(bad or {}), gone, False
        self.seconds, self.probes = {**SECONDS, **seconds}, list[str]()
        monkeypatch.setattr(Journal, "now", lambda journal: self.now)

    def tests(self, step: str) -> list[str]:
        """Names in the order of the plugin: first one of each family."""
        if step == "kernels":
            return [f"{family}[{n}]" for n in range(CASES) for family in KERNELS]
        if step == "rows":
            more = [f"{family}[{n}]" for family in FIRST for n in range(1, ROWS)]
            return [*(f"{family}[0]" for family in FIRST), *more]
        return [f"{step}[{n}]" for n in range(4)]

    def wait(self, until: float) -> None:
        if until > self.gone:
            self.now, self.gone = self.gone, FOREVER
            raise Gone
        self.now = until

    def run(
        self, command: Sequence[str], deadline: float, environment: Mapping[str, str]
    ) -> tuple[int, bool]:
        if SETTINGS not in environment:
            self.wait(self.now + 5)
            self.probes.append(command[-1].split()[0])
            return int(self.refuses), False
        settings = json.loads(environment[SETTINGS])
        step = settings["step"]
        self.wait(min(deadline, self.now + 12))  # imports, collection
        self.journal.add(step, "wanted", ids=self.tests(step))
        ended = self.journal.steps()[step].ended
        for name in (name for name in self.tests(step) if name not in ended):
            if self.now >= deadline:
                return 0, True
            self.journal.add(step, "start", id=name)
            does = self.bad.get(f"{step} {name}")
            patience = settings["patience"]
            ends = self.now + (patience if does == "hangs" else self.seconds.get(step, 30.0))
            self.wait(min(ends, deadline))
            if ends > deadline:
                return 0, True
            if does:
                return 1, False
            self.journal.add(step, "passed", id=name)
        return 0, False

    def call(self, seconds: float, name: str = "all") -> int:
        self.journal.add("", "call", tree="tree")
        self.end = self.now + seconds
        code = gpu.call(self, H200, name)
        assert self.now <= self.end
        return code

    def learned(self, step: str) -> set[str]:
        """Families that have a result of a test that ended by itself."""
        ended = self.journal.steps()[step].results.items()
        return {name.partition("[")[0] for name, e in ended if e["event"] == "passed"}


BAD = {
    "all is well": {},
    "a hang of one kernel": {"kernels depthwise[0]": "hangs"},
    "hangs of one family": {f"kernels pool[{n}]": "hangs" for n in (0, 3)},
    "crashes": {f"kernels few_bit[{n}]": "crashes" for n in range(3)},
    "a row that hangs": {"rows batch_norm[0]": "hangs"},
    "a row that crashes": {"rows amp_step[0]": "crashes", "rows chains[1]": "crashes"},
    "a hang of the first part": {"machine machine[0]": "hangs"},
    "hangs in both": {"kernels gated[0]": "hangs", "rows images[0]": "hangs"},
    "a sanitizer that hangs": {"memcheck memcheck[0]": "hangs"},
}


@pytest.mark.parametrize("name", BAD)
def test_two_calls_have_a_result_of_every_family(
    tmp_path: Path, h200: list[Part], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    c = Simulated(tmp_path, monkeypatch, BAD[name])
    codes = [c.call(540), c.call(200)]
    assert codes == [1 if BAD[name] else 2] * 2  # a failure, or not yet all
    assert c.learned("kernels") == {*KERNELS}  # also the family that hangs: its other cases
    culprits = {place.split()[1].partition("[")[0] for place in BAD[name] if "rows" in place}
    assert c.learned("rows") >= {*FIRST} - culprits
    for place in BAD[name]:
        step, test = place.split()
        assert c.journal.steps()[step].results[test]["event"] == "crashed"
    assert c.learned("plans") or BAD[name]


def test_two_calls_of_a_slow_machine(
    tmp_path: Path, h200: list[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels take 5 times as long: all that has limits is cut, and each still has its turn."""
    c = Simulated(tmp_path, monkeypatch, kernels=2.0, memcheck=25.0, ncu=30.0)
    assert [c.call(540), c.call(200)] == [2, 2]
    assert c.learned("kernels") == {*KERNELS}
    assert c.learned("rows") == {*FIRST}
    assert c.learned("memcheck")
    assert c.learned("ncu")


@pytest.mark.parametrize("gone", [10.0, 100.0, 260.0, 400.0])
def test_a_machine_that_is_taken_away(
    tmp_path: Path, h200: list[Part], monkeypatch: pytest.MonkeyPatch, gone: float
) -> None:
    c = Simulated(tmp_path, monkeypatch, gone=gone)
    with pytest.raises(Gone):
        c.call(540)
    had = {s: set(c.journal.steps()[s].results) for s in ("kernels", "rows")}
    (tmp_path / "j").open("a").write('\n{"event": "te')  # half a line
    c.call(540)
    c.call(200)
    for step, families in (("kernels", KERNELS), ("rows", FIRST)):
        assert c.learned(step) == {*families}
        assert had[step] <= set(c.journal.steps()[step].results)


def test_all_ends(tmp_path: Path, h200: list[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    c = Simulated(tmp_path, monkeypatch, {"kernels pool[1]": "hangs"})
    while c.call(540) == 1 and any(not c.journal.steps()[part.name].done for part in h200):
        assert c.now < 24 * 3600
    events = [json.loads(line) for line in (tmp_path / "j").read_text().splitlines()[1:]]
    names = [*dict.fromkeys(e["step"] for e in events if e["event"] == "run")]
    assert names == [part.name for part in h200]
    assert names[: len(ORDER)] == ORDER
    c.journal.add("", "call", tree="other sources")
    assert not c.journal.steps()["kernels"].results


def test_what_cannot_run_is_skipped(
    tmp_path: Path, h200: list[Part], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """compute-sanitizer and ncu refuse some machines; each is asked once a call."""
    c = Simulated(tmp_path, monkeypatch)
    c.refuses = True
    c.call(10000)
    assert [Path(program).name for program in c.probes] == ["compute-sanitizer", "ncu"]
    assert c.learned("plans")
    log = capfd.readouterr().out
    assert "gpu-memcheck: skipped: this fails here: " in log
    assert "gpu-sanitize racecheck: skipped" in log
    with pytest.raises(SystemExit, match="no part rosw: there are build, predictions, machine"):
        c.call(540, "rosw")


# As on a machine with a GPU, as far as names go.
PRETEND = """
import sys, torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda *a: (9, 0)
"""


def collected(tmp_path: Path, *tests: str) -> set[str]:
    """The names of tests, as if there were a GPU."""
    (tmp_path / "pretend_gpu.py").write_text(PRETEND)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(ROOT), str(ROOT / "tools")))
    run = run_python(
        "-m", "pytest", "--collect-only", "-q", "-p", "pretend_gpu", "-p", "no:cacheprovider",
        "-p", "no:xdist", *tests, cwd=ROOT, env=env,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return {line for line in run.stdout.splitlines() if "::" in line}


def test_sanitized_tests_exist(tmp_path: Path) -> None:
    assert collected(tmp_path, *_gpu_parts.SANITIZED) == {*_gpu_parts.SANITIZED}
    assert {kind_of(name) for name in _gpu_parts.SANITIZED} == {"cuda"}
    sources = {path.stem for path in (ROOT / "csrc/cuda").glob("*.cu")}
    assert sources == _gpu_parts.SANITIZED_KERNELS


@pytest.mark.long  # collects half of the suite
def test_the_folders_of_a_part_have_all_of_its_tests(tmp_path: Path) -> None:
    # No test in a file without these words can be named after a backend.
    paths = [
        str(p.relative_to(ROOT))
        for p in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search("cuda|triton|BACKENDS|[kK]ernels", p.read_text())
    ]
    names = collected(tmp_path, *paths)
    for kind, folders in _gpu_parts.FOLDERS.items():
        of_kind = {name for name in names if kind_of(name) == kind}
        assert of_kind
        assert not [name for name in of_kind if not name.startswith(folders)]


def test_parts(tmp_path: Path, h200: list[Part]) -> None:
    names = [part.name for part in h200]
    assert len({*names}) == len(names)
    measured = {n.split()[1] for n in names if n.split()[0] in ("networks", "bench")}
    assert measured == {*_gpu_parts.FAMILIES, "triton"}
    checked = {word for part in h200 for word in part.command if "_gpu_checks.py::" in word}
    tests = collected(tmp_path, *checked)
    assert {name.partition("[")[0] for name in tests} == {n.partition("[")[0] for n in checked}
    (rows,) = [part for part in h200 if part.name == "rows"]
    run = subprocess.run(
        [*rows.command, "--device=cpu", "--collect-only"], cwd=ROOT, capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    families = {*re.findall(r"<Module bench_(\w+)\.py>", run.stdout)}
    assert families == {*FIRST}, run.stdout[-2000:]
    skipped = {part.name.split()[0] for part in _gpu_parts.parts("", "no-gpu", 1) if part.skip}
    assert skipped == {"memcheck", "rows", "ncu", "sanitize", "bench", "compile"}
