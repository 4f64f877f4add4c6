"""Mutants by rule: made of every kernel, marked where they are equivalent, noticed by tests."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import cuda_emulator
from helpers import ROOT
from helpers.processes import run_python

pytestmark = pytest.mark.slow
KERNEL = '''
import triton

@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Not this 1 + 1."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)  # equal (other=): not stored
    # equal (constant #2): the last
    tl.store(y_ptr + at + 2, tl.where(x > 0.5, x, -x), mask=at < n - 3)

def host(n):
    return n + 1
'''


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module


def test_rules_and_marks(load: Any, tmp_path: Path) -> None:
    rules, compiled = load("_python_mutants"), load("_triton_mutants")._is_compiled
    (tmp_path / "k.py").write_text(KERNEL)
    made = rules.mutants_of(tmp_path, "k.py", compiled)
    assert {m.function for m in made} == {"kernel"}
    assert {m.what for m in made if m.equal} == {"other=", "constant"}
    assert {m.old for m in made if m.what == "constant" and not m.equal} == {"0", "2", "3"}
    assert {
        "at = tl.program_id(0) * BLOCK - tl.arange(0, BLOCK)",
        "tl.store(y_ptr + at + 2, tl.where(x > 0.5, -x, x), mask=at < n - 3)",
        "tl.store(y_ptr + at + 2, tl.where(x > 0.5, x, -x), mask=(at < n - 3) | True)",
        "pass",
    } <= {m.after for m in made}
    for m in made:
        ast.parse(m.applied(KERNEL))
    (tmp_path / "k.py").write_text(KERNEL.replace("constant #2", "constant #4"))
    with pytest.raises(ValueError, match="mutants that are not made"):
        rules.mutants_of(tmp_path, "k.py", compiled)


KINDS = {"_optimizer_mutants": 1500, "_triton_mutants": 3000, "_cuda_mutants": 1400}


@pytest.mark.parametrize(("kind", "least"), KINDS.items())
def test_mutants_of_all_files(kind: str, least: int, load: Any) -> None:
    """A mark for which no mutant is made raises."""
    made, sampled = load(kind).mutants(ROOT), load("mutants").sampled
    assert len(made) > least
    assert sampled(made, 2, 1) == sampled(made, 2, 1) != sampled(made, 2, 2)
    for m in sampled(made, 2, 1):
        text = (ROOT / m.file).read_text()
        assert m.applied(text) != text


@pytest.mark.parametrize("name", ["_triton_mutants", "_cuda_mutants"])
def test_rows_name_tests(name: str, load: Any) -> None:
    """A row with which the name of no test begins would judge nothing."""
    kind, is_of = load(name), load("_collected").is_of
    named = load("_mutant").named
    rows = {row for rows in kind.TESTS.values() for row in named(rows)}
    files = sorted({row.split("::")[0] for row in rows})
    command = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"} if "triton" in name else dict(os.environ)
    done = run_python(*command, *files, *kind.CHOSEN, cwd=ROOT, env=interpreted)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    tests = done.stdout.splitlines()
    every = [kind.tests_of(m if "triton" in name else m.file) for m in kind.mutants(ROOT)]
    judging = {row for row in set().union(*every) if any(is_of(test, row) for test in tests)}
    assert [tests for tests in set(every) if not judging.intersection(tests)] == []
    assert {row for row in rows if "{}" not in row} <= judging


def test_the_sources_with_all_mutants_compile(load: Any, tmp_path: Path) -> None:
    if reason := cuda_emulator.why_not():
        pytest.skip(reason)
    cuda = load("_cuda_mutants")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    places: dict[str, list[Any]] = {}
    for number, site, m in cuda._numbered(ROOT):
        places.setdefault(m.file, []).append((number, site))
    for file, sites in places.items():
        (tmp_path / file).write_text(cuda.with_switches((ROOT / file).read_text(), sites))
    for source in sorted((tmp_path / "csrc/cuda").glob("*.cu")):
        command = ["c++", "-fsyntax-only", "-w", *cuda_emulator.KERNEL_FLAGS.split(), str(source)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[:2000]
