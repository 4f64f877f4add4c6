"""The names of functions that a forward may call, read from its bytecode: they tell whether a
forward is worth tracing, and what is in one that cannot be traced."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

from .names import _add, _Names, _outside, _read

_read_once = functools.cache(_read)


def mentioned(module: nn.Module) -> set[str]:
    """Names of functions and methods that the forward of a module mentions, or a method or function
    of the user's that it may call. Attributes of the module itself count by what they hold."""
    names: set[str] = set()
    seen: set[types.CodeType] = set()
    pending: list[tuple[types.FunctionType, nn.Module | None]] = []
    _add(pending, type(module).forward, module)
    parts = {path.rpartition(".")[2] for path, _ in module.named_modules()}
    while pending:
        function, owner = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        read = _read_once(function.__code__)
        names |= (read.globals | read.others) - parts
        for value in _values(function, owner, read):
            name = getattr(value, "__name__", "")
            if callable(value) and not isinstance(value, type) and isinstance(name, str):
                names.add(name)
            _add(pending, value, None)
        for name in read.of_self:
            if owner is None:
                names.add(name)
            else:
                _add(pending, getattr(type(owner), name, None), owner)
    return names


def _values(function: types.FunctionType, owner: nn.Module | None, read: _Names) -> list[Any]:
    values = [v for v in _outside(function, read) if not isinstance(v, (nn.Module, type))]
    if owner is not None:
        values += [vars(owner).get(name) for name in read.of_self]
    return [getattr(value, "func", value) for value in values]
