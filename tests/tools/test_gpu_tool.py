"""`make gpu` loses nothing: cuts, crashes, hangs, lost GPUs, rehearsed with small projects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from helpers.gpu_project import DEADLINE, PREDICTED, ROOT, Project, rows

sys.path.insert(0, str(ROOT / "tools"))

import _gpu_numbers
import gpu
from _gpu_plugin import Journal, kind_of
from _gpu_steps import LEAST, Step, run_step
from helpers.processes import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs process groups (not Windows)"),
    # Names of backends are names of parts here.
    pytest.mark.launches_nothing("kernels run in other processes, if at all"),
]
FOREVER = float("inf")


@pytest.mark.parametrize("kind", ["slow", "deaf"])
def test_a_step_that_is_cut_goes_on_where_it_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """By SIGINT, after which pytest tells its summary, or where that is ignored by SIGKILL."""
    project = Project(tmp_path, "a", "b", "c", "d")
    project.does("c", kind)
    project.does("b", "fail")
    c, step = project.context(), project.step()
    assert run_step(c, step, LEAST - 1)  # too short to begin
    assert run_step(c, step, DEADLINE)
    # A busy machine may take longer than pytest is given for its summary.
    assert c.clock() >= DEADLINE or kind == "slow"
    assert project.outcomes() == {"a": "passed", "b": "failed"}
    assert [n[-3:] for n in c.journal.progress("cuda").left] == ["[c]", "[d]"]
    log = capfd.readouterr().out
    assert "stopped by the time limit" in log
    assert ("1 failed, 1 passed" in log) is (kind == "slow")

    project.does("c", "")
    again = project.context()
    assert not run_step(again, step, FOREVER)
    assert project.outcomes() == {"a": "passed", "b": "failed", "c": "passed", "d": "passed"}
    assert project.ran() == ["a", "b", "c", "c", "d"]
    assert again.journal.progress("cuda").done


@pytest.mark.parametrize(
    ("what", "workers"), [("SIGKILL", 2), ("SIGSEGV", 0), ("slow", 0), ("deaf", 0), ("deaf", 2)]
)
def test_a_test_that_kills_its_process_or_hangs_is_one_failure(
    tmp_path: Path, what: str, workers: int
) -> None:
    project = Project(tmp_path, *"abcde")
    project.does("b", what)
    step = project.step(workers=workers, patience=180.0 if what.startswith("SIG") else 1.0)
    assert not run_step(project.context(), step, FOREVER)
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
    assert not run_step(project.context(), project.step(workers=workers), FOREVER)
    assert project.outcomes() == {str(n): "failed" if n == 2 else "passed" for n in range(6)}
    progress = project.context().journal.progress("cuda")
    (bad,) = progress.bad
    assert "an illegal memory access" in progress.results[bad]["message"]


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
    assert not run_step(project.context(), project.step(), FOREVER)
    outcomes = {name.rpartition("::")[2]: o for name, o in project.outcomes().items()}
    assert outcomes == {
        "test_broken.py": "error", "test_setup": "error", "test_teardown": "error",
        "test_skip": "skipped", "test_xfail": "xfailed", "test_passes": "passed",
    }  # fmt: skip
    results = project.context().journal.progress("cuda").results
    assert results["test_small.py::test_skip"]["message"].endswith("no GPU")


def test_a_command_that_cannot_run_is_no_endless_loop(tmp_path: Path) -> None:
    project = Project(tmp_path, "a")
    step = Step("cuda", [sys.executable, "-c", "raise SystemExit(3)"])
    assert not run_step(project.context(), step, FOREVER)
    assert project.outcomes() == {"cuda: all": "error"}
    assert not run_step(project.context(), project.step(), FOREVER)
    assert project.outcomes() == {"cuda: all": "passed", "a": "passed"}


def test_an_alarm_of_the_command_is_a_failure(tmp_path: Path) -> None:
    """compute-sanitizer's: all tests pass, and it found a race all the same."""
    project = Project(tmp_path, "a")
    command = " ".join(project.step().command)
    step = Step("racecheck", ["sh", "-c", f'{command} "$@"; exit 9', "sh"], alarm=9)
    assert not run_step(project.context(), step, FOREVER)
    assert project.outcomes("racecheck") == {"a": "passed", "racecheck: exit 9": "failed"}
    c = project.context()
    c.journal.begin("mended", keep=True)
    assert c.journal.progress("racecheck").results == {}  # which test it was, nobody knows


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl (Linux)")
def test_a_command_ends_with_the_tool_whatever_kills_that(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tools")!r})
from _gpu_steps import Context, Journal
c = Context(Journal(), "a", Path("."))
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


# --- the journal ---


def journal(tmp_path: Path, *outcomes: tuple[str, str]) -> Journal:
    log = Journal(tmp_path / "state/j", tmp_path / "results/j")
    log.begin("one", keep=False)
    log.append("wanted", "s", ids=[name for name, _ in outcomes])
    for name, outcome in outcomes:
        log.end("s", name, outcome, "why", 0.5)
    return log


def test_a_journal_is_for_one_tree(tmp_path: Path) -> None:
    outcomes = [("b", "failed"), ("b", "crashed"), ("c", "passed"), ("c", "crashed")]
    j = journal(tmp_path, ("a", "passed"), *outcomes)
    assert {n: e["outcome"] for n, e in j.progress("s").results.items()} == {
        "a": "passed", "b": "failed", "c": "crashed",  # the first failure is the reason
    }  # fmt: skip
    with j.paths[0].open("a") as file:
        file.write('{"event": "te')  # of a process that was killed
    assert j.begin("one", keep=False) == "goes on where the last call stopped"
    assert j.progress("s").done
    assert "kept" in j.begin("two", keep=True)
    (kept,) = j.progress("s").results.values()  # c runs again: it passed, then its process died
    assert [kept[key] for key in ("id", "outcome", "seconds", "message")] == [
        "a", "passed", 0.5, "why",
    ]  # fmt: skip
    assert not j.progress("s").done  # the names are collected anew: there may be new tests
    for lost in (1, 0):  # $OUT is new at every call; a machine may be
        j.paths[lost].unlink()
        assert j.begin("two", keep=False) == "goes on where the last call stopped"
        assert j.paths[lost].read_text() == j.paths[1 - lost].read_text()
        assert j.progress("s").results.keys() == {"a"}
    assert j.begin("three", keep=False).endswith("from the beginning")
    assert j.progress("s").results == {}


def test_the_time_of_all_processes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0, 0, 10, 15, 70, 170, 171, 180])
    monkeypatch.setattr(Journal, "now", lambda journal: float(next(times)))
    j = Journal(tmp_path / "j")
    for event in ("tree", "run", "wanted", "start", "ran", "run", "start", "wanted"):
        j.append(event, "s", id="t", ids=["t"])
    assert j.progress("s").seconds == 70 + 10  # the second one was killed


