"""Helpers that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent


def environment(**variables: str) -> dict[str, str]:
    """Variables of a process that imports the tests' helpers, and the package of this checkout."""
    path = os.pathsep.join([str(TESTS), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, **variables}
