"""`make gpu` loses nothing: processes that die, hang or are cut; its numbers; its build."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import gpu
from _gpu_parts import FOUND, Part, pytest_command
from _gpu_plugin import Journal
from gpu import LEAST, Call, Machine, run_part

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs timeout and prctl (Linux)"),
    # Names of backends are names of parts here.
    pytest.mark.launches_nothing("kernels run in other processes, if at all"),
]
FOREVER = float("inf")
# A test's action is in a file, so that a second call finds the machine mended. SIGALRM says to
# `timeout`, the parent, that the time is up, and the file "late" says so to the clock.
TESTS = """
import os, pathlib, pytest, signal, time
HERE = pathlib.Path(__file__).parent

@pytest.mark.parametrize("name", NAMES)
def test_it(name):
    with (HERE / "ran").open("a") as log:
        print(name, file=log)
    what = (HERE / name).read_text() if (HERE / name).exists() else ""
    if what == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if what in ("cut", "deaf"):
        (HERE / "late").touch()
        os.kill(os.getppid(), signal.SIGALRM)
    if what in ("cut", "deaf", "hang"):
        time.sleep(100)
    assert what != "fail", "wrong numbers"
    if what:
        os.kill(os.getpid(), getattr(signal, what))
"""


class Project:
    """Tests by name; does() says what one does: "cut", "deaf", "hang", "fail", a signal's name."""

    def __init__(self, folder: Path, names: str, tests: str = TESTS) -> None:
        self.folder, self.results = folder / "project", folder / "results"
        self.folder.mkdir()
        (self.folder / "test_small.py").write_text(f"NAMES = {[*names]}\n{tests}")
        (self.folder / "pytest.ini").write_text("[pytest]\n")

    def does(self, name: str, what: str) -> None:
        (self.folder / name).write_text(what)

    def ran(self) -> str:
        """The names of all tests that were begun, by all processes."""
        return "".join((self.folder / "ran").read_text().split())

    def part(self, workers: int = 0, patience: float = 180.0) -> Part:
        if workers:
            pytest.importorskip("xdist")
        # Plugins that take 2.5 of the 3.2 s of a start.
        unused = [f"-pno:{plugin}" for plugin in ("hypothesispytest", "benchmark", "anyio")]
        return Part("part", [*pytest_command(workers), *unused], patience=patience)

    def run(self, part: Part | None = None, seconds: float = FOREVER) -> dict[str, str]:
        """A new call; returns all outcomes, from the copy of the journal beside the results."""
        journal = Journal(self.folder / "state/j", self.results / "j")
        journal.add("", "call", tree="tree")
        late = self.folder / "late"
        c = Call(journal, self.results, lambda: 1e6 * late.exists(), root=self.folder)
        run_part(c, part or self.part(), c.clock() + seconds)
        results = Journal(self.results / "j").steps()["part"].results
        return {
            name.partition("[")[2].rstrip("]") or name: e["event"] for name, e in results.items()
        }


@pytest.mark.parametrize("kind", ["cut", "deaf"])
def test_a_part_that_is_cut_goes_on_where_it_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """SIGINT lets pytest tell its summary; SIGKILL ends a process that ignores SIGINT."""
    project = Project(tmp_path, "abcd")
    project.does("c", kind)
    project.does("b", "fail")
    assert project.run(seconds=LEAST - 1) == {}  # too short to begin
    monkeypatch.setattr(gpu, "GRACE", 2.0 if kind == "deaf" else 60.0)
    assert project.run(seconds=1000.0) == {"a": "passed", "b": "failed"}
    log = capfd.readouterr().out
    assert "stopped by the time limit" in log
    assert ("1 failed, 1 passed" in log) is (kind == "cut")
    project.does("c", "")
    assert project.run() == {"a": "passed", "b": "failed", "c": "passed", "d": "passed"}
    assert project.ran() == "abccd"


