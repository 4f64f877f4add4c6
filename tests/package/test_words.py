"""README and the guides are short to read: sentences, and cells of tables.

Pages of REMAINING are older than the limits. The list may only shrink: a page that keeps them must
leave it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import ROOT

SENTENCE, CELL = 30, 25  # words, at most
GENERATED = {"docs/api.md", "docs/benchmarks.md"}
REMAINING: set[str] = set()
FOLDERS = ("docs", "docs/recipes", "docs/experiments", "benchmarks/pages")
GUIDES = [*(path for name in FOLDERS for path in (ROOT / name).glob("*.md")), ROOT / "README.md"]
PAGES = sorted({path.relative_to(ROOT).as_posix() for path in GUIDES} - GENERATED)


def words(text: str) -> int:
    """Words of a text; code in backticks and a formula are one word each."""
    text = re.sub(r"``.+?``|`[^`]+`", "code", text)
    text = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)
    return len(re.findall(r"\S*\w\S*", text))


def prose(text: str) -> str:
    """The text without code, comments and HTML."""
    text = re.sub(r"^( *)```.*?^ *```$", "\n\n", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->|</?\w+[^>\n]*>", "", text, flags=re.S)
    return re.sub(r"^(    .*\n)+", "\n", text, flags=re.M)


def cells(text: str) -> list[str]:
    rows = re.findall(r"^ *\|.*\|$", prose(text), re.M)
    return [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def sentences(text: str) -> list[str]:
    """Sentences outside of tables. Headings, paragraphs and items of lists end one."""
    text = re.sub(r"^( *\|.*\||#+ .*)$", "\n", prose(text), flags=re.M)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|(?<=[.?!])[)*\"']*\s+", text)
    return [" ".join(part.split()) for part in parts if part.strip()]


def too_long(text: str) -> list[str]:
    long = [(SENTENCE, sentence) for sentence in sentences(text)]
    long += [(CELL, cell) for cell in cells(text)]
    return [f"{words(part)} words: {part}" for most, part in long if words(part) > most]


@pytest.mark.parametrize("name", PAGES)
def test_no_sentence_is_long(name: str) -> None:
    long_ones = too_long(Path(ROOT / name).read_text())
    if name in REMAINING:
        assert long_ones, f"{name} keeps the limits: take it off REMAINING"
    else:
        assert not long_ones, f"at most {SENTENCE} words a sentence, {CELL} a cell of a table"


@pytest.mark.parametrize(
    "term", ["freeze backbone", "segmentation", "hooks", "out of memory", "bf16 slow"]
)
def test_a_heading_has_the_words_that_people_search(term: str) -> None:
    """The site's search ranks headings first."""
    headings = [
        heading.lower()
        for path in GUIDES
        for heading in re.findall(r"^#+ (.*)$", prose(path.read_text()), re.M)
    ]
    assert any(all(word in heading for word in term.split()) for heading in headings)


def test_pages_remaining_exist() -> None:
    assert set(PAGES) >= REMAINING


def test_the_measure() -> None:
    text = "# A b\n\nOne two.\nThree `a b c` [four five](x.md)? Six\n\n- seven\n- eight\n\n"
    text += "| nine `ten x` | a |\n|---|---|\n\n```python\nno. code. here\n```\n"
    assert sentences(text) == [
        "One two.", "Three `a b c` [four five](x.md)?", "Six", "- seven", "- eight",
    ]  # fmt: skip
    assert [words(s) for s in sentences(text)] == [2, 4, 1, 1, 1]
    assert "nine `ten x`" in cells(text)
    assert len(too_long(f"{'word ' * 31}.\n\n| {'word ' * 26}|\n|---|\n")) == 2
    assert not too_long(f"{'word ' * 30}.\n\n| {'word ' * 25}|\n|---|\n")