def test_junit(tmp_path: Path) -> None:
    outcomes = {"a[\x00]": "passed", "b": "failed", "c": "crashed", "d": "skipped"}
    j = journal(tmp_path, *((f"f.py::{name}", outcome) for name, outcome in outcomes.items()))
    j.append("wanted", "s", ids=["f.py::a[\x00]", "f.py::e"])
    path = tmp_path / "x.xml"
    j.junit(path, ["s", "t"])
    suite, empty = ElementTree.parse(path).getroot()
    assert {k: suite.get(k) for k in ("name", "tests", "failures", "errors", "skipped")} == {
        "name": "s", "tests": "5", "failures": "1", "errors": "1", "skipped": "2",
    }  # fmt: skip
    assert [(case.get("name"), [child.tag for child in case]) for case in suite] == [
        ("a[?]", []), ("b", ["failure"]), ("c", ["error"]), ("d", ["skipped"]), ("e", ["skipped"]),
    ]  # fmt: skip
    assert suite[4][0].get("message") == "not run: the part was cut"
    assert len(empty) == 0


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


# --- numbers and files ---


def test_the_measured_column_stands_beside_the_prediction(tmp_path: Path) -> None:
    rows(tmp_path / "r.json")
    measured = _gpu_numbers.measured(tmp_path / "r.json", PREDICTED)
    head, _, *lines = _gpu_numbers.table(measured, first=False)
    assert "computed, not measured" in head
    assert [line.split() for line in lines[:2]] == [
        ["pool", "a", "forward", "float16", "1000", "580.0", "80", "600", "97%"],
        ["pool", "b", "forward", "float16", "7", "50.0", "80", "600", "8%"],
    ]
    (question,) = lines[2:]
    assert "EXPLAIN: pool b forward float16 7: 50 GB/s measured, 600 predicted, -92%" in question
    assert "no row" in _gpu_numbers.table(measured, first=True)[0]
    rows(tmp_path / "f.json", first=True)
    lines = _gpu_numbers.table(_gpu_numbers.measured(tmp_path / "f.json", {}), first=True)
    assert len(lines) == 2 + 3  # both sizes of a; where nothing is predicted, nothing is asked
    assert {tuple(line.split()[-2:]) for line in lines[2:]} == {("-", "-")}
    assert _gpu_numbers.measured(tmp_path / "none", {}) == []


def test_predictions_are_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    library, occupancy = tmp_path / "lib.so", _gpu_numbers.occupancy
    monkeypatch.setattr(_gpu_numbers, "KEPT", tmp_path)
    monkeypatch.setattr(occupancy, "LIBRARY", library)
    monkeypatch.setattr(occupancy, "predictions", lambda gpu, arch: PREDICTED)
    assert _gpu_numbers.predicted("H200", "90") == {}
    library.write_text("code")
    assert _gpu_numbers.predicted("H200", "90") == PREDICTED
    monkeypatch.setattr(occupancy, "predictions", lambda gpu, arch: 1 / 0)
    assert _gpu_numbers.predicted("H200", "90") == PREDICTED
    library.write_text("other code")
    assert _gpu_numbers.predicted("H200", "90") == {}
    assert "no predictions: division by zero" in capfd.readouterr().out


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


def test_files_are_in_both_folders(tmp_path: Path) -> None:
    """The folder of the results is a new one at this call, or the machine is (``--from``)."""
    both, earlier = [tmp_path / "results", tmp_path / "build"], tmp_path / "earlier"
    for folder in (both[0], earlier):
        rows(folder / "h200.json")
    (earlier / "h200-gpu.jsonl").write_text("journal")
    (earlier / "a100.json").touch()
    (both[0] / "h200.json").write_text("newer")
    gpu.share("h200*.json*", [*both, earlier], both)
    (both[0] / "h200.json").unlink()
    gpu.share("h200*.json*", both, both)
    for folder in both:
        assert sorted(p.name for p in folder.iterdir()) == ["h200-gpu.jsonl", "h200.json"]
        assert (folder / "h200.json").read_text() == "newer"
