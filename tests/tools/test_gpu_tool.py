"""`make gpu` loses nothing: cuts, crashes, hangs, lost GPUs, rehearsed with small projects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from helpers.gpu_project import DEADLINE, ROOT, Project

sys.path.insert(0, str(ROOT / "tools"))

import _gpu_journal
import _gpu_process
import _gpu_steps
from _gpu_journal import Journal, Outcome
from _gpu_plugin import kind_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="process groups"),
    # Names of backends are names of parts here.
    pytest.mark.launches_nothing("kernels run in other processes, if at all"),
]
FOREVER = float("inf")


@pytest.mark.parametrize("kind", ["slow", "deaf"])
def test_a_step_that_is_cut_goes_on_where_it_stopped(tmp_path: Path, kind: str) -> None:
    """By SIGINT, after which pytest tells its summary, or where that is ignored by SIGKILL."""
    project = Project(tmp_path, "a", "b", "c", "d")
    project.does("c", kind)
    project.does("b", "fail")
    c, step = project.context(), project.step()
    assert _gpu_steps.run_step(c, step, DEADLINE) == "cut"
    # A busy machine may take longer than pytest is given for its summary.
    assert c.clock() >= DEADLINE or kind == "slow"
    assert project.outcomes() == {"a": "passed", "b": "failed"}
    assert [n[-3:] for n in _gpu_steps.not_run(c, step) or []] == ["[c]", "[d]"]
    log = "\n".join(project.lines)
    assert "stopped by the time limit" in log
    assert ("1 failed, 1 passed" in log) is (kind == "slow")
    assert not c.journal.done("cuda")

    project.does("c", "")
    again = project.context()
    assert _gpu_steps.run_step(again, step, FOREVER) == "done"
    assert project.outcomes() == {"a": "passed", "b": "failed", "c": "passed", "d": "passed"}
    assert project.ran() == ["a", "b", "c", "c", "d"]
    assert again.journal.done("cuda")


@pytest.mark.parametrize(("name", "workers"), [("SIGKILL", 2), ("SIGSEGV", 0)])
def test_a_test_that_kills_its_process_is_one_failure(
    tmp_path: Path, name: str, workers: int
) -> None:
    if workers:
        pytest.importorskip("xdist")
    project = Project(tmp_path, *"abcde")
    project.does("b", name)
    assert _gpu_steps.run_step(project.context(), project.step(workers=workers), FOREVER) == "done"
    assert project.outcomes() == {**dict.fromkeys("acde", "passed"), "b": "crashed"}
    assert project.ran().count("b") == 1


def test_a_test_that_hangs_is_one_failure(tmp_path: Path) -> None:
    project = Project(tmp_path, *"abc")
    project.does("b", "slow")
    assert _gpu_steps.run_step(project.context(), project.step(patience=1.0), FOREVER) == "done"
    assert project.outcomes() == {"a": "passed", "b": "hung", "c": "passed"}


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
    if workers:
        pytest.importorskip("xdist")
    project = Project(tmp_path, "a")
    (project.folder / "torch.py").write_text(TORCH)
    (project.folder / "test_small.py").write_text(
        "import pytest, torch\n"
        "@pytest.mark.parametrize('n', range(6))\n"
        "def test_it(n):\n"
        "    torch.cuda.synchronize()\n"
        "    torch.cuda.broken = n == 2\n"
    )
    assert _gpu_steps.run_step(project.context(), project.step(workers=workers), FOREVER) == "done"
    assert project.outcomes() == {str(n): "failed" if n == 2 else "passed" for n in range(6)}
    (message,) = (r.message for r in project.context().journal.results("cuda").values() if r.bad)
    assert "an illegal memory access" in message


def test_every_way_to_end_is_told(tmp_path: Path) -> None:
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
    assert _gpu_steps.run_step(project.context(), project.step(), FOREVER) == "done"
    outcomes = {name.rpartition("::")[2]: o for name, o in project.outcomes().items()}
    assert outcomes == {
        "test_broken.py": "error", "test_setup": "error", "test_teardown": "error",
        "test_skip": "skipped", "test_xfail": "xfailed", "test_passes": "passed",
    }  # fmt: skip
    results = project.context().journal.results("cuda")
    assert results["test_small.py::test_skip"].message.endswith("no GPU")


def test_a_command_that_cannot_run_is_no_endless_loop(tmp_path: Path) -> None:
    project = Project(tmp_path, "a")
    step = _gpu_steps.Step("cuda", [sys.executable, "-c", "raise SystemExit(3)"])
    assert _gpu_steps.run_step(project.context(), step, FOREVER) == "broken"
    assert project.outcomes() == {"cuda: all": "error"}
    assert _gpu_steps.run_step(project.context(), project.step(), FOREVER) == "done"
    assert project.outcomes() == {"cuda: all": "passed", "a": "passed"}


def test_an_alarm_of_the_command_is_a_failure(tmp_path: Path) -> None:
    """compute-sanitizer's: all tests pass, and it found a race all the same."""
    project = Project(tmp_path, "a")
    command = " ".join(project.step().command)
    step = _gpu_steps.Step("racecheck", ["sh", "-c", f'{command} "$@"; exit 9', "sh"], alarm=9)
    assert _gpu_steps.run_step(project.context(), step, FOREVER) == "done"
    assert project.outcomes("racecheck") == {"a": "passed", "racecheck: exit 9": "failed"}
    c = project.context()
    c.journal.begin("mended", keep=True)
    assert c.journal.results("racecheck") == {}  # which test it was, nobody knows


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    project = Project(tmp_path, "a")
    deadline = _gpu_steps.LEAST - 1
    assert _gpu_steps.run_step(project.context(), project.step(), deadline) == "cut"
    assert project.ran() == []


