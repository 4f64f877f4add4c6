"""`make gpu` loses nothing: processes that die, hang or are cut; its numbers; its tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import ROOT
from helpers.gpu_project import DEADLINE, H200, PREDICTED, Project, parts_of_an_h200, rows
from helpers.processes import run_python

sys.path.insert(0, str(ROOT / "tools"))

import _gpu_checks
import _gpu_numbers
import _gpu_parts
import gpu
from _gpu_parts import Part
from _gpu_plugin import Journal, kind_of
from gpu import LEAST, Context, run_part

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs process groups (not Windows)"),
    # Names of backends are names of parts here.
    pytest.mark.launches_nothing("kernels run in other processes, if at all"),
]
FOREVER = float("inf")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    return parts_of_an_h200(monkeypatch)


# --- processes, with a small project ---


@pytest.mark.parametrize("kind", ["slow", "deaf"])
def test_a_part_that_is_cut_goes_on_where_it_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """By SIGINT, after which pytest tells its summary, or where that is ignored by SIGKILL."""
    project = Project(tmp_path, "a", "b", "c", "d")
    project.does("c", kind)
    project.does("b", "fail")
    c, part = project.context(), project.part()
    assert run_part(c, part, LEAST - 1)  # too short to begin
    assert run_part(c, part, DEADLINE)
    # A busy machine may take longer than pytest is given for its summary.
    assert c.clock() >= DEADLINE or kind == "slow"
    assert project.outcomes() == {"a": "passed", "b": "failed"}
    assert [n[-3:] for n in c.journal.progress("cuda").left] == ["[c]", "[d]"]
    log = capfd.readouterr().out
    assert "stopped by the time limit" in log
    assert ("1 failed, 1 passed" in log) is (kind == "slow")

    project.does("c", "")
    again = project.context()
    assert not run_part(again, part, FOREVER)
    assert project.outcomes() == {"a": "passed", "b": "failed", "c": "passed", "d": "passed"}
    assert project.ran() == ["a", "b", "c", "c", "d"]


@pytest.mark.parametrize(
    ("what", "workers"), [("SIGKILL", 2), ("SIGSEGV", 0), ("slow", 0), ("deaf", 2)]
)
def test_a_test_that_kills_its_process_or_hangs_is_one_failure(
    tmp_path: Path, what: str, workers: int
) -> None:
    project = Project(tmp_path, *"abcde")
    project.does("b", what)
    part = project.part(workers=workers, patience=180.0 if what.startswith("SIG") else 1.0)
    assert not run_part(project.context(), part, FOREVER)
    assert project.outcomes() == {**dict.fromkeys("acde", "passed"), "b": "crashed"}
    assert project.ran().count("b") == 1


TORCH = """
class cuda:
    broken = False
    def is_initialized(): return True
    def synchronize():
        if cuda.broken: raise RuntimeError("CUDA error: an illegal memory access")
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_gpu_that_is_lost_takes_one_test_with_it(tmp_path: Path, workers: int) -> None:
    """An illegal access makes every later call of the process fail; it is seen at the next wait."""
    project = Project(tmp_path, "a")
    (project.folder / "torch.py").write_text(TORCH)
    (project.folder / "test_small.py").write_text(
        "import pytest, torch\n"
        "@pytest.mark.parametrize('n', range(6))\n"
        "def test_it(n):\n"
        "    torch.cuda.synchronize()\n"
        "    torch.cuda.broken = n == 2\n"
    )
    assert not run_part(project.context(), project.part(workers=workers), FOREVER)
    assert project.outcomes() == {str(n): "failed" if n == 2 else "passed" for n in range(6)}
    progress = project.context().journal.progress("cuda")
    (bad,) = progress.bad
    assert "an illegal memory access" in progress.results[bad]["message"]


