"""The names in the bytecode of a forward: of the methods and functions that it may call, which tell
whether it is worth tracing, and of those that ran while it was traced, which are guarded.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .functions import closure_of, codes_of, functions_of, resolved_or_none
from .guards import Held
from .intercept import Reads
from .modules import is_library

_LOOKS_UP = {"globals", "eval", "exec"}  # by names that are made at run time


@dataclass
class _Names:
    """The names in some code."""

    of_self: set[str] = field(default_factory=set)  # attributes of its first argument
    others: set[str] = field(default_factory=set)  # attributes of anything else
    globals: set[str] = field(default_factory=set)
    bare: set[str] = field(default_factory=set)  # globals of which it asks no attribute at once
    strings: set[str] = field(default_factory=set)  # constants that may be names: of `getattr`
    imports: set[tuple[int, str]] = field(default_factory=set)  # level and name

    @property
    def attributes(self) -> set[str]:
        return self.of_self | self.others | self.strings


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
        constants = (c for c in inner.co_consts if isinstance(c, str))
        names.strings.update(c for c in constants if c.isidentifier())
        steps = [s for s in dis.get_instructions(inner) if s.opname != "EXTENDED_ARG"]
        for i, step in enumerate(steps):
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                last = before.argval if before is not None else None
                last = last[-1] if isinstance(last, tuple) else last
                (names.of_self if last == first else names.others).add(str(step.argval))
            elif step.opname == "LOAD_GLOBAL":
                names.globals.add(str(step.argval))
                if not steps[i + 1].opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
                    names.bare.add(str(step.argval))
            elif step.opname == "IMPORT_NAME":
                names.imports.add((steps[i - 2].argval, str(step.argval)))
            elif step.opname == "IMPORT_FROM":
                names.others.add(str(step.argval))
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
    module: nn.Module,
) -> Iterator[tuple[types.FunctionType, nn.Module | None, _Names]]:
    """The forward of a module, and the methods of it and functions of the user's that it names, or
    that attributes of the instance hold, once for each owner.

    Yields the function, the module where that is its first argument, and the names in it."""
    pending: list[tuple[types.FunctionType, nn.Module | None]] = []
    _add(pending, type(module).forward, module)
    seen = set()
    while pending:
        function, owner = pending.pop()
        if (function, owner) in seen:
            continue
        seen.add((function, owner))
        names = _read(function.__code__)
        yield function, owner, names
        for value in _values(function, owner, names):
            _add(pending, value, None)
        for name in names.of_self if owner is not None else ():
            _add(pending, _method(module, name), owner)


def mentioned(module: nn.Module) -> set[str]:
    """Names of functions and methods that the forward of a module mentions, or a method or function
    of the user's that it may call: they tell whether a forward is worth tracing, and what is in one
    that cannot be traced. Attributes of the module itself count by what they hold."""
    mentions: set[str] = set()
    parts = {path.rpartition(".")[2] for path, _ in module.named_modules()}
    for function, owner, names in _reached(module):
        mentions |= (names.globals | names.others) - parts
        if owner is None:
            mentions |= names.of_self
        mentions.update(map(_name_of, _values(function, owner, names)))
    return mentions - {""}


def outside(reads: Reads, module: nn.Module) -> list[tuple[Any, str]]:
    """Names by which a module's forward may find something else some day, as `Guards` take them:
    of globals, of variables of enclosing functions, and of attributes of Python modules and
    classes. The code that ran while the forward was traced tells them; names that it makes at run
    time count as all names of the Python module."""
    rows: dict[tuple[Any, str], None] = {}
    attributes = {name for code, *_ in reads.ran for name in _read(code).attributes}
    noted = {(type(m), name) for m, names in reads.modules.values() for name in names}
    noted.add((type(module), "forward"))
    for (code, first, _), values in reads.ran.items():
        rows.update(dict.fromkeys(_of_globals(values, _read(code), attributes)))
        rows.update(dict.fromkeys(_definitions(code, first, values, noted)))
    for function in reads.closures:
        for name, value in closure_of(function).items():
            if name != "__class__":
                rows[Held(function), name] = None
                rows.update(dict.fromkeys(_inside(value, attributes)))
    for part, read in reads.modules.values():
        for name in sorted(read & vars(part).keys()):
            rows.update(dict.fromkeys(_inside(vars(part)[name], attributes)))
    return list(rows)


def _of_globals(
    values: dict[str, Any], names: _Names, attributes: set[str]
) -> Iterator[tuple[Any, str]]:
    everything = not names.globals.isdisjoint(_LOOKS_UP)
    wanted = values.keys() if everything else names.globals | names.strings
    for name in sorted(wanted & values.keys()):
        value = values[name]
        if isinstance(value, types.ModuleType):
            yield from _of_module(value, attributes, name in names.bare)
        elif not isinstance(value, torch.Tensor) and not name.startswith("__"):
            yield _home(values), name
            yield from _inside(value, attributes)
            if isinstance(value, types.FunctionType):
                inside = vars(value).keys() & attributes
                yield from ((_home(values), f"{name}.{other}") for other in sorted(inside))
    for level, name in sorted(names.imports):
        path = "." * level + name
        with suppress(ImportError):
            path = importlib.util.resolve_name(path, values.get("__package__"))
        for one in (path, path.partition(".")[0]):
            if one in sys.modules:
                yield from _of_module(sys.modules[one], attributes, False)


def _of_module(
    module: types.ModuleType, attributes: set[str], whole: bool, outer: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, str]]:
    """`whole`: of one that is handed to somebody, all attributes, and names that it lacks."""
    values = vars(module)
    if is_library(module.__name__) or module in outer:
        return
    for name in sorted(attributes | values.keys() if whole else attributes & values.keys()):
        value = values.get(name)
        if isinstance(value, types.ModuleType):
            yield from _of_module(value, attributes, False, (*outer, module))
        elif not isinstance(value, torch.Tensor) and not name.startswith("__"):
            yield _home(values), name
            yield from _inside(value, attributes)


def _inside(value: Any, attributes: set[str]) -> Iterator[tuple[Any, str]]:
    """Attributes of a class, or of that of an object, that are not the library's."""
    if isinstance(value, types.ModuleType):
        yield from _of_module(value, attributes, False)
    if isinstance(value, (types.ModuleType, nn.Module, torch.Tensor)):
        return
    kind = value if isinstance(value, type) else type(value)
    theirs = [vars(cls) for cls in kind.__mro__ if not is_library(cls.__module__)]
    names = attributes.intersection(name for values in theirs for name in values)
    yield from (_of_class(kind, name) for name in sorted(names))


