"""The parts of `make gpu`: what they run, when, what is built for them, which numbers they show."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.gpu_project import DEADLINE, PREDICTED, ROOT, Project, rows

sys.path.insert(0, str(ROOT / "tools"))

import _gpu_checks
import _gpu_machine
import _gpu_parts
import _sanitized
import gpu
from _gpu_plugin import STEP, Journal, kind_of
from _gpu_steps import Context
from helpers.processes import run_python

# Names of backends are names of parts here.
pytestmark = [
    pytest.mark.launches_nothing("kernels run in other processes, if at all"),
    pytest.mark.slow,
]

Parts = dict[str, _gpu_parts.Part]
FOREVER = float("inf")
H200 = _gpu_machine.Machine("NVIDIA H200", "90", "2.11.0+cu130", 139 << 30)
NAMES = ("cuda-1", "cuda-2", "triton-1", "triton-2", "cpu-1", "cpu-2")
KINDS = {"cuda": "cuda", "triton": "triton", "rest": "cpu", "": ""}  # of steps: names begin with


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """The parts of a machine with a GPU and all programs, which this process takes for its own."""
    found = _gpu_machine.find
    monkeypatch.setattr(_gpu_parts, "find", lambda name: found(name) or f"/somewhere/{name}")
    parts = _gpu_parts.parts(H200, False)
    monkeypatch.setattr(gpu, "parts", lambda m, whole: parts)
    monkeypatch.setattr(gpu, "predicted", lambda name, arch: {})
    monkeypatch.setattr(gpu, "sanitizer_refuses", lambda c, deadline: False)
    monkeypatch.setattr(_gpu_machine, "build", lambda c, m, end: "done")
    monkeypatch.setattr(_gpu_machine, "why_not", lambda backend: "why")
    monkeypatch.setattr(_gpu_machine, "tree_key", lambda m: "tree")
    return parts


# --- parts with the tests of a small project in the place of ours ---


@pytest.fixture
def project(tmp_path: Path, h200: Parts) -> Project:
    project = Project(tmp_path, *NAMES)
    (project.folder / "benchmarks").mkdir()
    command = project.step().command
    for part in h200.values():  # two families are enough
        part.steps = [dataclasses.replace(s, command=command) for s in part.steps[:2]]
    return project


def call(project: Project, name: str, seconds: float = FOREVER) -> int:
    """A call of the tool that may take so many seconds of the clock."""
    c = project.context()
    c.end = c.clock() + seconds
    return gpu.call(c, H200, name, False, False)


@pytest.mark.parametrize("name", ["gpu", "memcheck", "triton", "bench", "experiments", "rest"])
def test_a_part_is_cut_in_its_middle_and_killed_and_goes_on(
    project: Project, h200: Parts, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    steps = h200[name].steps
    first, last = steps[0].name, [n for n in NAMES if n.startswith(KINDS[steps[0].kind])][-1]
    project.does(last, "slow")
    assert call(project, name, seconds=DEADLINE) == 2
    log = capfd.readouterr().out
    assert f"== gpu-{name}: NVIDIA H200, sm_90, torch 2.11.0+cu130, Python" in log
    assert "GPU run without _C_cuda.so: why" in log
    assert f"NOT RUN: {first}: test_small.py::test_it[{last}]" in log
    assert "the same command goes on" in log
    xml = (project.results / "nvidia-h200-gpu.xml").read_text()
    assert xml.count("not run: the part was cut") >= 1
    assert project.ran().count(last) == 1

    project.does(last, "SIGKILL")
    assert call(project, name) == 1
    for step in steps:
        of_kind = [n for n in NAMES if n.startswith(KINDS[step.kind])]
        expected = {n: "crashed" if n == last else "passed" for n in of_kind}
        assert project.outcomes(step.name) == expected
    once = [n for step in steps for n in project.outcomes(step.name)]
    assert sorted(project.ran()) == sorted([*once, last])
    assert call(project, name) == 1  # of what failed, too, nothing runs again
    assert len(project.ran()) == len(once) + 1
    log = capfd.readouterr().out
    assert f"FAILED: {first}: test_small.py::test_it[{last}]: crashed" in log


@pytest.mark.parametrize(("built", "code"), [("cut", 2), ("broken", 1)])
def test_nothing_is_tested_that_is_not_built(
    project: Project, monkeypatch: pytest.MonkeyPatch, built: str, code: int
) -> None:
    monkeypatch.setattr(_gpu_machine, "build", lambda c, m, end: built)
    assert call(project, "gpu") == code
    assert project.ran() == []


# --- the order, and the time of each part ---


class Simulated(Context):
    """A machine whose steps take as long as they are said to, ten seconds otherwise; the clock is
    that of calls of 9 minutes, one after another."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, needs: Mapping[str, float]
    ) -> None:
        super().__init__(Journal(folder / "j"), "h200", folder, lambda: self.now)
        self.now, self.left = 0.0, dict(needs)
        self.ran: list[tuple[str, float, float]] = []  # steps, begin and end in minutes
        self.tables: list[float] = []
        monkeypatch.setattr(gpu, "table", lambda *rows: self.tables.append(self.now / 60) or [])
        monkeypatch.setattr(Journal, "now", lambda journal: self.now)

    def run(
        self, command: Sequence[str], deadline: float, environment: Mapping[str, str]
    ) -> tuple[int, bool]:
        step, begun = environment[STEP], self.now
        left = self.left.get(step, 10.0)
        cut = left > deadline - begun
        self.now = deadline if cut else begun + left
        self.left[step] = left - (self.now - begun)
        self.journal.append("wanted", step, ids=["t"])
        if not cut:
            self.journal.end(step, "t", "passed", "")
        self.ran.append((step, begun / 60, self.now / 60))
        return 0, cut

    def call(self) -> int:
        self.end = self.now + 540
        code = gpu.call(self, H200, "all", False, False)
        assert self.now <= self.end
        return code


