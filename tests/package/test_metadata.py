"""Versions that pages and files name: those of the package, those that are tested."""

from __future__ import annotations

import re

import pytest

from fusedtrain import __version__
from helpers import ROOT

PINS = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
PAGES = {
    "lightning.md": ["lightning"],
    "huggingface.md": ["accelerate", "transformers"],
    "coming_from_timm.md": ["timm", "torchvision"],
    "export.md": ["onnx", "onnxscript", "onnxruntime"],
    "distributed.md": ["deepspeed"],
}


def test_the_citation_has_the_version() -> None:
    assert re.search(rf"^version: \W*{__version__}\b", (ROOT / "CITATION.cff").read_text(), re.M)


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_the_versions_that_are_tested(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for library in [*PAGES[page], "torch"]:
        named = re.findall(rf"(?<![\w-]){library} (\d+\.\d+\.\d+)", text, re.I)
        assert set(named) == {PINS[library]}, f"{page}: {library}"
