"""`make kernel-mutants` takes an hour: what makes its mutants, and what judges them, on a small
tree."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cuda_emulator
from helpers import ROOT
from helpers.processes import run_python

pytestmark = pytest.mark.slow

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


@pytest.fixture
def cuda_tools(tools: Any) -> Any:
    import _cuda_mutants

    return _cuda_mutants


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


def collected(kind: Any) -> list[str]:
    """The tests that prepare() of a kind of mutants collects."""
    files = sorted({row.split("::")[0] for rows in kind.TESTS.values() for row in rows})
    command = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = run_python(
        *command, *files, *kind.CHOSEN, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


def without_tests(rows: Iterable[str], tests: list[str]) -> list[str]:
    """Rows with which the name of no test begins: such a row judges nothing."""
    from _collected import is_of

    return [row for row in rows if not any(is_of(test, row) for test in tests)]


def test_rows_of_triton_name_tests(tools: Any) -> None:
    tests = collected(tools)
    expanded: dict[str, set[str]] = {}  # of each row: a {} is another name for each function
    for m in tools.mutants(ROOT):
        names = tools.tests_of(m)
        for row, name in zip(tools.TESTS[Path(m.file).name], names, strict=True):
            expanded.setdefault(row, set()).add(name)
    missing = {row: without_tests(names, tests) for row, names in expanded.items()}
    nameless = set().union(*missing.values())
    assert {row for row, names in missing.items() if len(names) == len(expanded[row])} == set()
    assert {m.function for m in tools.mutants(ROOT) if nameless >= set(tools.tests_of(m))} == set()


def test_rows_of_cuda_name_tests(cuda_tools: Any) -> None:
    rows = [row for rows in cuda_tools.TESTS.values() for row in rows]
    assert without_tests(rows, collected(cuda_tools)) == []


def test_words_that_choose_tests_are_in_their_names(tools: Any, cuda_tools: Any) -> None:
    from _test_files import files

    texts = "\n".join(path.name + path.read_text() for path in files().values())
    chosen = f"{tools.CHOSEN} {cuda_tools.CHOSEN}"
    words = set(re.findall(r"[\w.]+", chosen)) - {"and", "or", "not"}
    assert {word for word in words if word not in texts} == set()


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
assert 0 <= tests.usual(["tests/test_f.py::test_two"]) <= tests.usual(file) < 60
assert tests.usual(["tests/test_none.py"]) == 0
kernel.write_text("def f(x): return x - 1\\n")
assert tests.run(file, 60) == "test_f.py::test_quick"
assert tests.run(file, 60, ["test_f.py::test_two"]) == "test_f.py::test_two"
assert tests.run(["tests/test_f.py::test_two"], 60) == "test_f.py::test_two"
kernel.write_text("def f(x):\\n    while True: pass\\n")
assert tests.run(file, 0.5) == "not done after 0.5 s"
assert tests.run(file, 60) == "a test does not end"
kernel.write_text("import os; os.abort()\\n")
assert tests.run(file, 60) == "exit -6"
kernel.write_text("def f(x): return x + 1\\n")
assert tests.run(file, 60) == ""
assert tests.run(["tests/test_none.py"], 60) == "there are no tests"
tests.close()
"""
    assert Collected.__module__ == "_collected"
    done = run_python("-c", code, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


CUDA = """\
#include "launch.cuh"
constexpr int kMost = 2 + 3;
template <class S, int kLanes = 2 + 2>
__global__ void __launch_bounds__(kThreads, 2)
    sum_kernel(const S* x, int64_t n, float* y) {
  __shared__ float scratch[kWarps + 1];
  const int lane = threadIdx.x % kWarp;
  float sum = 0;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += kThreads)
    sum += x[i] - 1;  // i < n
  sum += __shfl_down_sync(0xffffffffu, sum, offset);
  __syncthreads();
  if (lane == 0 && n > 0) y[0] = sum;
  const int64_t least = n < kMost ? n : kMost;
#pragma unroll
  for (int k = 0; k < kLanes; ++k) own[k] = 0;
  if (n * kLanes == 0) return;
}
"""
BROKEN = {
    "barrier deleted": "",
    "<= for <": "for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i <= n; i +="
    " kThreads)",
    "-= for +=": "for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i -="
    " kThreads)",
    "lane of a shuffle": "sum += __shfl_down_sync(0xffffffffu, sum, 1 + offset);",
    "the next thread": "const int lane = (threadIdx.x + 1) % kWarp;",
    "one more": "if (lane == 1 + 0 && n > 0) y[0] = sum;",
    "never": "if (lane == 0 && false && n > 0) y[0] = sum;",
    ">= for >": "if (lane == 0 && n >= 0) y[0] = sum;",
}


def test_mutants_of_a_cuda_kernel(cuda_tools: Any, tmp_path: Path) -> None:
    folder = tmp_path / cuda_tools.FOLDER
    folder.mkdir(parents=True)
    (folder / "sum.cu").write_text(CUDA)
    made = cuda_tools.mutants(tmp_path)
    assert {m.function for m in made} == {"sum_kernel"}
    assert {m.what: m.after for m in reversed(made)}.items() >= BROKEN.items()
    for m in made:
        assert "kMost" not in m.before, "the smaller of two is the same by either comparison"
        assert m.what != "<= for <" or "own" not in m.before, "the emulator cannot see that"
        assert m.what != "times two" or "return" not in m.before, "twice 0 is 0"
        assert m.applied(CUDA) != CUDA
    # All of them in one source, in which none is switched on.
    sites = list(enumerate(cuda_tools._sites(CUDA)))
    assert len(sites) == len(made) + 3
    text = cuda_tools.with_switches(CUDA, sites).removeprefix(cuda_tools._SWITCHES)
    for number in range(len(sites)):
        assert text.count(f"({number})") == 1
    assert "if (!ft_is(" in text
    assert "i < ft_more(" in text


def test_mutants_of_all_cuda_kernels(cuda_tools: Any) -> None:
    made = cuda_tools.mutants(ROOT)
    files = {m.file for m in made}
    assert len(made) > 1400
    with_code = {p.name for p in (ROOT / cuda_tools.FOLDER).glob("*.cu*")}
    # A table of formulas and a table of kernels have nothing to break.
    assert {Path(f).name for f in files} == with_code - {"formula.cuh", "optimizer_update.cu"}
    tests = {test.split("::")[0] for file in files for test in cuda_tools.tests_of(file)}
    assert all((ROOT / test).exists() for test in tests)
    assert set(cuda_tools.EQUIVALENT) <= {m.key for m in made}, "strike what is no longer made"


def test_the_sources_with_all_mutants_compile(cuda_tools: Any, tmp_path: Path) -> None:
    """10 s here; `make kernel-mutants` would find out after five minutes."""
    if reason := cuda_emulator.why_not():
        pytest.skip(reason)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    sites: dict[str, list[Any]] = {}
    for number, file, site, _ in cuda_tools._numbered(ROOT):
        sites.setdefault(file, []).append((number, site))
    for file, its in sites.items():
        (tmp_path / file).write_text(cuda_tools.with_switches((ROOT / file).read_text(), its))
    for source in sorted((tmp_path / "csrc/cuda").glob("*.cu")):
        command = ["c++", "-fsyntax-only", "-w", *cuda_emulator.KERNEL_FLAGS.split(), str(source)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[:2000]


def test_a_library_with_all_mutants_is_built_once(
    cuda_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_tools, "KEPT", tmp_path / "kept")
    builds = []

    def build(arguments: list[str], cwd: Path, **_: Any) -> Any:
        assert "ft_more(0)" in (cwd / "csrc/cuda/sum.cu").read_text()
        assert "ft_chosen" in (cwd / "tests/cuda_emulator/emulator.cpp").read_text()
        (cwd / "build/emulator/_emulated.so").write_text(f"{len(builds)}")
        builds.append(cwd)
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(cuda_tools.subprocess, "run", build)

    def library(name: str, source: str) -> str:
        tree = tmp_path / name
        for file, text in {
            "csrc/cuda/sum.cu": source,
            "tests/cuda_emulator/emulator.cpp": "",
        }.items():
            (tree / file).parent.mkdir(parents=True)
            (tree / file).write_text(text)
        sites = {"csrc/cuda/sum.cu": list(enumerate(cuda_tools._sites(source)))}
        cuda_tools._build(tree, sites)
        assert (tree / "csrc/cuda/sum.cu").read_text() == source
        return str((tree / "build/emulator/_emulated.so").read_text())

    assert library("first", CUDA) == "0"
    assert library("second", CUDA) == "0"
    assert library("third", CUDA.replace("- 1", "- 2")) == "1"
    assert len(builds) == 2
