"""`make sanitize` sees planted faults: in a function, and in the process of a test."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import _planted
import _sanitized
import sanitize

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The planted faults, compiled with the flags of `make sanitize`."""
    if sys.platform != "linux" or not shutil.which("c++"):
        pytest.skip("needs Linux and a C++ compiler")
    try:
        _sanitized.runtime()
    except _sanitized.CannotRun as reason:
        pytest.skip(str(reason))
    return _sanitized.build_faults(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("name", _planted.FAULTS)
def test_a_planted_fault_is_reported(library: Path, name: str) -> None:
    assert _planted.judge_fault(library, name, _planted.FAULTS[name]) == []


def test_every_planted_fault_is_run() -> None:
    source = (ROOT / "tools/sanitizer_faults.cpp").read_text()
    assert set(re.findall(r"^FT_FAULT\((\w+)\)", source, re.M)) == _planted.FAULTS.keys()
    kernels = (ROOT / "tests/cuda_emulator/faults.cu").read_text()
    for name in _planted.EMULATED_FAULTS:
        assert name.split()[0] in kernels


@pytest.mark.parametrize(("name", "expected"), [("nothing", "heap"), ("signed_overflow", "")])
def test_a_fault_that_is_missed_is_told(library: Path, name: str, expected: str) -> None:
    (line,) = _planted.judge_fault(library, name, expected)
    assert name in line


TESTS = """
import ctypes
import pytest

def call(name):
    c, p = ctypes.CDLL(None), ctypes.c_void_p()
    c.posix_memalign(ctypes.byref(p), 16, 64)
    c.memset(p, 0, 64)
    getattr(ctypes.CDLL({library!r}), name)(p, ctypes.c_int64(16))

@pytest.mark.parametrize("name", {names!r})
def test_case(name):
    call(name)
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(_sanitized, "TREE", tmp_path)
    monkeypatch.setattr(sanitize, "LOGS", tmp_path / "logs")
    return tmp_path


def run(tree: Path, library: Path, names: list[str], every: int = 1) -> _planted.Result:
    text = TESTS.format(library=str(library), names=names)
    (tree / "tests/test_it.py").write_text(text)
    env = _sanitized.environment(more=_planted.PLUGINS)
    return sanitize.run_tests("it", ["tests/test_it.py"], "not other", env, 1, every)


def test_a_fault_in_a_test_fails_it_alone(library: Path, tree: Path) -> None:
    names = ["nothing", "read_past_the_end", "signed_overflow", "nothing", "nothing"]
    result = run(tree, library, names)
    assert re.search("2 failed, 3 passed", result.ran)
    for expected in ("heap-buffer-overflow", "signed integer overflow", "test_case[read_past_the"):
        assert any(expected in line for line in result.wrong), result.wrong


def test_every_nth_case(library: Path, tree: Path) -> None:
    result = run(tree, library, ["nothing", "signed_overflow", "read_past_the_end"] * 2, every=3)
    assert result.wrong == []
    assert result.ran.startswith("2 passed")


def test_no_test_at_all_is_a_failure(library: Path, tree: Path) -> None:
    assert run(tree, library, []).wrong


def test_a_fuzz_that_is_not_there_is_a_failure(tree: Path) -> None:
    (line,) = sanitize.run_fuzz("default", 10, 1).wrong
    assert "no generated case was run" in line


def test_help() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools/sanitize.py"), "--help"], capture_output=True, text=True
    )
    assert run.returncode == 0
    assert "--short" in run.stdout


def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sanitized, "machine_isas", lambda: ["default", "avx2"])
    everything = set(sanitize.PARTS)
    assert sanitize.instruction_sets(everything, short=False) == ["default", "avx2"]
    assert sanitize.instruction_sets(everything, short=True) == ["avx2"]
    assert sanitize.instruction_sets({"fuzz"}, short=True) == ["avx2"]
    assert sanitize.instruction_sets({"default", "fuzz"}, short=False) == ["default"]
    for asked, short in (({"avx512"}, False), ({"default"}, True)):
        with pytest.raises(_sanitized.CannotRun, match=next(iter(asked))):
            sanitize.instruction_sets(asked, short)


def test_the_copy_follows_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, tree = tmp_path / "root", tmp_path / "root/build/tree"
    (root / "package").mkdir(parents=True)
    monkeypatch.setattr(_sanitized, "ROOT", root)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / ".gitignore").write_text("build/\n*.so\n")
    for name in ("package/one.py", "package/two.py", "package/_C.so"):
        (root / name).write_text(name)
    _sanitized.copy_tree(tree)
    assert not (tree / "package/_C.so").exists()
    (tree / "package/_C.so").write_text("sanitized")
    (tree / "build").mkdir()
    (tree / "build/made.cpp").write_text("made by a test")
    (root / "package/one.py").write_text("changed")
    (root / "package/two.py").unlink()
    _sanitized.copy_tree(tree)
    assert (tree / "package/one.py").read_text() == "changed"
    assert not (tree / "package/two.py").exists()
    assert (tree / "package/_C.so").read_text() == "sanitized"
    assert (tree / "build/made.cpp").exists()


def test_reports_are_told_once() -> None:
    lines = [
        "==12==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x60 at pc 0x7f",
        "==13==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x61 at pc 0x7e",
        "csrc/ops/pool.h:3:4: runtime error: signed integer overflow: 1 + 2",
        "RuntimeError: runtime error",
    ]
    assert len(_planted.reports(lines)) == 2
