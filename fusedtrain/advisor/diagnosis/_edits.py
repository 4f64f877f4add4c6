"""Changes of the source as a unified diff; nothing is written."""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .._views import shortest
from ._graphs import adds_to
from ._rule import Change

_COMPOUND = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)


class _Edit(NamedTuple):
    """The source from character `start` to `end` becomes `text`."""

    start: int
    end: int
    text: str


class _Source:
    """A file as text, in the encoding that it declares, with the offsets of its lines."""

    def __init__(self, file: str) -> None:
        raw = Path(file).read_bytes()
        self.encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
        self.text = raw.decode(self.encoding)
        self.tree = ast.parse(self.text)
        self.lines = [0]
        for line in _lines(self.text):
            self.lines.append(self.lines[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _offset(self, line: int, column: int) -> int:
        """ast counts columns in bytes of UTF-8."""
        before = self.line(line).encode()[:column].decode()
        return self.lines[line - 1] + len(before)

    def line(self, number: int) -> str:
        return self.text[self.lines[number - 1] : self.lines[number]]

    def indentation(self, line: int) -> str:
        text = self.line(line)
        return text[: len(text) - len(text.lstrip())]

    def as_written(self, text: str) -> list[str]:
        """Lines of the text in the bytes of the file: bytes that are not UTF-8 are escaped as
        surrogates."""
        return _lines(text.encode(self.encoding).decode(errors="surrogateescape"))

    def calls(self, line: int, names: tuple[str, ...]) -> list[ast.Call]:
        """Calls of these names over the line, those that begin latest first."""
        nodes = [
            node for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or 0)
            and _name(node.func) in names
        ]  # fmt: skip
        return sorted(nodes, key=lambda n: (n.lineno, n.col_offset), reverse=True)

    def within(self, kind: type[ast.AST] | tuple[type[ast.AST], ...], line: int) -> list[ast.AST]:
        """Nodes of the kind around a line, the innermost first."""
        nodes = [
            n for n in ast.walk(self.tree)
            if isinstance(n, kind) and n.lineno <= line <= n.end_lineno  # type: ignore[attr-defined]
        ]  # fmt: skip
        return sorted(nodes, key=lambda n: n.end_lineno - n.lineno)  # type: ignore[attr-defined]


def _lines(text: str) -> list[str]:
    """Lines as Python counts them: `str.splitlines` also ends a line at a form feed."""
    return list(io.StringIO(text, newline=""))


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def diff_of(changes: Iterable[Change]) -> str:
    """All changes as one unified diff, for `patch -p0`. Changes that the source does not allow, or
    that overlap an earlier one, are left out. Bytes of the source that are not UTF-8 are escaped
    as surrogates."""
    files: dict[str, list[Change]] = {}
    for change in {repr(change): change for change in changes}.values():
        files.setdefault(change.file, []).append(change)
    return "".join(_diff(file, those) for file, those in files.items())


def _diff(file: str, changes: list[Change]) -> str:
    try:
        source = _Source(file)
    except (OSError, SyntaxError, ValueError):
        return ""
    edits: list[_Edit] = []
    top: list[str] = []
    for change in changes:
        if change.action == "top":
            top += change.names
        elif change.action in _ACTIONS:
            made, imports = _ACTIONS[change.action](source, change)
            if made and not any(_overlap(a, b) for a in made for b in edits):
                edits += made
                top += imports
    edits += _at_top(source, top)
    if not edits:
        return ""
    after = source.text
    for edit in sorted(edits, reverse=True):
        after = after[: edit.start] + edit.text + after[edit.end :]
    path = shortest(file)
    lines = difflib.unified_diff(
        source.as_written(source.text), source.as_written(after), path, path
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
                   for line in lines)  # fmt: skip


def _overlap(a: _Edit, b: _Edit) -> bool:
    if a.start == a.end == b.start == b.end:
        return a.text == b.text
    return a.start < b.end and b.start < a.end


_Made = tuple[list[_Edit], list[str]]  # and lines for the top of the file


def _keywords(source: _Source, change: Change) -> _Made:
    """Sets keywords of a call; an empty value leaves the keyword out."""
    calls = source.calls(change.line, change.names)
    if not calls or any(keyword.arg is None for keyword in calls[0].keywords):  # **options
        return [], []
    call, edits, added = calls[0], [], []
    present = {keyword.arg: keyword for keyword in call.keywords}
    for name, value in change.options.items():
        keyword = present.get(name)
        if keyword is None:
            if value:
                added.append(f"{name}={value}")
            elif edit := _positional(source, call, name):
                edits.append(edit)
        elif value:
            edits.append(_Edit(source.start(keyword.value), source.end(keyword.value), value))
        else:
            edits.append(_without(source, call, keyword))
    if added:
        edits.append(_append(source, call, ", ".join(added)))
    return edits, []


def _positional(source: _Source, call: ast.Call, name: str) -> _Edit | None:
    """`nn.SiLU(True)` and `zero_grad(False)`: the only argument is the keyword's value."""
    if len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and not call.keywords:
        return _Edit(source.start(call.args[0]), source.end(call.args[0]), "")
    if name == "inplace" and len(call.args) == 2:  # F.silu(x, True)
        return _Edit(source.end(call.args[0]), source.end(call.args[1]), "")
    return None


def _without(source: _Source, call: ast.Call, keyword: ast.keyword) -> _Edit:
    """The keyword with the comma before it, or the one after it."""
    items: list[ast.AST] = sorted([*call.args, *call.keywords], key=source.start)
    place = items.index(keyword)
    if place:
        return _Edit(source.end(items[place - 1]), source.end(keyword), "")
    if len(items) > 1:
        return _Edit(source.start(keyword), source.start(items[1]), "")
    return _Edit(source.start(keyword), source.end(keyword), "")


def _append(source: _Source, call: ast.Call, text: str) -> _Edit:
    items = sorted([*call.args, *call.keywords], key=source.start)
    if not items:
        return _Edit(source.end(call) - 1, source.end(call) - 1, text)
    end = source.end(items[-1])
    return _Edit(end, end, f", {text}")


def _argument(source: _Source, change: Change) -> _Made:
    """The first argument of a call."""
    calls = source.calls(change.line, change.names)
    if not calls or not calls[0].args:
        return [], []
    first = calls[0].args[0]
    return [_Edit(source.start(first), source.end(first), change.options["value"])], []


def _replace(source: _Source, change: Change) -> _Made:
    """Another function is called: the first of the names becomes the second."""
    calls = source.calls(change.line, change.names[:1])
    if not calls:
        return [], []
    function = calls[0].func
    return [_Edit(source.start(function), source.end(function), change.names[1])], [
        "import fusedtrain"
    ]


def _convert(source: _Source, change: Change) -> _Made:
    """A line after the assignment of the model."""
    for node in source.within(ast.Assign, change.line):
        assert isinstance(node, ast.Assign)
        target = node.targets[0]
        if "DataParallel" in ast.unparse(node.value):  # convert comes before the wrapper
            break
        if isinstance(target, (ast.Name, ast.Attribute)) and len(node.targets) == 1:
            name, indent = ast.unparse(target), source.indentation(node.lineno)
            text = f"{indent}fusedtrain.convert({name}{change.options['arguments']})\n"
            end = source.lines[node.end_lineno or node.lineno]
            return [_Edit(end, end, text)], ["import fusedtrain"]
    return [], []


def _detach(source: _Source, change: Change) -> _Made:
    """Adds `.detach()` to the value that the variable collects."""
    for node in source.within((ast.AugAssign, ast.Assign, ast.Call), change.line):
        if not adds_to(node, change.names[0]):
            continue
        value = node.args[0] if isinstance(node, ast.Call) else node.value  # type: ignore[attr-defined]
        if isinstance(value, (ast.Tuple, ast.List, ast.Dict, ast.Set)):  # the loss is an item of it
            return [], []
        simple = isinstance(value, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
        end = source.end(value)
        if simple:
            return [_Edit(end, end, ".detach()")], []
        start = source.start(value)
        return [_Edit(start, start, "("), _Edit(end, end, ").detach()")], []
    return [], []


def _no_grad(source: _Source, change: Change) -> _Made:
    """A decorator of the function, if nothing within it trains."""
    for node in source.within((ast.FunctionDef, ast.AsyncFunctionDef), change.line):
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        trains = any(
            isinstance(part, ast.Attribute) and part.attr in ("backward", "zero_grad")
            for part in ast.walk(node)
        )
        if trains or node.name == "forward":
            break
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        start = source.lines[first - 1]
        text = f"{source.indentation(first)}@torch.no_grad()\n"
        return [_Edit(start, start, text)], ["import torch"]
    return [], []


_ACTIONS = {
    "keywords": _keywords,
    "argument": _argument,
    "replace": _replace,
    "convert": _convert,
    "detach": _detach,
    "no_grad": _no_grad,
}


def _at_top(source: _Source, lines: list[str]) -> Iterator[_Edit]:
    """Imports that the file lacks, and statements, after its last import at the top level."""
    imports = [n for n in source.tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    present = {alias.asname or alias.name for n in imports if isinstance(n, ast.Import)
               for alias in n.names}  # fmt: skip
    chosen = [
        line for line in dict.fromkeys(lines)
        if not line.startswith("import ") or line.removeprefix("import ") not in present
    ]  # fmt: skip
    if not chosen:
        return
    chosen.sort(key=lambda line: not line.startswith("import "))
    after = imports[-1].end_lineno or 0 if imports else _docstring_end(source.tree)
    rest = [line for line in chosen if not line.startswith("import ")]
    text = "".join(f"{line}\n" for line in chosen if line.startswith("import "))
    text += "".join(f"\n{line}" for line in rest) + ("\n" if rest else "")
    place = source.lines[after]
    yield _Edit(place, place, text)


def _docstring_end(tree: ast.Module) -> int:
    first = tree.body[0] if tree.body else None
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return (first.end_lineno or 0) if first is not None and is_docstring else 0