@pytest.mark.parametrize(("what", "workers"), [("SIGKILL", 2), ("SIGSEGV", 0), ("hang", 2)])
def test_a_test_that_kills_its_process_or_hangs_is_one_failure(
    tmp_path: Path, what: str, workers: int
) -> None:
    project = Project(tmp_path, "abcde")
    project.does("b", what)
    outcomes = project.run(project.part(workers, 180.0 if what.startswith("SIG") else 1.0))
    assert outcomes == {**dict.fromkeys("acde", "passed"), "b": "crashed"}
    assert project.ran().count("b") == 1


TORCH = """
class cuda:
    broken = False
    def is_initialized(): return True
    def synchronize():
        if cuda.broken: raise RuntimeError("CUDA error: an illegal memory access")
"""
LOST = """
import pytest, torch
@pytest.mark.parametrize("n", NAMES)
def test_it(n):
    torch.cuda.synchronize()
    torch.cuda.broken = n == "c"
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_gpu_that_is_lost_takes_one_test_with_it(tmp_path: Path, workers: int) -> None:
    """An illegal access makes every later call of the process fail; it is seen at the next wait."""
    project = Project(tmp_path, "abcde", LOST)
    (project.folder / "torch.py").write_text(TORCH)
    outcomes = project.run(project.part(workers))
    assert outcomes == {**dict.fromkeys("abde", "passed"), "c": "failed"}
    assert "an illegal memory access" in (project.results / "j").read_text()


ENDS = """
import pytest
@pytest.fixture
def bad(): raise ValueError("setup")
@pytest.fixture
def late():
    yield
    raise ValueError("teardown")
def test_setup(bad): pass
def test_teardown(late): pass
def test_skip(): pytest.skip("no GPU")
@pytest.mark.xfail
def test_xfail(): assert False
def test_passes(): pass
"""


def test_every_way_to_end(tmp_path: Path) -> None:
    project = Project(tmp_path, "", ENDS)
    (project.folder / "test_broken.py").write_text("import no_such_module\n")
    assert {name.rpartition("::")[2]: outcome for name, outcome in project.run().items()} == {
        "test_broken.py": "failed", "test_setup": "failed", "test_teardown": "failed",
        "test_skip": "skipped", "test_xfail": "skipped", "test_passes": "passed",
    }  # fmt: skip


def test_a_command_that_fails_by_itself(tmp_path: Path) -> None:
    project = Project(tmp_path, "a")
    broken = Part("part", ["false"])
    assert project.run(broken) == {"part": "failed"}  # no endless loop
    command = " ".join(project.part().command)
    # As compute-sanitizer: all tests pass, and it found a race all the same.
    alarmed = Part("part", ["sh", "-c", f'{command} "$@"; exit {FOUND}', "sh"])
    assert project.run(alarmed) == {"a": "passed", f"part: exit {FOUND}": "failed"}


def test_files_that_will_do_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may come from another machine: what counts are their sources."""
    package = tmp_path / "fusedtrain"
    package.mkdir()
    ran: list[Sequence[str]] = []
    monkeypatch.setattr(Call, "run", lambda c, words, *rest: ran.append(words) or (0, False))
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "find", lambda name: "/somewhere/nvcc")
    monkeypatch.setattr(gpu, "machine", lambda: "asked again")
    sources = gpu.setup_module().sources_key()

    def builds(*missing: str, key: str = sources) -> list[str]:
        (package / "_build_info.json").write_text(json.dumps({"sources": key}))
        ran.clear()
        m = Machine("NVIDIA H200", "90", "2.11.0", 1 << 37, dict.fromkeys(missing, "why"))
        assert gpu.build(Call(Journal(), tmp_path), m) == (0, "asked again" if ran else m)
        return [words[-1] for words in ran]

    assert builds() == []
    assert builds(key="of others") == ["--inplace"]
    assert builds("autograd") == ["build-autograd"]  # for one torch and one Python: that alone
    assert builds("cuda") == ["--inplace"]  # no image for this GPU
    assert builds("cpu", "cuda") == ["--inplace"]