def test_every_way_to_end(tmp_path: Path) -> None:
    project = Project(tmp_path, "a")
    (project.folder / "test_broken.py").write_text("import no_such_module\n")
    (project.folder / "test_small.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef bad(): raise ValueError('setup')\n"
        "@pytest.fixture\ndef late():\n    yield\n    raise ValueError('teardown')\n"
        "def test_setup(bad): pass\n"
        "def test_teardown(late): pass\n"
        "def test_skip(): pytest.skip('no GPU')\n"
        "@pytest.mark.xfail\ndef test_xfail(): assert False\n"
        "def test_passes(): pass\n"
    )
    assert not run_part(project.context(), project.part(), FOREVER)
    outcomes = {name.rpartition("::")[2]: o for name, o in project.outcomes().items()}
    assert outcomes == {
        "test_broken.py": "error", "test_setup": "error", "test_teardown": "error",
        "test_skip": "skipped", "test_xfail": "xfailed", "test_passes": "passed",
    }  # fmt: skip


def test_a_command_that_cannot_run_is_no_endless_loop(tmp_path: Path) -> None:
    project = Project(tmp_path, "a")
    assert not run_part(
        project.context(), Part("cuda", [sys.executable, "-c", "raise SystemExit(3)"]), FOREVER
    )
    assert project.outcomes() == {"cuda: all": "error"}
    assert not run_part(project.context(), project.part(), FOREVER)
    assert project.outcomes() == {"cuda: all": "passed", "a": "passed"}


def test_an_alarm_is_a_failure_and_keep_keeps_what_passed(tmp_path: Path) -> None:
    """compute-sanitizer's: all tests pass, and it found a race all the same."""
    project = Project(tmp_path, "a", "b")
    command = " ".join(project.part().command)
    part = Part("racecheck", ["sh", "-c", f'{command} "$@"; exit 9', "sh"], alarm=9)
    assert not run_part(project.context(), part, FOREVER)
    assert project.outcomes("racecheck")["racecheck: exit 9"] == "failed"
    project.does("b", "fail")
    assert not run_part(project.context(), project.part(), FOREVER)
    c = project.context()
    assert "kept" in c.journal.begin("mended", keep=True)
    assert c.journal.progress("racecheck").results == {}  # which test it was, nobody knows
    assert project.outcomes() == {"a": "passed"}
    assert c.journal.begin("again", keep=False).endswith("from the beginning")
    assert project.outcomes() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl (Linux)")
def test_a_command_ends_with_the_tool_whatever_kills_that(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tools")!r})
from gpu import Context, Journal
c = Context(Journal(), Path("."))
c.run(["sh", "-c", "sleep 100 & echo $! > {pid}.child"], 1e9, {{}})
c.run(["sh", "-c", "echo $$ > {pid}; sleep 100"], 1e9, {{}})
"""
    with subprocess.Popen([sys.executable, "-c", code]) as tool:
        while not pid.exists() or not pid.read_text():
            time.sleep(0.05)
        assert gone(int(Path(f"{pid}.child").read_text()))  # what the first command left behind
        tool.send_signal(signal.SIGKILL)
    assert gone(int(pid.read_text()))


def gone(pid: int) -> bool:
    """Whether the process ends within a few seconds (a zombie has ended)."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        try:
            os.kill(pid, 0)
            if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


# --- numbers ---


def test_the_measured_column_stands_beside_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gpu_numbers, "predicted", lambda gpu: PREDICTED)
    rows(tmp_path / "r.json")
    head, _, *lines = _gpu_numbers.table(_gpu_numbers.measured(tmp_path / "r.json", ""), False)
    assert "computed, not measured" in head
    assert [line.split() for line in lines[:2]] == [
        ["pool", "a", "forward", "float16", "1000", "580.0", "80", "600", "97%"],
        ["pool", "b", "forward", "float16", "7", "50.0", "80", "600", "8%"],
    ]
    (question,) = lines[2:]
    assert "EXPLAIN: pool b forward float16 7: 50 GB/s measured, 600 predicted, -92%" in question
    monkeypatch.setattr(_gpu_numbers, "predicted", lambda gpu: {})
    rows(tmp_path / "f.json", first=True)
    lines = _gpu_numbers.table(_gpu_numbers.measured(tmp_path / "f.json", ""), True)
    assert len(lines) == 2 + 3  # both sizes of a; where nothing is predicted, nothing is asked
    assert {tuple(line.split()[-2:]) for line in lines[2:]} == {("-", "-")}
    assert _gpu_numbers.measured(tmp_path / "none", "") == []


