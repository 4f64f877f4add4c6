"""Mutants by rule are made of every kernel, and marked where they are equivalent."""

from __future__ import annotations

import importlib
import sys

import pytest

from helpers import ROOT

sys.path.append(str(ROOT / "tools"))
from mutants import sampled

pytestmark = pytest.mark.slow


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
