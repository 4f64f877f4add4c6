"""The names in the bytecode of a forward, and of the methods and functions that it may call."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .functions import closure_of, codes_of, functions_of

_PLAIN = (int, float, bool, str, types.NoneType)


@dataclass
class _Names:
    """The names in some code."""

    of_self: set[str] = field(default_factory=set)  # attributes of its first argument
    others: set[str] = field(default_factory=set)  # attributes of anything else
    globals: set[str] = field(default_factory=set)


def _outside(function: types.FunctionType, names: _Names) -> Iterator[Any]:
    """Values from outside of a function that it mentions: globals and attributes of those, and the
    variables of enclosing functions."""
    for name in names.globals:
        value = function.__globals__.get(name)
        yield value
        if isinstance(value, types.ModuleType):
            yield from (vars(value).get(other) for other in names.others)
        if isinstance(value, type):
            yield from (getattr(value, other, None) for other in names.others)
    yield from closure_of(function).values()


def _add(
    pending: list[tuple[types.FunctionType, nn.Module | None]], value: Any, owner: nn.Module | None
) -> None:
    """Adds the functions behind a value that are the user's. The owner is the first argument of
    the outermost one; those in it may be called with anything."""
    if isinstance(value, (staticmethod, classmethod)):
        owner = None
    for function in functions_of(value):
        torchs = (function.__module__ or "").partition(".")[0] == "torch"
        if not torchs and (function, owner) not in pending:
            pending.append((function, owner))
        owner = None


def _method(module: nn.Module, name: str) -> Any:
    """The attribute of a class by this name: a property, say, or a static method."""
    return next((vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)), None)


def _read(code: types.CodeType) -> _Names:
    names = _Names()
    first = code.co_varnames[0] if code.co_argcount else ""
    for inner in codes_of(code):
        before: Any = None
        for step in dis.get_instructions(inner):
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                last = before.argval if before is not None else None
                last = last[-1] if isinstance(last, tuple) else last
                (names.of_self if last == first else names.others).add(str(step.argval))
            elif step.opname == "LOAD_GLOBAL":
                names.globals.add(str(step.argval))
            before = step
    return names


def _reached(module: nn.Module) -> Iterator[types.FunctionType]:
    """The forward of a module, and the methods of it and functions of the user's that it names."""
    pending: list[tuple[types.FunctionType, nn.Module | None]] = []
    _add(pending, type(module).forward, module)
    seen: set[types.CodeType] = set()
    while pending:
        function, owner = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        yield function
        names = _read(function.__code__)
        for name in names.of_self if owner is not None else ():
            _add(pending, _method(module, name), module)
        for value in _outside(function, names):
            if not isinstance(value, (nn.Module, type)):
                _add(pending, value, None)


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Numbers, flags and strings among the attributes that a module's forward may read."""
    names = {n for function in _reached(module) for n in _read(function.__code__).of_self}
    return {
        name: value
        for name, value in vars(module).items()
        if name in names and type(value) in _PLAIN and name != "training"
    }


def globals_of(module: nn.Module) -> list[tuple[str, str, Any]]:
    """Globals that a module's forward may read, and the attributes that it may read of Python
    modules and classes among them: the name of the Python module, that of the global, and its
    value. Modules are values by their attributes alone."""
    values: dict[tuple[str, str], Any] = {}
    for function in _reached(module):
        names = _read(function.__code__)
        home = str(function.__globals__.get("__name__"))
        for name in names.globals & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                inside = names.others & vars(value).keys()
                values.update({(value.__name__, other): vars(value)[other] for other in inside})
                continue
            values[home, name] = value
            if isinstance(value, type):
                inside = {other for other in names.others if hasattr(value, other)}
                values.update(
                    {(home, f"{name}.{other}"): getattr(value, other) for other in inside}
                )
    return [
        (home, name, value)
        for (home, name), value in values.items()
        if not isinstance(value, (types.ModuleType, torch.Tensor))
        if home.partition(".")[0] not in ("torch", "fusedtrain")
    ]
