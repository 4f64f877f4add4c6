"""Graphs of autograd that live longer than their step: who keeps them, and by which line."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from .._views import Site, is_library, running_frames
from ._facts import Kept
from ._modules import KEY, Mark

_NODES = 20_000  # that are looked at
_OBJECTS = 20_000
_ITEMS = 200  # of a collection
_HOLDERS = 10


class _Holder(NamedTuple):
    """A variable or an attribute. `file`: the source that may change it; `lines`: the part of the
    file that is searched first; `owner`: the object of an attribute, None for a variable."""

    name: str
    owner: Any
    file: str
    lines: tuple[int, int]
    tensor: Tensor | None = None


def kept_graphs(marks: list[Mark]) -> Kept:
    """`marks`: those of earlier steps that are alive."""
    steps = len({mark.step for mark in marks})
    backward = all(mark.used for mark in marks)
    size = max(mark.bytes for mark in marks)
    holders = list(islice(_holders({id(mark) for mark in marks}), _HOLDERS))
    if not holders:
        return Kept(None, "", steps, 0, size, backward)
    sites = [(holder, _keeping(holder)) for holder in holders]
    holder, site = next((pair for pair in sites if pair[1] is not None), sites[0])
    assert holder.tensor is not None
    nodes = sum(1 for _ in _graph(holder.tensor)) // max(steps + 1, 1)
    name = holder.name if holder.owner is None else f"{type(holder.owner).__name__}.{holder.name}"
    first, last = holder.lines
    local = holder.owner is None and site is not None and first <= site.line <= last
    return Kept(site, name, steps, nodes, size, backward, local)


def _graph(tensor: Tensor) -> Iterator[Any]:
    """The nodes behind a tensor."""
    waiting: list[Any] = [tensor.grad_fn]
    seen: set[Any] = {tensor.grad_fn}
    while waiting and len(seen) < _NODES:
        node = waiting.pop()
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)


def _reaches(tensor: Tensor, marks: set[int]) -> bool:
    return any(id(node.metadata.get(KEY)) in marks for node in _graph(tensor))


def _holders(marks: set[int]) -> Iterator[_Holder]:
    """Variables of the user's running functions, then of their modules; items of collections,
    attributes of the user's classes and enclosed variables that these reach."""
    frames = [f for f in running_frames() if not is_library(f.f_code.co_filename)]
    waiting: deque[tuple[Any, _Holder]] = deque()
    for frame in frames:
        _add_variables(waiting, frame.f_locals, frame.f_code)
    for frame in frames:
        _add_variables(waiting, frame.f_globals, frame.f_code)
    seen: set[int] = set()
    while waiting and len(seen) < _OBJECTS:
        value, holder = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.grad_fn is not None and _reaches(value, marks):
                yield holder._replace(tensor=value)
            continue
        waiting.extend(_parts(value, holder))


def _add_variables(
    waiting: deque[tuple[Any, _Holder]], variables: Mapping[str, Any], code: CodeType
) -> None:
    for name, value in list(variables.items()):
        waiting.append((value, _Holder(name, None, code.co_filename, _range(code))))


def _parts(value: Any, holder: _Holder) -> Iterator[tuple[Any, _Holder]]:
    if isinstance(value, dict):
        items: list[Any] = list(islice(value.values(), _ITEMS))
    elif isinstance(value, (list, tuple, set, deque)):
        items = list(islice(value, _ITEMS))
    else:
        yield from _attributes(value)
        return
    for item in items:
        yield item, holder


def _attributes(value: Any) -> Iterator[tuple[Any, _Holder]]:
    if isinstance(value, MethodType):
        value = value.__self__
    if isinstance(value, FunctionType):
        if is_library(value.__code__.co_filename):
            return
        code = value.__code__
        for name, cell in zip(code.co_freevars, value.__closure__ or ()):
            try:
                yield cell.cell_contents, _Holder(name, None, code.co_filename, _range(code))
            except ValueError:  # not assigned yet
                continue
    elif isinstance(value, ModuleType):
        if not is_library(getattr(value, "__file__", None) or "<built-in>"):
            for name, held in list(vars(value).items()):
                yield held, _Holder(name, None, value.__file__ or "", (1, 0))
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        file = _file_of(type(value))
        if not is_library(file):
            for name, held in list(vars(value).items()):
                yield held, _Holder(name, value, file, _range(type(value)))


def _file_of(cls: type) -> str:
    try:
        return inspect.getfile(cls)
    except (TypeError, OSError):
        return "<unknown>"


def _range(part: CodeType | type) -> tuple[int, int]:
    """The first line of a function or class, and the last one."""
    try:
        lines, first = inspect.getsourcelines(part)
    except (OSError, SyntaxError, TypeError):
        return (1, 0)
    return max(first, 1), max(first, 1) + len(lines) - 1


def _keeping(holder: _Holder) -> Site | None:
    """The line that adds to the variable or attribute, or else one that assigns to it: in the
    function or class, or else in the file."""
    try:
        tree = ast.parse("".join(linecache.getlines(holder.file)))
    except (SyntaxError, ValueError):
        return None
    first, last = holder.lines
    chosen: list[tuple[int, int]] = []  # the rank of a line, the line
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        adds = adds_to(node, holder.name) or _collects(node, holder.name)
        if adds or _assigns(node, holder.name):
            chosen.append((2 * (not adds) + (not first <= line <= last), line))
    if not chosen:
        return None
    line = min(chosen)[1]
    return Site(holder.file, line, _function_at(tree, line))


def _function_at(tree: ast.AST, line: int) -> str:
    """The innermost function around a line."""
    functions = [
        node for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno <= line <= (node.end_lineno or 0)
    ]  # fmt: skip
    return max(functions, key=lambda node: node.lineno).name if functions else "<module>"


def _collects(node: ast.AST, name: str) -> bool:
    """`name.extend(...)`, and the like; `name.setdefault(...).append(...)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    inner = node.func.value
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
        inner = inner.func.value
    names = ("append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put")
    return node.func.attr in names and _last(inner) == name


def _assigns(node: ast.AST, name: str) -> bool:
    """`name = value`, where the value is made by something: not `name = 0`, `name = []`."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    made = any(isinstance(part, (ast.Name, ast.Attribute)) for part in ast.walk(node.value))
    return made and any(_last(target) == name for target in targets)


def adds_to(node: ast.AST, name: str) -> bool:
    """`name += ...`, `name = name + ...`, `name.append(...)`, `name[...] = ...`."""
    if isinstance(node, ast.AugAssign):
        return _last(node.target) == name
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and _last(node.targets[0]) == name:
        if isinstance(node.targets[0], ast.Subscript):
            return True
        return any(_last(part) == name for part in ast.walk(node.value))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("append", "appendleft") and _last(node.func.value) == name
    return False


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
