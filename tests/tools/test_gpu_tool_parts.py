"""The parts of `make gpu`: every one cut in its middle, killed, and gone on with; what they run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.gpu_project import DEADLINE, JUMP, ROOT, Project

sys.path.insert(0, str(ROOT / "tools"))

import _gpu_experiments
import _gpu_machine
import _gpu_numbers
import _gpu_parts
import gpu
from _gpu_plugin import kind_of
from _gpu_steps import Step
from helpers.processes import run_python

# Names of backends are names of parts here.
pytestmark = [
    pytest.mark.launches_nothing("kernels run in other processes, if at all"),
    pytest.mark.slow,
]

FOREVER = float("inf")
H200 = _gpu_machine.Machine("NVIDIA H200", "90", "2.11.0+cu130", 139 << 30)
NAMES = ("cuda-1", "cuda-2", "triton-1", "triton-2", "cpu-1", "cpu-2")
# The last one of a step's tests, by their kind.
LAST = {"cuda": "cuda-2", "triton": "triton-2", "rest": "cpu-2", "": "cpu-2"}


class Rehearsal:
    """A machine with a GPU, and the parts with tests of a small project in the place of ours."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        self.project, self.capfd = Project(folder, *NAMES), capfd
        (self.project.folder / "benchmarks").mkdir()
        self.built, self.log = "done", ""
        self.parts = _gpu_parts.parts(H200, False)
        if not self.parts["sanitize"].steps:  # no compute-sanitizer here
            step = self.project.step("memcheck")
            self.parts["sanitize"] = _gpu_parts.Part("sanitize", "", [step])
        command = self.project.step().command
        for name, part in self.parts.items():
            steps = part.steps if name == "sanitize" else part.steps[:2]  # two families are enough
            part.steps = [dataclasses.replace(s, command=command) for s in steps]
        monkeypatch.setattr(gpu, "parts", lambda m, whole: self.parts)
        monkeypatch.setattr(gpu, "sanitizer_refuses", lambda c, deadline: False)
        monkeypatch.setattr(_gpu_machine, "build", lambda c, m, end: self.built)
        monkeypatch.setattr(_gpu_machine, "kernels", lambda gpu: "GPU run without _C_cuda.so: why")
        monkeypatch.setattr(_gpu_machine, "tree_key", lambda m: "tree")

    def call(self, *names: str, seconds: float = FOREVER) -> int:
        """A call of the tool that may take so many seconds of the clock."""
        c = self.project.context()
        c.end = c.clock() + seconds
        code = gpu.call(c, H200, names, False, False)
        self.log = self.capfd.readouterr().out
        return code


