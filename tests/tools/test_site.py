"""The documentation site's own code: links of a page, names of the API, docstrings."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from helpers import ROOT

pytest.importorskip("mkdocs", reason="make docs installs it")
pytest.importorskip("griffe", reason="make docs installs it")
sys.path.insert(0, str(ROOT / "tools"))
site_pages = importlib.import_module("site_pages")
site_docstrings = importlib.import_module("site_docstrings")


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("docs/memory.md", "memory.md"),
        ("docs/decisions", "decisions/README.md"),
        ("README.md", "index.md"),
        ("CHANGELOG.md", "repository/CHANGELOG.md"),
        ("examples", "repository/examples/README.md"),
        ("examples/train.py", "repository/examples/train.py.md"),
        ("tests/scripts", "repository/tests/scripts/index.md"),
        ("benchmarks/results/a.png", "repository/benchmarks/results/a.png"),
    ],
)
def test_place(path: str, place: str) -> None:
    assert site_pages.place_of(path) == place


def test_links_are_those_outside_of_code() -> None:
    text = "[a](x.md#y) [b](https://z) [c](#d)\n```\n[e](f.md)\n```\n![g](../h.png)\n"
    assert site_pages.links(text) == ["x.md", "../h.png"]


def test_sources_keep_their_fences() -> None:
    """A source with a Markdown fence in it stays one block."""
    assert site_pages.code_page("tests/tools/test_site.py").count("\n``````") == 2


def test_a_page_asks_no_other_host(caplog: pytest.LogCaptureFixture) -> None:
    page = SimpleNamespace(url="api/x.html", file=SimpleNamespace(src_uri="api/x.md"))
    theirs = f'<script src="{site_pages._WORKER}"></script>'
    ours = '<script src="../offline_worker.js"></script>'
    assert site_pages.on_post_page(theirs, page, None) == ours
    assert not caplog.records
    assert site_pages.on_post_page("", page, None) == ""
    assert "no longer loads" in caplog.text


def test_names_of_the_list() -> None:
    sections = site_pages.api_sections((ROOT / "docs" / "api.md").read_text())
    assert "convert" in sections["fusedtrain"]
    assert sections["fusedtrain.apex.larc"] == ["LARC"]


def test_docstrings_become_markdown() -> None:
    text = "See :func:`torch.x`.\n\nExample:\n    >>> a = 1\n    >>> a\n    1\n\nMore::\n"
    assert site_docstrings.as_markdown(text) == (
        "See `torch.x`.\n\nExample:\n"
        "    ```pycon\n    >>> a = 1\n    >>> a\n    1\n    ```\n\n\nMore:\n"
    )


def test_a_wide_table_can_be_stacked() -> None:
    head = "<table><thead><tr><th>op</th><th align='right'><code>a&lt;b</code></th></tr></thead>"
    narrow = f"{head}<tbody><tr><td>x</td><td>y z</td></tr></tbody></table>"
    assert site_pages.stackable(narrow) == narrow
    long = "y" * 60
    wide = site_pages.stackable(narrow.replace("y z", long))
    assert wide.startswith("<table data-stacked><thead><tr><th>op</th>")
    assert f'<td data-label="op">x</td><td data-label="a&lt;b">{long}</td>' in wide
