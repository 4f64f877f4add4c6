"""Which modules may be called where torch.fx does not see the call.

A forward that cannot be traced may reach for a part of a part (`self.block.act(x)`), or call a
method of a part other than forward (`self.block.features(x)`).

The bytecode of such a forward is read, and that of the methods and functions it may call.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ._dataflow import Flow

# Names that reach modules without naming them.
_REACHING = {
    "_modules", "children", "get_submodule", "getattr", "modules", "named_children",
    "named_modules", "vars",
}  # fmt: skip
# Of `for part in parts`, `parts[i]` and `parts[:i]`.
_TAKING = {"GET_ITER", "BINARY_SUBSCR", "BINARY_SLICE"}
_SEEN = ("forward", "__init__", "__call__")


@dataclass
class _Names:
    """What code mentions. `takes`: it indexes something, or goes through its items."""

    own: set[str] = field(default_factory=set)  # attributes of its first argument
    others: set[str] = field(default_factory=set)  # attributes of anything else
    globals: set[str] = field(default_factory=set)
    takes: bool = False


class UnseenCalls:
    """Of the modules of a model."""

    def __init__(self, flow: Flow) -> None:
        self._callers: dict[int, str] = {}
        for name, module in flow.model.named_modules():
            if id(module) in flow.failed:
                for part in _reached(module):
                    self._callers.setdefault(id(part), name or "the model")

    def obstacle(self, module: nn.Module) -> str:
        """Why a module has to go on doing what it does; '' if nobody unseen may call it."""
        caller = self._callers.get(id(module))
        return "" if caller is None else f"{caller}, which torch.fx cannot trace, may call it"


def _reached(root: nn.Module) -> Iterator[nn.Module]:
    """Modules in a module that its forward may call; its children, whose callers Flow knows, need
    not be among them."""
    seen: dict[types.CodeType, _Names] = {}
    pending: list[tuple[types.FunctionType, nn.Module | None]] = []
    _add(pending, getattr(root, "forward", None), root)
    parts = [part for part in root.modules() if part is not root]
    others: set[str] = set()
    containers: set[str] = set()
    while pending:
        function, owner = pending.pop()
        if function.__code__ not in seen:
            seen[function.__code__] = _read(function.__code__)
            for name in seen[function.__code__].globals:
                _add(pending, function.__globals__.get(name), None)
        names = seen[function.__code__]
        if owner is not None:
            for name in names.own:
                child = owner._modules.get(name)
                if child is not None:
                    yield child
                elif name not in _SEEN:
                    _add(pending, getattr(type(owner), name, None), owner)
        fresh = (names.others if owner is not None else names.others | names.own) - others
        others |= fresh
        for name in fresh - set(_SEEN):
            for part in parts:
                _add(pending, getattr(type(part), name, None), part)
        if names.takes:
            containers |= names.own | names.others
        if (names.own | names.others | names.globals) & _REACHING:
            yield from parts
            return
    for path, part in root.named_modules(remove_duplicate=False):
        before, _, name = path.rpartition(".")
        if name in others or (name.isdigit() and before.rpartition(".")[2] in containers):
            yield part


def _add(
    pending: list[tuple[types.FunctionType, nn.Module | None]], found: Any, owner: nn.Module | None
) -> None:
    """What a name stands for, if it is a function of the user's."""
    found = found.fget if isinstance(found, property) else found
    found = getattr(found, "__func__", found)
    if isinstance(found, types.FunctionType):
        torchs = (found.__module__ or "").partition(".")[0] == "torch"
        if not torchs and (found, owner) not in pending:
            pending.append((found, owner))


def _read(code: types.CodeType, first: str = "") -> _Names:
    found = _Names()
    first = first or (code.co_varnames[0] if code.co_argcount else "")
    before: Any = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            last = before.argval if before is not None else None
            last = last[-1] if isinstance(last, tuple) else last
            (found.own if last == first else found.others).add(str(step.argval))
        elif step.opname == "LOAD_GLOBAL":
            found.globals.add(str(step.argval))
        found.takes |= step.opname in _TAKING or step.argrepr == "[]"
        before = step
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _read(constant, first)
            found.own |= inner.own
            found.others |= inner.others
            found.globals |= inner.globals
            found.takes |= inner.takes
    return found