@pytest.fixture
def rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Rehearsal:
    return Rehearsal(tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize("name", gpu.NAMES)
def test_every_part_is_cut_in_its_middle_and_killed_and_goes_on(
    rehearsal: Rehearsal, name: str
) -> None:
    if rehearsal.parts[name].skip:
        pytest.skip(rehearsal.parts[name].skip)
    project, steps = rehearsal.project, rehearsal.parts[name].steps
    first, last = steps[0].name, LAST[steps[0].kind]
    project.does(last, "slow")
    assert rehearsal.call(name, seconds=DEADLINE) == 2
    log = rehearsal.log
    assert f"== gpu-{name}: NVIDIA H200, sm_90, torch 2.11.0+cu130" in log
    assert "GPU run without _C_cuda.so: why" in log
    assert f"NOT RUN: {first}: test_small.py::test_it[{last}]" in log
    assert "the same command goes on" in log
    xml = (project.results / "nvidia-h200-gpu.xml").read_text()
    assert xml.count("not run: the part was cut") >= 1
    begun = project.ran()
    assert begun.count(last) == 1

    project.does(last, "SIGKILL")
    assert rehearsal.call(name) == 1
    for step in steps:
        name_of_last = LAST[step.kind]
        expected = "crashed" if name_of_last == last else "passed"
        assert project.outcomes(step.name)[name_of_last] == expected, step.name
    assert set(project.outcomes(first).values()) == {"passed", "crashed"}
    # Nothing ran twice but what was cut; the steps behind the first had not begun.
    of_first = [n for n in project.ran() if n in project.outcomes(first)]
    if len(steps) == 1:
        assert sorted(of_first) == sorted([*project.outcomes(first), last])
    done = len(project.ran())
    assert rehearsal.call(name) == 1  # of what failed, too, nothing runs again
    assert len(project.ran()) == done
    assert f"FAILED: {first}: test_small.py::test_it[{last}]: crashed" in rehearsal.log


def test_a_call_that_is_over_begins_no_part(rehearsal: Rehearsal) -> None:
    assert rehearsal.call("cuda", "rest", seconds=40) == 2
    assert rehearsal.log.count("not begun: the time of this call is up") == 2
    assert rehearsal.project.ran() == []


def test_all_parts_in_one_call(rehearsal: Rehearsal) -> None:
    assert rehearsal.call("cuda", "rest") == 0
    assert sorted(rehearsal.project.ran()) == ["cpu-1", "cpu-2", "cuda-1", "cuda-2"]
    assert rehearsal.log.splitlines()[-1].startswith("make gpu: done")


@pytest.mark.parametrize(("built", "code"), [("cut", 2), ("broken", 1)])
def test_nothing_is_tested_that_is_not_built(rehearsal: Rehearsal, built: str, code: int) -> None:
    rehearsal.built = built
    assert rehearsal.call("cuda") == code
    assert rehearsal.project.ran() == []


# --- the build ---

SETUP = """
import os, pathlib, sys, time
root = pathlib.Path(__file__).parent
with (root / "builds").open("a") as log:
    print(os.environ.get("FUSEDTRAIN_CUDA_ARCHS"), os.environ["FUSEDTRAIN_REQUIRE"], file=log)
if (root / "slow").exists():
    time.sleep(100)
if (root / "killed").exists():
    os.kill(os.getpid(), 9)
for name in ("_C.so", "_build_info.json", "_C_cuda.so"):
    (root / "fusedtrain" / name).touch()
"""


def buildable(folder: Path) -> Project:
    """A project with the files by which a build is known."""
    project = Project(folder, "a")
    for name in ("csrc", "fusedtrain", "tools"):
        (project.folder / name).mkdir()
    (project.folder / "csrc/a.cu").write_text("kernel")
    (project.folder / "setup.py").write_text(SETUP)
    (project.folder / "tools/ninja_build.py").touch()
    return project


@pytest.mark.long  # 100 s; on a busy machine the build may end before the clock is looked at
def test_a_build_is_cut_killed_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = buildable(tmp_path)
    folder = project.folder
    monkeypatch.setattr(_gpu_machine, "ROOT", folder)
    monkeypatch.setattr(_gpu_machine, "find_nvcc", lambda: "/somewhere/nvcc")
    c = project.context()
    builds = folder / "builds"
    (folder / "slow").touch()
    c.clock = lambda: JUMP if builds.exists() else 0.0
    assert _gpu_machine.build(c, H200, DEADLINE) == "cut"
    (folder / "slow").rename(folder / "killed")
    assert _gpu_machine.build(c, H200, FOREVER) == "broken"
    (folder / "killed").unlink()
    for _ in range(2):
        assert _gpu_machine.build(c, H200, FOREVER) == "done"
    assert builds.read_text().splitlines() == ["90 cpu,cuda"] * 3
    os.utime(folder / "csrc/a.cu", (0, time.time() + 60))  # a copy of the checkout has new times
    assert _gpu_machine.build(c, H200, FOREVER) == "done"
    assert len(builds.read_text().splitlines()) == 3
    for change in ("source", "file", "gpu"):
        if change == "source":
            (folder / "csrc/a.cu").write_text("another kernel")
        elif change == "file":
            (folder / "fusedtrain/_C_cuda.so").unlink()
        m = dataclasses.replace(H200, arch="100") if change == "gpu" else H200
        before = len(builds.read_text().splitlines())
        assert _gpu_machine.build(c, m, FOREVER) == "done"
        assert len(builds.read_text().splitlines()) == before + 1, change


def test_a_machine_without_nvcc_builds_for_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = buildable(tmp_path)
    monkeypatch.setattr(_gpu_machine, "ROOT", project.folder)
    monkeypatch.setattr(_gpu_machine, "find_nvcc", lambda: "")
    assert _gpu_machine.build(project.context(), H200, FOREVER) == "done"
    assert (project.folder / "builds").read_text() == "90 cpu\n"


def test_the_first_line_says_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        (True, "loaded (sm_90, PTX 90)"): "_C_cuda.so loaded (sm_90, PTX 90)",
        (False, "not loaded: no nvcc"): "GPU run without _C_cuda.so: not loaded: no nvcc",
    }
    for answer, line in words.items():
        monkeypatch.setattr(_gpu_machine, "_ask", lambda code, answer=answer: list(answer))
        assert _gpu_machine.kernels("H200") == line
    monkeypatch.setattr(_gpu_machine, "_ask", lambda code: "Traceback\nImportError: no torch")
    assert "ImportError: no torch" in _gpu_machine.kernels("H200")