def test_the_first_table_comes_within_12_minutes(
    tmp_path: Path, h200: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no part ever ends, and the build takes two minutes."""
    limits = {"machine": 3, "gpu": 5.5, "memcheck": 7, "rows": 11.5, "ncu": 13.5, "plans": 16.5}
    part_of = {step.name: name for name, part in h200.items() for step in part.steps}
    c = Simulated(tmp_path, monkeypatch, dict.fromkeys(part_of, FOREVER))

    def build(c: Simulated, m: object, end: float) -> str:
        c.now += 0 if c.ran else 120
        return "done"

    monkeypatch.setattr(_gpu_machine, "build", build)
    assert [c.call() for _ in range(3)] == [2] * 3
    ends = {part_of[step]: end for step, _, end in reversed(c.ran)}  # the first of each
    assert sorted(ends) == sorted([*limits, "networks"])
    assert all(ends[name] <= minutes for name, minutes in limits.items()), ends
    assert c.tables[0] <= 12
    # The next calls go on with what is left of these parts, then with the others.
    c.ran, c.left = [], {}
    while c.call() == 2:
        pass
    order = list(dict.fromkeys(part_of[step] for step, _, _ in c.ran))
    assert order == list(h200)
    assert all(c.journal.progress(step).done for step in part_of)


def test_a_sanitizer_that_refuses_the_device_is_no_failure(
    tmp_path: Path, h200: Parts, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "sanitizer_refuses", lambda c, deadline: True)
    c = Simulated(tmp_path, monkeypatch, {})
    assert c.call() == 0
    assert not {"memcheck", "racecheck"} & {step for step, _, _ in c.ran}
    assert capfd.readouterr().out.count("skipped: compute-sanitizer does not run here") == 2


def test_a_quick_part_leaves_its_time_to_the_next(
    tmp_path: Path, h200: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = Simulated(tmp_path, monkeypatch, {"gpu": 300.0})
    assert c.call() == 2
    assert c.tables[0] < 5
    assert [round(60 * (end - begun)) for step, begun, end in c.ran if step == "gpu"] == [150, 150]
    assert c.call() == 0
    with pytest.raises(SystemExit, match="no part rosw: there are build, machine, gpu"):
        gpu.call(c, H200, "rosw", False, False)


# --- the build ---

SETUP = """
import json, os, pathlib
root = pathlib.Path(__file__).parent
with (root / "builds").open("a") as log:
    print(os.environ.get("FUSEDTRAIN_CUDA_ARCHS"), os.environ["FUSEDTRAIN_REQUIRE"], file=log)
if (root / "killed").exists():
    os.kill(os.getpid(), 9)
(root / "fusedtrain/_C_cuda.so").touch()
record = {"sources": (root / "a.cu").read_text()}
(root / "fusedtrain/_build_info.json").write_text(json.dumps(record))
"""


@pytest.mark.parametrize("nvcc", ["/somewhere/nvcc", ""])
def test_what_is_built_is_taken_if_it_is_of_these_sources_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], nvcc: str
) -> None:
    project = Project(tmp_path, "a")
    source, package = project.folder / "a.cu", project.folder / "fusedtrain"
    source.write_text("kernel")
    package.mkdir()
    (project.folder / "setup.py").write_text(SETUP)
    unloaded = set()
    setup = SimpleNamespace(sources_key=source.read_text)
    monkeypatch.setattr(_gpu_machine, "ROOT", project.folder)
    monkeypatch.setattr(_gpu_machine, "find", lambda name: nvcc)
    monkeypatch.setattr(_gpu_machine, "setup_module", lambda: setup)
    monkeypatch.setattr(_gpu_machine, "why_not", lambda name: f"{name}: no" * (name in unloaded))

    def builds(expected: str = "done") -> list[str]:
        """All builds so far, one more of which may be made by this call."""
        assert _gpu_machine.build(project.context(), H200, FOREVER) == expected
        return (project.folder / "builds").read_text().splitlines()

    (project.folder / "killed").touch()
    assert builds("broken") == [f"90 cpu{',cuda' * bool(nvcc)}"]
    (project.folder / "killed").unlink()
    assert len(builds()) == len(builds()) == 2
    os.utime(source, (0, time.time() + 60))  # a copy of the checkout has new times
    assert len(builds()) == 2
    source.write_text("another kernel")
    assert len(builds()) == 3
    assert "no files of these sources" in capfd.readouterr().out
    (package / "_C_cuda.so").unlink()
    assert len(builds()) == (4 if nvcc else 3)
    unloaded.add("cuda")  # no image for this GPU
    assert len(builds()) == (5 if nvcc else 3)
    # The nodes of autograd are for one torch and one Python: they alone are built.
    unloaded = {"autograd"}
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(Context, "run", lambda c, words, *rest: asked.append(words) or (1, False))
    builds()
    assert [words[1:] for words in asked] == [["-m", "fusedtrain", "build-autograd"]]


def test_sources_are_known_by_their_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = _sanitized.setup_module()
    for name in ("csrc/cuda/a.cu", "csrc/autograd/a.cpp", "setup.py", "tools/ninja_build.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "CSRC", tmp_path / "csrc")
    key = setup.sources_key()
    (tmp_path / "csrc/autograd/a.cpp").write_text("y")  # of a file that is for one torch
    os.utime(tmp_path / "csrc/cuda/a.cu", (0, 0))
    assert setup.sources_key() == key
    (tmp_path / "csrc/cuda/a.cu").write_text("y")
    assert setup.sources_key() != key


def test_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _gpu_machine.why_not("reference") == ""
    answer = {"cuda": "cuda: not loaded: no nvcc"}
    monkeypatch.setattr(_gpu_machine, "_ask", lambda code: answer)
    assert _gpu_machine.why_not("cuda") == "cuda: not loaded: no nvcc"
    monkeypatch.setattr(_gpu_machine, "_ask", lambda code: "Traceback\nImportError: no torch")
    assert "ImportError: no torch" in _gpu_machine.why_not("cuda")
    for size, most in {80: 8, 24: 3, 6: 1}.items():
        m = dataclasses.replace(H200, memory=size << 30)
        assert 1 <= m.workers == min(most, os.cpu_count() or 2)
    (tmp_path / "bin").mkdir()
    for name in ("nvcc", "compute-sanitizer"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("FUSEDTRAIN_CUDA", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert _gpu_machine.find("nvcc") == str(tmp_path / "bin/nvcc")  # as the build does
    assert _gpu_machine.find("compute-sanitizer") == str(tmp_path / "bin/compute-sanitizer")
    assert _gpu_machine.find("ncu") == ""


# --- which tests there are ---

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
    names = [name for names in _gpu_parts.SANITIZED.values() for name in names]
    assert collected(tmp_path, *names) == set(names)
    assert len(set(names)) == len(names)
    assert {kind_of(name) for name in names} == {"cuda"}
    assert _gpu_parts.SANITIZED.keys() == {p.stem for p in (ROOT / "csrc/cuda").glob("*.cu")}


@pytest.mark.long  # collects half of the suite
def test_the_files_of_a_part_have_all_of_its_tests(tmp_path: Path) -> None:
    # No test in a file without these words can be named after a backend.
    paths = [
        str(p.relative_to(ROOT))
        for p in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search("cuda|triton|BACKENDS|_kernels", p.read_text())
    ]
    names = collected(tmp_path, *paths)
    for kind in ("cuda", "triton"):
        files = {name.partition("::")[0] for name in names if kind_of(name) == kind}
        first = {path for path in files if path.startswith(_gpu_parts.GPU_FILES)}
        assert files > first
        assert files - (first if kind == "cuda" else set()) <= set(_gpu_parts.files_of(kind))


def test_steps(tmp_path: Path, h200: Parts) -> None:
    families = _gpu_parts.FAMILIES
    assert sorted(families) == list(_gpu_parts.ALL_FAMILIES)
    steps = {name: part.steps for name, part in h200.items()}
    bench = [*steps["networks"], *steps["bench"]]
    assert [s.name for s in bench] == [f"bench {f}" for f in (*families, "triton")]
    assert bench[-1].environment["FUSEDTRAIN_BACKEND"] == "triton"
    whole = _gpu_parts.parts(H200, True)["triton"].steps
    names = [("triton whole", False), ("triton backend whole", False)]
    assert [(s.name, s.sample) for s in whole] == names
    every = [step.name for of_part in steps.values() for step in of_part]
    assert len({*every}) == len(every)
    without = _gpu_parts.parts(dataclasses.replace(H200, gpu=""), False)
    skipped = {"memcheck", "rows", "ncu", "plans", "sanitize", "compile"}
    assert {name for name, part in without.items() if part.skip} == skipped
    checks = [s for name in ("machine", "ncu", "plans", "experiments") for s in steps[name]]
    asked = {word for step in checks for word in step.command if "::" in word}
    tests = collected(tmp_path, *asked)
    assert {name.partition("[")[0] for name in tests} == {n.partition("[")[0] for n in asked}
    (rows,) = steps["rows"]
    run = subprocess.run(
        [*rows.command, "--device=cpu", "--collect-only"], cwd=ROOT, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.stdout.count("<Function") == 29, run.stdout[-2000:]


# --- checks ---


@pytest.mark.parametrize(
    ("code", "outcome"), [(0, None), (1, AssertionError), (130, KeyboardInterrupt)]
)
def test_an_experiment_that_is_cut_has_neither_passed_nor_failed(
    monkeypatch: pytest.MonkeyPatch, code: int, outcome: type[BaseException] | None
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setenv(_gpu_parts.OPTIONS, "--quick --resume")
    monkeypatch.setattr(_gpu_checks, "main", lambda words: asked.append(words) or code)
    with pytest.raises(outcome) if outcome else contextlib.nullcontext():
        _gpu_checks.test_experiment("networks")
    assert asked == [["networks", "--quick", "--resume"]]


def test_a_plan_is_checked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(4)]
    model, x = nn.Sequential(*sum(layers, ())), torch.randn(2, 8, 32, 32)
    peak = _gpu_checks.check_plan(model, x, torch.sum, 0.8)
    assert f"{peak / 1e6:.1f} in training" in capfd.readouterr().out
    plan = SimpleNamespace(eager_peak=peak, budget=peak // 2, predicted=peak, peak=peak)
    planner = SimpleNamespace(plan_memory=lambda *a, **k: plan, convert=lambda *a, **k: None)
    monkeypatch.setattr(_gpu_checks, "fusedtrain", planner)
    with pytest.raises(AssertionError):
        _gpu_checks.check_plan(model, x, torch.sum, 0.5)


def test_ncu_looks_at_the_worst_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "ncu"
    program.write_text('#!/bin/sh\necho "==PROF== Profiling $*"\n')
    program.chmod(0o755)
    rows(tmp_path / "nvidia-h200.json", first=True)
    monkeypatch.setenv("RESULTS_DIR", str(tmp_path))
    monkeypatch.setattr(_gpu_machine, "find", lambda name: str(tmp_path / name))
    monkeypatch.setattr(_gpu_checks, "_predicted", lambda: PREDICTED)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    for place, name in enumerate(("b7", "a1000", "a10")):
        _gpu_checks.test_ncu(place)
        assert f"bench_pool.py::t[{name}] --device=cuda --first" in capfd.readouterr().out
    with pytest.raises(pytest.skip.Exception, match="needs a measured row"):
        _gpu_checks.test_ncu(3)
    program.write_text("#!/bin/sh\necho no kernel\n")
    with pytest.raises(AssertionError):
        _gpu_checks.test_ncu(0)


def test_rows_of_an_older_run_go_when_a_family_is_done(tmp_path: Path) -> None:
    """Else a row of an op that is wrong now would stay."""
    project = Project(tmp_path, "a")
    c = project.context()
    memory, *names = rows(project.results / "a.json")
    outcomes = (("bench pool", "passed"), ("bench pool", "failed"), ("rows", "passed"))
    for name, (step, outcome) in zip(names, outcomes, strict=True):
        c.journal.end(step, name, outcome, "")
    gpu.drop_old_rows(c, "bench pool")
    kept = json.loads((project.results / "a.json").read_text())["benchmarks"]
    assert [e["fullname"] for e in kept] == [memory, names[0], names[2]]
