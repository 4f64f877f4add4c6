"""The check of the built documentation site finds what is wrong with a page, and no more."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))
site_check = importlib.import_module("site_check")
site_browser = importlib.import_module("_browser")

# As the theme writes a page: the column, a table in its box, code with its button.
PAGE = """<!doctype html><style>
  .md-content__inner {{ width: 400px }} .md-typeset__scrollwrap {{ overflow-x: auto }}
  pre {{ margin: 0; position: relative }} code {{ display: block; overflow: auto }}
  nav {{ position: absolute; right: 0; top: 0; width: 24px; height: 24px }}
</style><div class="md-content__inner">{body}</div>"""
TABLE = (
    '<div class="md-typeset__scrollwrap"><table><td style="min-width: {width}px">a</table></div>'
)
CODE = '<pre><nav class="md-code__nav"></nav><code>{text}</code></pre>'
GOOD = TABLE.format(width=300) + CODE.format(text="x = 1\ny = 2")


def build(folder: Path, **bodies: str) -> Path:
    """A site of these pages."""
    for name, body in {"index": GOOD, **bodies}.items():
        (folder / f"{name}.html").write_text(PAGE.format(body=body))
    return folder


def test_links_and_anchors(tmp_path: Path) -> None:
    good = '<a id="top"></a><a href="index.html">a</a><a href="#top">b</a><a href=".">c</a>'
    outside = '<a href="https://pytorch.org/x#y">d</a>'
    bad = '<a href="none.html">e</a><a href="index.html#none">f</a><img src="none.svg">'
    build(tmp_path, good=good + outside, bad=bad)
    assert site_check.broken_links(tmp_path) == [
        "bad.html: none.html is not there",
        "bad.html: index.html#none has no such anchor",
        "bad.html: none.svg is not there",
    ]


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A browser's page."""
    program = site_browser.find()
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium-headless-shell)")
    with site_browser.browser(program) as opened:
        yield opened


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (TABLE.format(width=500), "a table scrolls in its box"),
        (CODE.format(text="x" * 200), "a code block is cut"),
        (CODE.format(text="x " * 26), "a copy button covers code"),
        ('<p style="width: 450px">long</p>', "<p> leaves its column"),
        ('<p style="width: 1400px">long</p>', "the page scrolls sideways"),
    ],
)
def test_what_is_seen_badly(page: Any, tmp_path: Path, body: str, fault: str) -> None:
    build(tmp_path, bad=body)
    faults = site_check.unreadable(tmp_path, page)
    assert all(line.startswith("bad.html, ") for line in faults)
    assert {width for width in (1280, 500) if f"bad.html, {width} px: {fault}" in str(faults)}


def test_a_request_that_leaves(page: Any, tmp_path: Path) -> None:
    address = "http://127.0.0.1:9/x.png"
    build(tmp_path, bad=f'<img src="{address}">')
    assert site_check.unreadable(tmp_path, page) == [f"a page asks for {address}"]
    page.requests.clear()


def test_pictures(page: Any, tmp_path: Path) -> None:
    site, pictures = tmp_path / "site", tmp_path / "pictures"
    site.mkdir()
    pictures.mkdir()
    assert site_check.unreadable(build(site), page, pictures) == []
    names = {path.name for path in pictures.iterdir()}
    assert names == {"index.html-1280.png", "index.html-500.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())


def test_without_a_browser_links_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(site_check, "find", lambda: None)
    assert site_check.main([str(build(tmp_path))]) == 0
    assert "no Chromium is installed" in capsys.readouterr().out
    build(tmp_path, bad='<a href="none.html">e</a>')
    assert site_check.main([str(tmp_path)]) == 1
    assert "bad.html: none.html is not there" in capsys.readouterr().out
