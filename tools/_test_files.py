"""Test files by their names alone: the folder of a file is found, and no two have one name."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"


@functools.cache
def files() -> dict[str, Path]:
    """The test files by name, without `.py`."""
    paths = sorted(TESTS.rglob("test_*.py"))
    by_name = {path.stem: path for path in paths}
    assert len(by_name) == len(paths), "two test files have one name"
    return by_name


def located(test: str) -> str:
    """`test_few_bit::test_kernels[cuda` with the path of its file, relative to the checkout."""
    name, separator, case = test.partition("::")
    return f"{files()[name].relative_to(ROOT)}{separator}{case}"


def all_located(tests: Iterable[str]) -> list[str]:
    return [located(test) for test in tests]