def _definitions(
    code: types.CodeType, first: type, values: dict[str, Any], noted: set[tuple[type, str]]
) -> Iterator[tuple[Any, str]]:
    """Homes of the function whose code ran: its globals, or the classes of its first
    argument, where a class before it may get one, too. `noted`: classes of modules, and names by
    which they were asked for it."""
    if any(function.__code__ is code for function in functions_of(values.get(code.co_name))):
        yield _home(values), code.co_name
    kinds = [cls for cls in first.__mro__ if not is_library(cls.__module__)]
    names = _read(code)
    if "type" in names.globals or "__class__" in names.of_self or "cls" in code.co_varnames[:1]:
        yield from _inside(first, names.attributes)
    for place, cls in enumerate(kinds):
        for name, value in vars(cls).items():
            if any(function.__code__ is code for function in functions_of(value)):
                asked = inspect.getattr_static(first, name, None) is value
                if not (asked and (first, name) in noted):
                    yield from (_of_class(kind, name) for kind in kinds[: place + 1])


def _home(values: dict[str, Any]) -> Any:
    """The name of the Python module that has these globals."""
    home = str(values.get("__name__"))
    module = sys.modules.get(home)
    return home if module is not None and vars(module) is values else Held(values)


def _of_class(cls: type, name: str) -> tuple[Any, str]:
    if resolved_or_none(f"{cls.__module__}:{cls.__qualname__}") is cls:
        return cls.__module__, f"{cls.__qualname__}.{name}"
    return Held(cls), name
