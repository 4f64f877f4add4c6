"""The names in the bytecode of a forward, and of the methods and functions that it may call."""

from __future__ import annotations

import dis
import functools
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
    the outermost one, or its class is; those in it may be called with anything."""
    if isinstance(value, staticmethod):
        owner = None
    for function in functions_of(value):
        torchs = (function.__module__ or "").partition(".")[0] == "torch"
        if not torchs and (function, owner) not in pending:
            pending.append((function, owner))
        owner = None


def _method(module: nn.Module, name: str) -> Any:
    """The attribute of a class by this name: a property, say, or a static method."""
    return next((vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)), None)


@functools.lru_cache(maxsize=4096)
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


def _values(function: types.FunctionType, owner: nn.Module | None, names: _Names) -> list[Any]:
    """Values of the names in a function: from outside of it, and of the instance that is its first
    argument. Modules and classes are left out."""
    values = [v for v in _outside(function, names) if not isinstance(v, (nn.Module, type))]
    if owner is not None:
        values += [vars(owner).get(name) for name in names.of_self]
    return values


def _name_of(value: Any) -> str:
    """The name of a function, also inside of a partial; "" of anything else."""
    if isinstance(value, functools.partial):
        value = value.func
    if not callable(value) or isinstance(value, type):
        return ""
    try:
        name = value.__name__
    except Exception:  # the user's __getattr__
        return ""
    return name if isinstance(name, str) else ""


def _reached(
    module: nn.Module, *, held: bool = False
) -> Iterator[tuple[types.FunctionType, nn.Module | None, _Names]]:
    """The forward of a module, and the methods of it and functions of the user's that it names.
    `held`: functions, too, that attributes of the instance hold.

    Yields the function, the module where that is its first argument, and the names in it."""
    pending: list[tuple[types.FunctionType, nn.Module | None]] = []
    _add(pending, type(module).forward, module)
    seen: set[types.CodeType] = set()
    while pending:
        function, owner = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = _read(function.__code__)
        yield function, owner, names
        for value in _values(function, owner if held else None, names):
            _add(pending, value, None)
        for name in names.of_self if owner is not None else ():
            _add(pending, _method(module, name), owner)


def mentioned(module: nn.Module) -> set[str]:
    """Names of functions and methods that the forward of a module mentions, or a method or function
    of the user's that it may call: they tell whether a forward is worth tracing, and what is in one
    that cannot be traced. Attributes of the module itself count by what they hold."""
    mentions: set[str] = set()
    parts = {path.rpartition(".")[2] for path, _ in module.named_modules()}
    for function, owner, names in _reached(module, held=True):
        mentions |= (names.globals | names.others) - parts
        if owner is None:
            mentions |= names.of_self
        mentions.update(map(_name_of, _values(function, owner, names)))
    return mentions - {""}


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Numbers, flags and strings among the attributes that a module's forward may read."""
    of_self = {name for _, _, names in _reached(module) for name in names.of_self}
    return {
        name: value
        for name, value in vars(module).items()
        if name in of_self and type(value) in _PLAIN and name != "training"
    }


def globals_of(module: nn.Module) -> list[tuple[str, str, Any]]:
    """Globals that a module's forward may read, and the attributes that it may read of Python
    modules and classes among them: the name of the Python module, that of the global, and its
    value. Modules are values by their attributes alone."""
    values: dict[tuple[str, str], Any] = {}
    for function, _, names in _reached(module):
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
