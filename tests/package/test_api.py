"""docs/api.md lists the public names once; modules show these and no others."""

from __future__ import annotations

import importlib
import sys

import pytest

from helpers import ROOT
from helpers.processes import python

sys.path.insert(0, str(ROOT / "tools"))

import api_list


def test_the_page_is_up_to_date() -> None:
    assert api_list.PAGE.read_text() == api_list.page(), "run: python tools/api_list.py"


def test_every_name_has_a_sentence() -> None:
    for path, names in api_list.public_names().items():
        module = importlib.import_module(path)
        for name in names:
            sentence = api_list.first_sentence(getattr(module, name))
            assert len(sentence) > 5, f"{path}.{name} has no docstring"


@pytest.mark.parametrize("path", api_list.READ)
def test_modules_that_are_not_imported_have_their_names(path: str) -> None:
    docstrings = api_list.docstrings(path)
    assert len(docstrings) > 2
    assert all(len(text) > 20 for text in docstrings.values())


@pytest.mark.parametrize("path", api_list.MODULES)
def test_all_is_sorted_and_there(path: str) -> None:
    module = importlib.import_module(path)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert len(set(module.__all__)) == len(module.__all__)


def test_dir_of_the_package_is_the_list() -> None:
    """In a new process: what other tests have imported is not in the module yet."""
    shown = python("import fusedtrain; print(*dir(fusedtrain))").stdout.split()
    listed = {*api_list.public_names()["fusedtrain"]}
    modules = {path.split(".")[1] for path in api_list.MODULES if "." in path}
    # Shown for the types of reports, which these modules define.
    modules |= {"conversion", "folding"}
    extra = {name for name in shown if not name.startswith("__")} - listed - modules
    assert extra == set()
    assert listed | modules <= {*shown}


def test_internal_names_are_there() -> None:
    for path, names in api_list.INTERNAL.items():
        assert names <= set(importlib.import_module(path).__all__), path
