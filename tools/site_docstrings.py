"""Docstrings as Markdown for the documentation site (an extension of griffe).

Sources have reStructuredText's roles and doctests: roles become code, doctests fenced blocks.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:func|class|mod|meth|attr):`~?([^`]+)`")
_DOCTEST = re.compile(r"^([ ]*)>>> .*(?:\n\1\S.*|\n\1[ ]+\S.*)*", re.M)
_LITERAL = re.compile(r"::$", re.M)


def as_markdown(text: str) -> str:
    text = _ROLE.sub(r"`\1`", _LITERAL.sub(":", text))
    return _DOCTEST.sub(lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```\n", text)


class Doctests(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = as_markdown(obj.docstring.value)
