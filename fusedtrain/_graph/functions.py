"""The Python functions behind a method, a property or a hook, and what they bring along.

Two readers follow them. :mod:`fusedtrain._graph.names` collects names, of bytecode, which
every function has. :mod:`fusedtrain.folding` needs the order of calls, which only source shows.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

# Their functions are in no __dict__.
_BUILT_IN = (property, functools.partial, types.MethodType, staticmethod, classmethod)


def functions_of(value: Any) -> list[types.FunctionType]:
    """The functions in a method, property, partial or decorated function, the outermost first."""
    return list(dict.fromkeys(_functions_of(value)))


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, types.FunctionType):
        yield value
    if isinstance(value, (nn.Module, types.ModuleType, type)):
        return
    attributes = getattr(value, "__dict__", {})
    for name in ("__func__", "fget", "fset", "func", "__wrapped__"):
        inner = getattr(value, name, None) if isinstance(value, _BUILT_IN) else attributes.get(name)
        if inner is not None:
            yield from _functions_of(inner)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its `__dict__` and in slots."""
    slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    filled = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**attributes, **filled} if filled else attributes


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """The variables of enclosing functions that a function uses, by name."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not yet filled
            continue
    return values


def resolved_or_none(path: str) -> Any:
    """The object behind "module:qualified.name"; None where there is none."""
    try:
        return resolve(path)
    except (ImportError, AttributeError, ValueError):
        return None


def resolve(path: str) -> Any:
    """The object behind "module:qualified.name"."""
    module, _, qualified = path.partition(":")
    value = importlib.import_module(module)
    for part in filter(None, qualified.split(".")):
        value = getattr(value, part)
    return value


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and that of the functions, lambdas and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)
