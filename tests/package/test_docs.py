"""README and docs/: the Python examples run as they stand, links lead somewhere.

A block that cannot run in a test has the line `<!-- not run: reason -->` before it; the reason
begins with one of REASONS.
"""

from __future__ import annotations

import ast
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers import ROOT
from helpers.models import accelerate, lightning, onnxruntime, torchvision, transformers
from helpers.rank_processes import on_two_ranks

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = (ROOT / "README.md", *DOCS)
TEXTS = (*PAGES, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/README.md")))
MOST_LINES = 100  # of README
REASONS = (
    "needs a GPU",
    "needs several processes",
    "needs a file of yours",  # a placeholder: train.py, a data set
    "takes minutes",
)


class Block(NamedTuple):
    page: Path
    language: str
    code: str
    reason: str | None  # for which it does not run

    @property
    def is_python(self) -> bool:
        """Marked so, or unmarked and a program that uses the package."""
        if self.language or "fusedtrain" not in self.code:
            return self.language == "python"
        try:
            tree = ast.parse(self.code)
        except SyntaxError:
            return False
        return not all(isinstance(node, ast.Expr) for node in tree.body)


def blocks_of(page: Path, text: str) -> list[Block]:
    pattern = r"(?:^<!-- not run: (.*?) -->\n+)?^```(\w*)[^\n]*\n(.*?)^```$"
    found = re.findall(pattern, text, re.M | re.S)
    return [Block(page, language, code, reason or None) for reason, language, code in found]


BLOCKS = [block for page in TEXTS for block in blocks_of(page, page.read_text())]
PYTHON = [block for block in BLOCKS if block.is_python]
EXAMPLES = [
    pytest.param(block.code, id=f"{block.page.relative_to(ROOT)}-{number}")
    for number, block in enumerate(PYTHON)
    if block.reason is None
]


def rank_of_example(rank: int, code: str, folder: Path, port: int) -> None:
    os.chdir(folder)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2",
        RANK=str(rank), LOCAL_RANK=str(rank),
    )  # fmt: skip
    names = {"__name__": "example"}
    exec(compile(code, "example", "exec"), names)
    # Nothing of `names` is freed: DistributedDataParallel may be the last to hold the group of
    # processes, and waits for a thread that waits for the GIL, at times for ever (torch 2.13).
    os._exit(0)


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "init_process_group()" in code:  # as torchrun starts it
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        on_two_ranks(rank_of_example, code, tmp_path, port)
        return
    if "timm" in code:
        torchvision()  # operator names can be declared once per process, by the tests' helper
    for library in (lightning, accelerate, transformers, onnxruntime):
        uses = rf"^(import|from) (fusedtrain.integrations.)?{library.__name__}\b"
        if re.search(uses, code, re.M):
            library()  # skips where it is missing
            monkeypatch.chdir(tmp_path)  # trainers make folders
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_what_does_not_run_says_why() -> None:
    reasons = {f"{block.page.name}: {block.reason}" for block in BLOCKS if block.reason}
    assert [r for r in reasons if not r.split(": ", 1)[1].startswith(REASONS)] == []
    unmarked = [f"{b.page.name}: {b.code}" for b in PYTHON if not b.language and not b.reason]
    assert not unmarked, "mark these blocks ```python, or say why they do not run"


def test_blocks() -> None:
    text = """a
```python
x = 1
```
<!-- not run: needs a GPU -->
```python
y = 1
```
```
import fusedtrain
```
```
fusedtrain doctor train.py
```
"""
    blocks = blocks_of(ROOT, text)
    assert [block.reason for block in blocks] == [None, "needs a GPU", None, None]
    assert [block.is_python for block in blocks] == [True, True, True, False]


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= MOST_LINES, "details belong into docs/, tables into docs/benchmarks.md"


def anchors(text: str) -> set[str]:
    """Anchors of the headings of a page, as web sites make them of Markdown."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
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
