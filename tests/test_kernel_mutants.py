"""`make kernel-mutants` takes an hour: what makes its mutants of Triton kernels, and what judges
them, on a small tree."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = '''
import triton

@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Not this 1 + 1."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, tl.where(x > 0.5, x, -x), mask=at < n)
    tl.store(y_ptr, tl.sum(x, axis=0))

def host(n):
    return n + 1
'''


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    kept = list(sys.path)
    import _triton_mutants as triton_mutants

    yield triton_mutants
    sys.path[:] = kept


def test_mutants_of_a_kernel(tools: Any, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(SOURCE)
    made = list(tools.of_file(tmp_path, "kernels.py"))
    after = {m.after for m in made}
    assert {m.function for m in made} == {"kernel"}
    for line in (
        "at = tl.program_id(0) + BLOCK + tl.arange(0, BLOCK)",
        "at = tl.program_id(0) * BLOCK - tl.arange(0, BLOCK)",
        "at = tl.program_id(0) * BLOCK + tl.arange(1, BLOCK)",
        "x = tl.load(x_ptr + at + 1, mask=at < n, other=0.0)",
        "x = tl.load(x_ptr + at, mask=at <= n, other=0.0)",
        "x = tl.load(x_ptr + at, mask=(at < n) | True, other=0.0)",
        "x = tl.load(x_ptr + at, mask=at < n, other=1.0)",
        "tl.store(y_ptr + at, tl.where(x > 0.5, -x, x), mask=at < n)",
        "tl.store(y_ptr + at, tl.where(x > 0.5, x, (x)), mask=at < n)",
        "tl.store(y_ptr, tl.sum(x, axis=1))",
        "pass",
    ):
        assert line in after, line
    for m in made:
        text = m.applied(SOURCE)
        assert text != SOURCE
        ast.parse(text)
        assert m.new in text.splitlines()[m.line - 1] or "\n" in m.new
    with pytest.raises(AssertionError, match="the source is another one"):
        made[0].applied(SOURCE.replace("at = ", "place = ", 1))


def test_mutants_of_all_kernels(tools: Any) -> None:
    made = tools.mutants(ROOT)
    files = {m.file for m in made}
    assert {Path(f).name for f in files} == set(tools.TESTS), "tests for each file with kernels"
    assert all(
        (ROOT / test.split("::")[0]).exists() for tests in tools.TESTS.values() for test in tests
    )
    assert len(made) > 3000
    assert set(tools.EQUIVALENT) <= {m.key for m in made}, "strike what is no longer made"
    known = {(m.file, m.function) for m in made}
    assert set(tools.NO_OTHER) <= known
    for m in made[:: len(made) // 200]:
        ast.parse(m.applied((ROOT / m.file).read_text()))


def test_tests_run_in_forks(tools: Any, tmp_path: Path) -> None:
    from _collected import Collected

    package, tests = tmp_path / "fusedtrain", tmp_path / "tests"
    package.mkdir()
    tests.mkdir()
    (package / "__init__.py").touch()
    kernel = package / "kernel.py"
    kernel.write_text("def f(x): return x + 1\n")
    (tests / "test_f.py").write_text(
        "import time\n"
        "def test_quick():\n    from fusedtrain.kernel import f; assert f(1) == 2\n"
        "def test_two():\n    from fusedtrain.kernel import f; assert f(2) == 3\n"
    )
    # In a process of its own: the tree's package has the name of ours.
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tools")!r})
from pathlib import Path
from _collected import Collected
tests = Collected(Path({str(tmp_path)!r}), ["tests/test_f.py"])
kernel = Path({str(kernel)!r})
file = ["tests/test_f.py"]
assert tests.run(file, 60) == ""
kernel.write_text("def f(x): return x - 1\\n")
assert tests.run(file, 60) == "test_f.py::test_quick"
assert tests.run(file, 60, ["test_f.py::test_two"]) == "test_f.py::test_two"
assert tests.run(["tests/test_f.py::test_two"], 60) == "test_f.py::test_two"
kernel.write_text("def f(x):\\n    while True: pass\\n")
assert tests.run(file, 0.5) == "not done after 0.5 s"
kernel.write_text("import os; os.abort()\\n")
assert tests.run(file, 60) == "exit -6"
kernel.write_text("def f(x): return x + 1\\n")
assert tests.run(file, 60) == ""
assert tests.run(["tests/test_none.py"], 60) == "there are no tests"
tests.close()
"""
    import subprocess

    assert Collected.__module__ == "_collected"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
