"""`make sanitize` sees planted faults: in a function, and in the process of a test."""

from __future__ import annotations

import re
import shutil
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
    result = run(tree, library, ["nothing", "read_past_the_end", "signed_overflow", "nothing"])
    assert re.search("2 failed, 2 passed", result.ran)
    for expected in ("heap-buffer-overflow", "signed integer overflow", "test_case[read_past_the"):
        assert any(expected in line for line in result.wrong), result.wrong
    chosen = run(tree, library, ["nothing", "signed_overflow", "read_past_the_end"] * 2, every=3)
    assert (chosen.wrong, chosen.ran[:8]) == ([], "2 passed")
    assert run(tree, library, []).wrong, "no test at all is a failure"


def test_a_fuzz_that_runs_nothing_is_a_failure(library: Path, tree: Path) -> None:
    assert sanitize.run_fuzz("default", 10, 1).wrong


def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sanitized, "machine_isas", lambda: ["default", "avx2"])
    assert sanitize.instruction_sets(set(sanitize.PARTS), short=True) == ["avx2"]
    assert sanitize.instruction_sets({"default", "fuzz"}, short=False) == ["default"]
    with pytest.raises(_sanitized.CannotRun, match="avx512"):
        sanitize.instruction_sets({"avx512"}, short=False)
