"""Mutants by rule: made of every kernel, marked where they are equivalent."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

from helpers import ROOT

sys.path.append(str(ROOT / "tools"))
import _python_mutants as rules
from _triton_mutants import _is_compiled
from mutants import sampled

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


def test_rules_and_marks(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(KERNEL)
    made = rules.mutants_of(tmp_path, "k.py", _is_compiled)
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
        rules.mutants_of(tmp_path, "k.py", _is_compiled)


@pytest.mark.parametrize(
    ("kind", "least"),
    [("_optimizer_mutants", 1500), ("_triton_mutants", 3000), ("_cuda_mutants", 1400)],
)
def test_mutants_of_all_files(kind: str, least: int) -> None:
    """A mark for which no mutant is made raises."""
    made = importlib.import_module(kind).mutants(ROOT)
    assert len(made) > least
    assert sampled(made, 2, 1) == sampled(made, 2, 1) != sampled(made, 2, 2)
    for m in sampled(made, 2, 1):
        text = (ROOT / m.file).read_text()
        assert m.applied(text) != text
