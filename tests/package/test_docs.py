"""README and docs/: the Python examples run as they stand, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MOST_LINES = 120  # of README
EXAMPLES = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str) -> None:
    exec(compile(code, "example", "exec"), {})


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= MOST_LINES, "details belong into docs/, tables into docs/benchmarks.md"


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as web sites make them of Markdown."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path", [*PAGES, ROOT / "CONTRIBUTING.md", *ROOT.glob("*/README.md")], ids=lambda p: p.name
)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text())
    for name, anchor in links:
        target = path.parent / name if name else path
        assert target.exists(), f"{path.name}: {name}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{path.name}: {name}#{anchor}"


def test_anchors() -> None:
    text = "# `save`, A-b: x\n```\n# no heading\n```\n## In the place of the input\n"
    assert anchors(text) == {"save-a-b-x", "in-the-place-of-the-input"}
