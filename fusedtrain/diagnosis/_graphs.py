"""Graphs of autograd that live longer than their step: who keeps them."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from ._facts import Kept
from ._modules import KEY, Mark
from ._sites import Site, is_library

_NODES = 20_000  # that are looked at
_ITEMS = 200  # of a list


class _Holder(NamedTuple):
    frame: FrameType
    name: str
    owner: Any  # of the attribute; None for a variable
    tensor: Tensor


def kept_graphs(marks: list[Mark]) -> Kept:
    """`marks`: those of earlier steps that are alive."""
    steps = len({mark.step for mark in marks})
    backward = all(mark.used for mark in marks)
    size = max(mark.bytes for mark in marks)
    holder = next(_holders({id(mark) for mark in marks}), None)
    if holder is None:
        return Kept(None, "", steps, 0, size, backward)
    site = _adding(holder)
    nodes = sum(1 for _ in _graph(holder.tensor)) // max(steps + 1, 1)
    name = holder.name if holder.owner is None else f"{type(holder.owner).__name__}.{holder.name}"
    local = holder.owner is None and site is not None
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
    """Variables of the user's running functions, and attributes of what these hold."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            for name, value in list(frame.f_locals.items()):
                for tensor in _tensors(value):
                    if _reaches(tensor, marks):
                        yield _Holder(frame, name, None, tensor)
                        break
                attributes = getattr(value, "__dict__", None)
                if isinstance(attributes, dict) and not is_library(_file_of(type(value))):
                    for key, held in list(attributes.items()):
                        for tensor in _tensors(held):
                            if _reaches(tensor, marks):
                                yield _Holder(frame, key, value, tensor)
                                break
        frame = frame.f_back


def _file_of(cls: type) -> str:
    try:
        return inspect.getfile(cls)
    except (TypeError, OSError):
        return "<unknown>"


def _tensors(value: Any) -> list[Tensor]:
    """The tensor, or the first and last of a collection, that have graphs."""
    if isinstance(value, Tensor):
        items: list[Any] = [value]
    elif isinstance(value, Mapping):
        items = list(value.values())[:_ITEMS]
    elif isinstance(value, (list, tuple)):
        items = [*value[:_ITEMS]]
    else:
        return []
    return [t for t in items if isinstance(t, Tensor) and t.grad_fn is not None]


def _adding(holder: _Holder) -> Site | None:
    """The line that adds to the variable or attribute."""
    frame = holder.frame
    if holder.owner is None:
        parts: list[Any] = [frame.f_code]
    else:
        parts = [type(holder.owner)]
    for part in parts:
        try:
            lines, first = inspect.getsourcelines(part)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, SyntaxError, TypeError):
            continue
        file = frame.f_code.co_filename if holder.owner is None else _file_of(part)
        for node in ast.walk(tree):
            if adds_to(node, holder.name):
                offset = max(first, 1) - 1
                return Site(file, offset + node.lineno, frame.f_code.co_name)  # type: ignore[attr-defined]
    return None


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
