"""Comments and docstrings that begin with a relative word instead of their subject."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

_OPENING = re.compile(r"(What|Of|Which|Those|Who)\b")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_openings(source: str) -> Iterator[tuple[int, str]]:
    """Lines and first lines of such docstrings and comments."""
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        if text and _OPENING.match(text):
            yield node.body[0].lineno, text.split("\n")[0]  # type: ignore[attr-defined]
    before = 0  # the line of a comment that goes on
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("# ")
        alone = token.line.lstrip().startswith("#")
        if not (alone and before == line - 1) and _OPENING.match(text):
            yield line, text
        before = line if alone else 0


def cpp_openings(source: str) -> Iterator[tuple[int, str]]:
    """Lines and first lines of such `//` comments."""
    goes_on = False
    for number, line in enumerate(source.split("\n"), 1):
        comment = re.search(r"(?:^|\s)//\s?(.*)", line)
        alone = line.lstrip().startswith("//")
        if comment and not (alone and goes_on) and _OPENING.match(comment[1]):
            yield number, comment[1]
        goes_on = alone
