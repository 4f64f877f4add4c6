"""The Python examples of the README and of docs/ run as they stand."""

from __future__ import annotations

import re

import pytest

from helpers import ROOT

EXAMPLES = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str) -> None:
    exec(compile(code, "example", "exec"), {})
