"""Data for a package page and a forge: versions, extras, issue forms, the pages of the site."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusedtrain import __version__
from helpers import ROOT

yaml = pytest.importorskip("yaml")
tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def test_citation_has_the_version_and_the_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


@pytest.mark.parametrize("extra", ["docs", "cli"])
def test_extra_is_printed(extra: str) -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "tools" / "extra.py", extra],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.split() == PROJECT["optional-dependencies"][extra]


PINS = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))


def test_what_makes_the_site_is_pinned() -> None:
    for requirement in PROJECT["optional-dependencies"]["docs"]:
        name = re.sub(r"\[.*\]", "", requirement)
        assert name in PINS, name


# The libraries of each page about one, beside torch.
PAGES = {
    "lightning.md": ["lightning"],
    "huggingface.md": ["accelerate", "transformers"],
    "coming_from_timm.md": ["timm", "torchvision"],
    "export.md": ["onnx", "onnxscript", "onnxruntime"],
    "distributed.md": ["deepspeed"],
}


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_the_versions_that_are_tested(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for library in [*PAGES[page], "torch"]:
        named = re.findall(rf"(?<![\w-]){library} (\d+\.\d+\.\d+)", text, re.I)
        assert named, f"{page} names no version of {library}"
        assert set(named) == {PINS[library]}, f"{page}: {library}"


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(content)
    ids = [field["id"] for field in content["body"] if field["type"] != "markdown"]
    assert len(set(ids)) == len(ids)
    assert "info" in ids  # what `python -m fusedtrain info` prints
    kinds = {field["type"] for field in content["body"]}
    assert kinds <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def test_every_page_is_in_the_site() -> None:
    """As `make docs` finds out, too, which needs mkdocs."""
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {
        page for page in pages if f": {page}\n" not in nav and f"- {page}\n" not in nav
    } == set()
