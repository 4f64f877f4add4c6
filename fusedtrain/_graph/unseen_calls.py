"""Which modules may be called where torch.fx does not see the call.

A forward that cannot be traced, or not on every way, may reach for a part of a part
(`self.block.act(x)`), for a module that it does not register, or call a method of a part other than
forward (`self.block.features(x)`). And any forward may call the forward of a part by name.

The bytecode of such a forward is read, and that of the methods and functions it may call.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .flow import Flow
from .functions import closure_of, codes_of, functions_of

# Names that reach modules without naming them.
_REACHING = {
    "_modules", "children", "get_submodule", "getattr", "modules", "named_children",
    "named_modules", "vars",
}  # fmt: skip
# Of `for part in parts`, `parts[i]`, `parts[:i]`, `a, b = parts` and `*parts`.
_TAKING = {
    "GET_ITER", "BINARY_SUBSCR", "BINARY_SLICE", "UNPACK_SEQUENCE", "UNPACK_EX", "LIST_EXTEND",
    "SET_UPDATE", "CALL_FUNCTION_EX",
}  # fmt: skip
# Functions that go through the items of what they are given.
_ITERATING = {
    "accumulate", "chain", "enumerate", "filter", "iter", "list", "map", "reduce", "reversed",
    "set", "sorted", "tuple", "zip",
}  # fmt: skip
_SEEN = ("forward", "__init__", "__call__")


@dataclass
class _Names:
    """The names in some code. `takes`: the code indexes something, or goes through its items."""

    of_self: set[str] = field(default_factory=set)  # attributes of its first argument
    others: set[str] = field(default_factory=set)  # attributes of anything else
    globals: set[str] = field(default_factory=set)
    takes: bool = False


class UnseenCalls:
    """Of the modules of a model."""

    def __init__(self, flow: Flow) -> None:
        self._callers: dict[int, str] = {}
        partial = {id(trace.module) for trace in flow.traces if trace.partial}
        modules = set(flow.model.modules())
        for name, module in flow.model.named_modules():
            if id(module) in flow.failed or id(module) in partial:
                for part in _reached(module, modules):
                    self._callers.setdefault(id(part), name or "the model")
        self._bypassed = {
            key: flow.names[id(trace.module)] or "the model"
            for trace in flow.traces
            for key in trace.bypassed
        }

    def obstacle(self, module: nn.Module) -> str:
        """Why a module has to go on doing what it does; '' if nobody unseen may call it."""
        if id(module) in self._bypassed:
            return f"{self._bypassed[id(module)]} calls its forward by name"
        caller = self._callers.get(id(module))
        return "" if caller is None else f"{caller}, which torch.fx cannot trace, may call it"


def _reached(root: nn.Module, model: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules in a module that its forward may call. Its children may be left out: Flow knows
    their callers."""
    seen: dict[types.CodeType, _Names] = {}
    pending: list[tuple[types.FunctionType, nn.Module | None]] = []
    for cls in type(root).__mro__:  # super() may call a base class's forward
        _add(pending, vars(cls).get("forward"), root)
    named = list(root.named_modules(remove_duplicate=False))
    for key, value in vars(root).items():
        for module in _unregistered(value, model):
            named += module.named_modules(prefix=key, remove_duplicate=False)
    parts = list(dict.fromkeys(part for _, part in named if part is not root))
    others: set[str] = set()
    containers: set[str] = set()
    while pending:
        function, owner = pending.pop()
        if function.__code__ not in seen:
            seen[function.__code__] = _read(function.__code__)
            for mentioned in _outside(function, seen[function.__code__]):
                if isinstance(mentioned, nn.Module):
                    yield from mentioned.modules()
                _add(pending, mentioned, None)
        names = seen[function.__code__]
        if owner is not None:
            for name in names.of_self:
                child = owner._modules.get(name)
                if child is not None:
                    yield child
                elif name not in _SEEN:
                    _add(pending, _method(owner, name), owner)
                    _add(pending, vars(owner).get(name), None)
        fresh = (names.others if owner is not None else names.others | names.of_self) - others
        others |= fresh
        for name in fresh - set(_SEEN):
            for part in parts:
                _add(pending, _method(part, name), part)
                _add(pending, vars(part).get(name), None)
        if names.takes or (names.globals | names.others) & _ITERATING:
            containers |= names.of_self | names.others
        if (names.of_self | names.others | names.globals) & _REACHING:
            yield from parts
            return
    for path, part in named:
        before, _, name = path.rpartition(".")
        if name in others or (name.isdigit() and before.rpartition(".")[2] in containers):
            yield part


def _unregistered(value: Any, model: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules of the model that an attribute holds unregistered: `self.parent = [parent]`."""
    if isinstance(value, nn.Module):
        if value in model:
            yield value
    elif type(value) in (list, tuple, set):
        for item in value:
            yield from _unregistered(item, model)


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
    """What a class has by this name: a property, say, or a static method."""
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
            names.takes |= step.opname in _TAKING or step.argrepr == "[]"
            before = step
    return names


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Numbers, flags and strings among the attributes that a module's forward may read."""
    names: set[str] = set()
    pending: list[tuple[types.FunctionType, nn.Module | None]] = []
    _add(pending, type(module).forward, module)
    while pending:
        function, _ = pending.pop()
        fresh = _read(function.__code__).of_self - names
        names |= fresh
        for name in fresh:
            _add(pending, _method(module, name), module)
    plain = (int, float, bool, str, types.NoneType)
    return {
        name: value
        for name, value in vars(module).items()
        if name in names and type(value) in plain and name != "training"
    }