def test_predictions_are_computed_before_and_for_one_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib.so"
    monkeypatch.setattr(_gpu_numbers, "KEPT", tmp_path)
    monkeypatch.setattr(_gpu_numbers.occupancy, "LIBRARY", library)
    of_h200 = {"H200": PREDICTED}
    monkeypatch.setattr(
        _gpu_numbers.occupancy, "predictions", lambda gpu, arch: of_h200.get(gpu, {})
    )
    assert _gpu_numbers.predict() == 1
    library.write_text("code")
    assert _gpu_numbers.predicted("NVIDIA H200") == {}
    assert _gpu_numbers.predict() == 0
    assert _gpu_numbers.predicted("NVIDIA H200") == PREDICTED
    assert _gpu_numbers.predicted("NVIDIA A100") == {}
    library.write_text("other code")
    assert _gpu_numbers.predicted("NVIDIA H200") == {}


# --- the build, and which tests there are ---


def test_files_that_will_do_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may come from another machine: what counts are their sources."""
    package = tmp_path / "fusedtrain"
    package.mkdir()
    ran: list[Sequence[str]] = []
    monkeypatch.setattr(Context, "run", lambda c, words, *rest: ran.append(words) or (0, False))
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "find", lambda name: "/somewhere/nvcc")
    lacking: set[str] = set()
    monkeypatch.setattr(gpu, "why_not", lambda name: name if name in lacking else "")
    sources = gpu.setup_module().sources_key()
    (package / "_C_cuda.so").touch()

    def builds(key: str = sources) -> list[str]:
        (package / "_build_info.json").write_text(json.dumps({"sources": key}))
        ran.clear()
        assert gpu.build(Context(Journal(), tmp_path), H200) == 0
        return [words[-1] for words in ran]

    assert builds() == []
    assert builds("of others") == ["--inplace"]
    lacking.add("autograd")  # for one torch and one Python: that alone is built
    assert builds() == ["build-autograd"]
    lacking.add("cuda")  # no image for this GPU
    assert builds() == ["--inplace"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("test_activation_kernels.py::test_numbers[cuda-mish-torch.float16]", "cuda"),
        ("test_activation_kernels.py::test_numbers[triton-mish-torch.float16]", "triton"),
        ("test_activation_kernels.py::test_numbers[emulated-mish-torch.float16]", "rest"),
        ("test_autograd.py::test_it[mish-cuda]", "cuda"),
        ("test_gpu_amp.py::test_a_loss_on_the_cpu[SGD0]", "cuda"),
        ("test_triton_optimizers.py::test_kernels[1]", "triton"),
        ("test_triton.py::test_code[sm_80]", "rest"),
        ("test_gpu_tool.py::test_junit", "rest"),
        ("fusedtrain/functional.py::fusedtrain.functional.gelu", "rest"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


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


def test_parts(tmp_path: Path, h200: list[Part]) -> None:
    names = [part.name for part in h200]
    assert len({*names}) == len(names)
    assert {n.split()[1] for n in names if n.split()[0] in ("networks", "bench")} == {
        *_gpu_parts.ALL_FAMILIES, "triton",
    }  # fmt: skip
    checked = {word for part in h200 for word in part.command if "_gpu_checks.py::" in word}
    tests = collected(tmp_path, *checked)
    assert {name.partition("[")[0] for name in tests} == {n.partition("[")[0] for n in checked}
    (first,) = [part for part in h200 if part.name == "rows"]
    run = subprocess.run(
        [*first.command, "--device=cpu", "--collect-only"], cwd=ROOT, capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    families = set(re.findall(r"<Module bench_(\w+)\.py>", run.stdout))
    assert families == {*_gpu_parts.FIRST}, run.stdout[-2000:]
    without = _gpu_parts.parts("", "no-gpu", 1)
    skipped = {part.name.split()[0] for part in without if part.skip}
    assert skipped == {"memcheck", "rows", "ncu", "plans", "sanitize", "compile"}


def test_a_plan_is_checked(capfd: pytest.CaptureFixture[str]) -> None:
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(4)]
    model, x = nn.Sequential(*sum(layers, ())), torch.randn(2, 8, 32, 32)
    peak = _gpu_checks.check_plan(model, x, torch.sum, 0.8)
    assert f"{peak / 1e6:.1f} in training" in capfd.readouterr().out