# --- processes ---


def test_children_of_a_command_end_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"sleep 100 & echo $! > {pid}"
    ended = _gpu_process.run(
        ["sh", "-c", code], print, time.monotonic, FOREVER, tmp_path, os.environ
    )
    assert ended == _gpu_process.Ended(0)
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


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_command_ends_with_the_tool_whatever_kills_that(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT / "tools")!r})
import _gpu_process
command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(100)"]
say = lambda line: open({str(pid)!r}, "w").write(line)
_gpu_process.run(command, say, time.monotonic, float("inf"), ".", os.environ)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as tool:
        while not pid.exists() or not pid.read_text():
            time.sleep(0.05)
        tool.send_signal(signal.SIGKILL)
    assert gone(int(pid.read_text()))


# --- the journal ---


def journal(tmp_path: Path, *outcomes: tuple[str, str]) -> Journal:
    log = Journal(tmp_path / "state/j", tmp_path / "results/j")
    log.begin("one", keep=False)
    for name, outcome in outcomes:
        log.append("test", "s", run="1", id=name, outcome=outcome, seconds=0.5, message="why")
    return log


def test_a_journal_is_for_one_tree(tmp_path: Path) -> None:
    j = journal(tmp_path, ("a", "passed"), ("b", "failed"))
    j.append("done", "s")
    with j.paths[0].open("a") as file:
        file.write('{"event": "te')  # of a process that was killed
    assert j.begin("one", keep=False) == "goes on where the last call stopped"
    assert j.results("s").keys() == {"a", "b"}
    assert j.done("s")
    assert "kept" in j.begin("two", keep=True)
    assert j.results("s") == {"a": Outcome("passed", 0.5, "why")}
    assert not j.done("s")
    assert j.begin("two", keep=False) == "goes on where the last call stopped"
    assert j.begin("three", keep=False).endswith("from the beginning")
    assert j.results("s") == {}
    assert j.paths[0].read_text() == j.paths[1].read_text()


def test_a_journal_fills_an_empty_folder_of_results_and_the_other_way(tmp_path: Path) -> None:
    j = journal(tmp_path, ("a", "passed"))
    for lost in (1, 0):  # $OUT is new at every call; a machine may be
        j.paths[lost].unlink()
        j.begin("one", keep=False)
        assert j.paths[lost].read_text() == j.paths[1 - lost].read_text()
        assert j.results("s").keys() == {"a"}


def test_the_first_failure_is_the_reason(tmp_path: Path) -> None:
    j = journal(tmp_path, ("a", "failed"), ("a", "crashed"), ("b", "passed"), ("b", "crashed"))
    assert {n: r.outcome for n, r in j.results("s").items()} == {"a": "failed", "b": "crashed"}


def test_junit(tmp_path: Path) -> None:
    j = journal(tmp_path, ("f.py::a[\x00]", "passed"), ("f.py::b", "failed"), ("f.py::c", "hung"),
                ("f.py::d", "skipped"))  # fmt: skip
    path = tmp_path / "x.xml"
    j.junit(path, {"s": ["f.py::a[\x00]", "f.py::e"], "t": []})
    suite, empty = ElementTree.parse(path).getroot()
    assert {k: suite.get(k) for k in ("name", "tests", "failures", "errors", "skipped")} == {
        "name": "s", "tests": "5", "failures": "1", "errors": "1", "skipped": "2",
    }  # fmt: skip
    assert [(case.get("name"), [child.tag for child in case]) for case in suite] == [
        ("a[?]", []), ("b", ["failure"]), ("c", ["error"]), ("d", ["skipped"]), ("e", ["skipped"]),
    ]  # fmt: skip
    assert suite[4][0].get("message") == "not run: the part was cut"
    assert len(empty) == 0


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    _gpu_journal.write(tmp_path / "f", "old")
    with pytest.raises(UnicodeEncodeError):
        _gpu_journal.write(tmp_path / "f", "new \ud800")
    assert (tmp_path / "f").read_text() == "old"


# --- which tests ---


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
        ("test_cuda_build.py::test_nothing_spills[a]", "rest"),
        ("fusedtrain/functional.py::fusedtrain.functional.gelu", "rest"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_step_has_only_tests_of_its_kind(tmp_path: Path) -> None:
    project = Project(tmp_path, "cuda-1", "triton-1", "cpu-1", "triton-2")
    for kind, names in (
        ("cuda", ["cuda-1"]),
        ("rest", ["cpu-1"]),
        ("triton", ["triton-1", "triton-2"]),
    ):
        c = project.context()
        step = _gpu_steps.Step(kind, project.step().command, kind)
        assert _gpu_steps.run_step(c, step, FOREVER) == "done"
        assert list(project.outcomes(kind)) == names
        assert json.loads((c.state / f"{kind}.wanted.json").read_text())
