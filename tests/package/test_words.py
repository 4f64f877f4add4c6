"""README and the guides: short sentences and cells of tables; versions that are tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusedtrain import __version__
from helpers import ROOT

SENTENCE, CELL = 30, 25  # words, at most
FOLDERS = (".", "docs", "docs/recipes", "docs/experiments", "docs/benchmarks")
OTHERS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "api.md", "benchmarks.md")
PAGES = [p for f in FOLDERS for p in sorted((ROOT / f).glob("*.md")) if p.name not in OTHERS]

VERSIONS = {
    "lightning.md": "lightning",
    "huggingface.md": "accelerate transformers",
    "coming_from_timm.md": "timm torchvision",
    "export.md": "onnx onnxscript onnxruntime",
    "distributed.md": "deepspeed",
}


def words(text: str) -> int:
    """Words of a text; code in backticks and a formula are one word each."""
    text = re.sub(r"``.+?``|`[^`]+`", "code", text)
    text = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)
    return len(re.findall(r"\S*\w\S*", text))


def too_long(text: str) -> list[str]:
    """Long cells, and long sentences outside of tables. Code, comments and HTML do not count."""
    text = re.sub(r"^( *)```.*?^ *```$", "\n\n", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->|</?\w+[^>\n]*>", "", text, flags=re.S)
    text = re.sub(r"^(    .*\n)+", "\n", text, flags=re.M)
    rows = re.findall(r"^ *\|.*\|$", text, re.M)
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    text = re.sub(r"^( *\|.*\||#+ .*)$", "\n", text, flags=re.M)
    sentences = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|(?<=[.?!])[)*\"']*\s+", text)
    return [s for s in sentences if words(s) > SENTENCE] + [c for c in cells if words(c) > CELL]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_sentence_is_long(path: Path) -> None:
    assert not too_long(path.read_text()), f"{SENTENCE} words a sentence, {CELL} a cell of a table"
    assert len(too_long(f"{'word ' * 31}.\n\nA `b c`.\n\n| {'word ' * 26}|\n|---|\n")) == 2


def test_versions_are_those_of_the_package_and_those_that_are_tested() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^version: \W*{__version__}\b", citation, re.M)
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    for page, libraries in VERSIONS.items():
        text = (ROOT / "docs" / page).read_text()
        for library in (*libraries.split(), "torch"):
            versions = re.findall(rf"(?<![\w-]){library} (\d+\.\d+\.\d+)", text, re.I)
            assert set(versions) == {pins[library]}, f"{page}: {library}"