def test_the_tool_finds_nvcc_as_the_build_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("nvcc", "compute-sanitizer"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("FUSEDTRAIN_CUDA", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert _gpu_machine.find_nvcc() == str(tmp_path / "bin/nvcc")
    assert _gpu_machine.find_sanitizer() == str(tmp_path / "bin/compute-sanitizer")


def test_workers_fit_the_gpu() -> None:
    memory = {80: 8, 24: 3, 6: 1}
    for size, most in memory.items():
        m = dataclasses.replace(H200, memory=size << 30)
        assert 1 <= m.workers == min(most, os.cpu_count() or 2)


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
    env["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(ROOT)))
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


def test_every_kernel_file_is_sanitized() -> None:
    files = {p.stem for p in (ROOT / "csrc/cuda").glob("*.cu")}
    assert _gpu_parts.SANITIZED.keys() == files


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
        assert files
        assert files <= set(_gpu_parts.files_of(kind))


def test_benchmarks_come_in_their_order() -> None:
    from benchmarks.harness.store import FAMILIES

    assert sorted(_gpu_parts.FAMILIES) == list(FAMILIES)
    bench, compiled = (_gpu_parts.parts(H200, False)[n].steps for n in ("bench", "compile"))
    assert [s.name for s in bench[:2]] == ["bench amp_step", "bench batch_norm"]
    assert all("--no-compile" in s.command for s in bench)
    assert all("--only-compile" in s.command for s in compiled)
    assert bench[-1].environment == {"FUSEDTRAIN_BACKEND": "triton"}
    whole = _gpu_parts.parts(H200, True)["triton"].steps
    assert [(s.name, s.sample) for s in whole] == [
        ("triton whole", False), ("triton backend whole", False),
    ]  # fmt: skip


def test_each_experiment_is_a_process() -> None:
    steps = _gpu_parts.parts(H200, False)["experiments"].steps
    assert [s.name for s in steps] == [f"experiment {name}" for name in _gpu_parts.NAMES]
    assert collected_names(steps[0]) == {steps[0].command[-1]}
    options = {s.environment[_gpu_parts.OPTIONS] for s in steps}
    assert options == {f"--device cuda --resume --also={_gpu_parts.STATE_RESULTS}"}
    rehearsed = _gpu_parts.parts(dataclasses.replace(H200, gpu=""), False)["experiments"].steps
    assert rehearsed[0].environment[_gpu_parts.OPTIONS].startswith("--quick --resume")


def collected_names(step: Step) -> set[str]:
    """The names of the step's tests, by pytest."""
    run = subprocess.run(
        [*step.command, "--collect-only", "-qq"], cwd=ROOT, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}"},
    )  # fmt: skip
    return {line for line in run.stdout.splitlines() if "::" in line and "collected" not in line}


@pytest.mark.parametrize(
    ("code", "outcome"), [(0, None), (1, AssertionError), (130, KeyboardInterrupt)]
)
def test_an_experiment_that_is_cut_has_neither_passed_nor_failed(
    monkeypatch: pytest.MonkeyPatch, code: int, outcome: type[BaseException] | None
) -> None:
    asked = []

    def main(words: list[str]) -> int:
        asked.append(words)
        return code

    monkeypatch.setenv(_gpu_parts.OPTIONS, "--quick --resume")
    monkeypatch.setattr(_gpu_experiments, "main", main)
    with pytest.raises(outcome) if outcome else contextlib.nullcontext():
        _gpu_experiments.test_experiment("networks")
    assert asked == [["networks", "--quick", "--resume"]]


# --- numbers ---


def rows(path: Path) -> Path:
    def entry(op: str, numel: int, speed: float) -> dict[str, object]:
        info = {"op": op, "pass": "forward", "dtype": "float16", "numel": numel,
                "gb_per_s": {"fusedtrain": speed}, "percent_of_copy": 80.0}  # fmt: skip
        return {"fullname": f"benchmarks/bench_pool.py::t[{op}{numel}]", "extra_info": info}

    network = {"fullname": "benchmarks/bench_memory.py::t", "extra_info": {"op": "memory"}}
    entries = [entry("a", 10, 900.0), entry("a", 1000, 300.0), entry("b", 7, 50.0), network]
    path.write_text(json.dumps({"benchmarks": entries}))
    return path


def test_the_measured_column_stands_beside_the_prediction(tmp_path: Path) -> None:
    table = {("pool", "", "forward", "float16"): 600.0, ("pool", "", "forward", "float32"): 1.0}
    lines = _gpu_numbers.table(rows(tmp_path / "r.json"), table)
    assert "computed, not measured" in lines[0]
    assert [line.split() for line in lines[2:]] == [
        ["pool", "a", "forward", "float16", "1000", "300.0", "80", "600", "50%"],
        ["pool", "b", "forward", "float16", "7", "50.0", "80", "600", "8%"],
    ]
    (line,) = [ln for ln in _gpu_numbers.table(tmp_path / "r.json", {}) if " b " in ln]
    assert line.split()[-2:] == ["-", "-"]
    assert "no row" in _gpu_numbers.table(tmp_path / "none.json", table)[0]


def test_the_log_has_what_the_tool_and_its_children_print(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    code = f"""
import subprocess, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import gpu
with gpu.logged({str(log)!r}):
    gpu.say("tool")
    subprocess.run(["echo", "child"])
gpu.say("behind")
"""
    run = run_python("-c", code, cwd=tmp_path)
    assert run.stdout == "tool\nchild\nbehind\n", run.stderr
    assert log.read_text() == "before\ntool\nchild\n"


def test_all_that_did_not_run_is_in_the_log(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, part = rehearsal.project.context(), rehearsal.parts["cuda"]
    c.journal.append("wanted", "cuda", ids=[f"t{n}" for n in range(7)])
    monkeypatch.setattr(gpu, "run_step", lambda *arguments: "cut")
    assert gpu.run_part(c, part)
    log = (rehearsal.project.results / "a-gpu.log").read_text()
    assert log == "NOT RUN: cuda: t5\nNOT RUN: cuda: t6\n"


def test_files_are_in_both_folders(tmp_path: Path) -> None:
    """The folder of the results is a new one at this call, or the machine is (``--from``)."""
    both, earlier = [tmp_path / "results", tmp_path / "build/gpu/results"], tmp_path / "earlier"
    for folder in (both[0], earlier):
        folder.mkdir()
        rows(folder / "h200.json")
    (earlier / "h200-gpu.jsonl").write_text("journal")
    (earlier / "a100.json").touch()
    (both[0] / "h200.json").write_text("newer")
    gpu.share("h200*.json*", [*both, earlier], both)
    (both[0] / "h200.json").unlink()
    (both[1] / "h200-triton-some.json").write_text("{}")
    gpu.share("h200*.json*", both, both)
    names = ["h200-gpu.jsonl", "h200-triton-some.json", "h200.json"]
    for folder in both:
        assert sorted(p.name for p in folder.iterdir()) == names
        assert (folder / "h200.json").read_text() == "newer"


def test_rows_of_an_older_run_go_when_a_family_is_done(tmp_path: Path) -> None:
    """Else a row of an op that is wrong now would stay."""
    project = Project(tmp_path, "a")
    c = project.context()
    path = rows(project.results / "a.json")
    names = [e["fullname"] for e in json.loads(path.read_text())["benchmarks"]]
    for name, outcome in zip(names, ("passed", "failed"), strict=False):
        c.journal.end("bench pool", name, outcome, "")
    gpu.drop_old_rows(c, "bench pool")
    kept = [e["fullname"] for e in json.loads(path.read_text())["benchmarks"]]
    assert kept == [names[0], "benchmarks/bench_memory.py::t"]
