"""Conditions under which a rewritten forward does the work of the module's own: everything that the
own one read while it was traced is unchanged, and the modules that are no longer called may be
passed over.

`Interceptor` notes the attributes that a forward reads, whether they are there or not: so
`hasattr`, a default of `getattr`, flags, `isinstance` and which module stands at a name need no
special case.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .functions import attributes_of, closure_of, functions_of, resolved_or_none
from .hooks import all_are_hooked, is_hooked, is_untouched
from .intercept import Reads
from .modules import FORWARD, is_library

_MISSING: Any = object()
# Items of a container that is compared at each call: with what is in them, and by themselves.
_MOST_ITEMS, _MOST_BARE = 64, 1024
_OWN = frozenset(vars(nn.Module()))  # tables of hooks and the like
_NUMBERS = (int, float, complex, bool, str, bytes, types.NoneType, torch.dtype, torch.device)
_COMPARED = (*_NUMBERS, types.MethodType)  # a class method is another object at each look
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_TABLES = ("_modules", "_parameters", "_buffers")
_FLAGS = ("inplace", "overwrite_input")


class Seen(NamedTuple):
    """One attribute of a module, and its value. `kind`: "child", "children" (all, in their order),
    "tensor" (whether there is one, or the look of one that is not registered), "names" (of a table
    of tensors), "value" (in its `__dict__`), "class", "absent"."""

    kind: str
    name: str
    value: Any = None


Looked = list[tuple[nn.Module, list[Seen]]]


def looked_at(reads: Reads) -> Looked:
    """The present values of all attributes that were read."""
    looked = []
    for module, names in reads.modules.values():
        seen = {one[:2]: one for name in names for one in _looked_up(module, name)}
        looked.append((module, [seen[key] for key in sorted(seen)]))
    return looked


def _looked_up(module: nn.Module, name: str) -> Iterator[Seen]:
    state = vars(module)
    if name in ("__dict__", "__class__"):
        for key in () if name == "__class__" else (*state, *(k for t in _TABLES for k in state[t])):
            if key not in ("training", "forward", FORWARD):
                yield from _looked_up(module, key)
        return
    if name in _TABLES:
        if name == "_modules":
            yield Seen("children", name, list(state[name].items()))
        else:
            yield Seen("names", name, tuple(state[name]))
            yield from (
                Seen("tensor", key, value is not None) for key, value in state[name].items()
            )
        return
    if name == "training":  # the source asks for it itself
        return
    for table in _TABLES:
        if name in state.get(table, ()):
            value = state[table][name]
            if table == "_modules":
                yield Seen("child", name, value)
            else:
                yield Seen("tensor", name, value is not None)
            return
    if name in state:
        if isinstance(state[name], torch.Tensor):
            yield Seen("tensor", name, _look_of(state[name]))
        elif name not in ("forward", FORWARD) and name not in _OWN:
            yield Seen("value", name, _kept(state[name]))
        return
    static = inspect.getattr_static(type(module), name, _MISSING)
    yield Seen("absent", name) if static is _MISSING else Seen("class", name)


def _look_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Answers of a tensor that has no stand-in while a forward is traced."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


class Contents(NamedTuple):
    """Contents of a container or an object, whose numbers may change in place."""

    contents: Any


class Same:
    """Holder of an object whose identity counts."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.item is self.item

    def __hash__(self) -> int:
        return id(self.item)


class Held(Same):
    """Holder of an object that guards look into and that pickles may not find by its name:
    the globals of code that is no module's, a class, a function for its closure. Deep copies share
    it. A pickle finds a function again, also a decorated one, or loses the object."""

    def __deepcopy__(self, _: Any) -> Held:
        return self

    def __reduce__(self) -> Any:
        path = f"{getattr(self.item, '__module__', '')}:{getattr(self.item, '__qualname__', '')}"
        functions = functions_of(resolved_or_none(path))
        if self.item not in functions:
            return Held, (None,)
        return _held_in, (path, functions.index(self.item))

    def get(self, name: str) -> Any:
        if isinstance(self.item, types.FunctionType):
            return closure_of(self.item).get(name, _MISSING)
        if isinstance(self.item, dict):
            return self.item.get(name, _MISSING)
        return getattr(self.item, name, _MISSING)


def _held_in(path: str, place: int) -> Held:
    functions = functions_of(resolved_or_none(path))
    return Held(functions[place] if place < len(functions) else None)


def _has_contents(value: Any) -> bool:
    """Whether a value is a container, or an object such as a configuration."""
    if isinstance(value, _CONTAINERS):
        return True
    if isinstance(value, types.MethodType):
        return _has_contents(value.__self__)
    if isinstance(value, functools.partial):
        return any(map(_has_contents, (value.func, *value.args, *value.keywords.values())))
    opaque = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, logging.Logger)
    if isinstance(value, opaque) or not (hasattr(value, "__dict__") or attributes_of(value)):
        return False
    return not (callable(value) and is_library(type(value).__module__))


def _kept(value: Any) -> Any:
    return Contents(_contents(value)) if _has_contents(value) else value


def _bare(value: Any) -> Any:
    """A copy of a container, whose items are compared as they compare themselves."""
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    return dict(value) if isinstance(value, dict) else list(value)


def _contents(value: Any, depth: int = 3) -> Any:
    """A copy of the numbers in a value, and of the containers of them; other objects as such."""
    if type(value) in _NUMBERS:
        return value
    if depth == 0 or not _has_contents(value):
        return Same(value)
    if isinstance(value, types.MethodType):
        return Same(value.__func__), _contents(value.__self__, depth)
    if isinstance(value, functools.partial):
        return _contents((value.func, value.args, value.keywords), depth)
    if not isinstance(value, _CONTAINERS):
        return Same(value), _contents(attributes_of(value), depth)
    items = _items(value, depth)
    more = None if type(value) in _CONTAINERS else attributes_of(value)
    return items if not more or more is value else (items, _contents(more, depth))


def _items(value: Any, depth: int) -> Any:
    if len(value) > _MOST_ITEMS:
        return (Same(value), len(value)) if len(value) > _MOST_BARE else _bare(value)
    if isinstance(value, dict):
        return {_contents(k, 0): _contents(item, depth - 1) for k, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return {_contents(item, 0) for item in value}
    return [type(value), *(_contents(item, depth - 1) for item in value)]


class _Look:
    """The questions to one module at each call. Children are referred to weakly: a module that the
    user has taken out need not live on."""

    __slots__ = (
        "absent", "child", "children", "cls", "module", "names", "of_class", "tensors", "values",
    )  # fmt: skip

    def __init__(self, module: nn.Module, seen: Sequence[Seen]) -> None:
        def of(kind: str) -> list[Seen]:
            return [one for one in seen if one.kind == kind]

        self.module, self.cls = weakref.ref(module), type(module)
        self.child = [(one.name, _reference(one.value)) for one in of("child")]
        self.children = [[(n, _reference(m)) for n, m in one.value] for one in of("children")]
        self.tensors = [(one.name, one.value) for one in of("tensor")]
        self.names = [(one.name, one.value) for one in of("names")]
        self.values = [(one.name, one.value) for one in of("value")]
        self.of_class = [(one.name, getattr(type(module), one.name, None)) for one in of("class")]
        self.absent = [one.name for one in of("absent")]

    def seen(self) -> tuple[nn.Module | None, list[Seen]]:
        """The arguments that make this object, with a `DeadChild` for each child that is gone."""
        one = [Seen("child", name, _alive(ref)) for name, ref in self.child]
        one += [
            Seen("children", "_modules", [(n, _alive(ref)) for n, ref in all_of])
            for all_of in self.children
        ]
        one += [Seen("tensor", *row) for row in self.tensors]
        one += [Seen("names", *row) for row in self.names]
        one += [Seen("value", *row) for row in self.values]
        one += [Seen("class", name) for name, _ in self.of_class]
        return self.module(), one + [Seen("absent", name) for name in self.absent]

    def changed(self) -> str | None:
        """The name by which something else is found now; None if all is as it was."""
        module = self.module()
        kind = type(module)
        # FSDP2 gives a module a subclass without a forward of its own.
        if kind is not self.cls and not issubclass(kind, self.cls):
            return "__class__"
        state = module.__dict__
        children = state["_modules"]
        for name, ref in self.child:
            if children.get(name, _MISSING) is not ref():
                return name
        for all_of in self.children:
            if len(children) != len(all_of):
                return "_modules"
            for (name, ref), (now, child) in zip(all_of, children.items()):
                if now != name or child is not ref():
                    return name
        for name, value in self.values:
            if _differs(state.get(name, _MISSING), value):
                return name
        for name, attribute in self.of_class:
            if name in state or name in children:
                return name
            if _differs(getattr(kind, name, None), attribute):
                return name
        for name, there in self.tensors:
            tables = (state["_parameters"], state["_buffers"], state)
            value = next((one[name] for one in tables if name in one), _MISSING)
            if isinstance(value, torch.Tensor) is not bool(there) or value is _MISSING:
                return name
            if type(there) is tuple and _look_of(value) != there:
                return name
        for name, keys in self.names:
            if (*state[name],) != keys:
                return name
        for name in self.absent:
            if name in state or name in children or hasattr(module, name):
                return name
        return None


def _global(home: Any, name: str) -> Any:
    """`home` is the name of a Python module, or `Held`; `name` may be that of an attribute of a
    class."""
    if type(home) is Held:
        return home.get(name)
    value: Any = sys.modules.get(home)
    for part in name.split("."):
        value = getattr(value, part, _MISSING)
    return value


def _differs(now: Any, value: Any) -> bool:
    """Whether this is something else than `_kept` has kept."""
    if type(value) is Contents:
        try:
            return now is _MISSING or bool(_contents(now) != value.contents)
        except Exception:  # of a tensor in place of another
            return True
    return now is not value and (
        type(now) is not type(value) or type(now) not in _COMPARED or bool(now != value)
    )


def _nothing() -> None:
    return None


class DeadChild:
    """Stand-in for a child that was garbage-collected."""


def _alive_ones(looks: Iterable[_Look]) -> Looked:
    return [(module, seen) for module, seen in map(_Look.seen, looks) if module is not None]


def parts_of(modules: Iterable[nn.Module]) -> Looked:
    """Everything in some modules, by which `Guards` see another part come into them, or the flags
    of a part change by which it writes over its input."""
    rows = []
    for part in (part for module in modules for part in module.modules()):
        state = vars(part)
        flags = [Seen("value", flag, state[flag]) for flag in _FLAGS if flag in state]
        rows.append((part, [Seen("children", "_modules", list(part._modules.items())), *flags]))
    return rows


def _reference(module: Any) -> Callable[[], Any]:
    return _nothing if module is None else weakref.ref(module)


def _alive(ref: Callable[[], Any]) -> Any:
    module = ref()
    return DeadChild() if module is None and ref is not _nothing else module


class Guards:
    """The conditions under which one rewritten forward may run.

    Args:
        looked: attributes that were read while it was traced.
        names: globals, as (name of the Python module or `Held`, name, value); no value: the
            present one.
        passed: modules that it does not call, though the module's own forward does.
        still: the parts of modules across which calls were moved: neither may another module come
            into them, nor a hook or another forward, which would see another order.
        stale: an attribute that had changed already when these guards were copied from others;
            None if none had. A copy takes classes and globals as they are at that time.
    """

    def __init__(
        self,
        looked: Iterable[tuple[nn.Module, Sequence[Seen]]] = (),
        names: Iterable[tuple[Any, ...]] = (),
        passed: Iterable[nn.Module] = (),
        still: Iterable[tuple[nn.Module, Sequence[Seen]]] = (),
        stale: str | None = None,
    ) -> None:
        self._looks = [_Look(module, seen) for module, seen in looked]
        self._names = [
            (*row[:2], _kept(row[2] if len(row) > 2 else _global(*row))) for row in names
        ]
        self._passed = [(weakref.ref(m), type(m)) for m in passed]
        self._still = [_Look(module, seen) for module, seen in still]
        classes = [cls for _, cls in self._passed] + [look.cls for look in self._still]
        self._forwards = {cls: cls.forward for cls in classes}
        self.stale = stale
        if any(type(home) is Held and home.item is None for home, *_ in self._names):
            self.stale = "a name that no pickle finds"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "looked": _alive_ones(self._looks),
            "names": [row if type(row[2]) in _NUMBERS else row[:2] for row in self._names],
            "passed": [m for ref, _ in self._passed if (m := ref()) is not None],
            "still": _alive_ones(self._still),
            "stale": self.changed(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def compares_numbers(self) -> bool:
        """Whether numbers other than 0 and False count, flags, strings, or containers of such."""
        values = [value for look in self._looks for _, value in look.values]
        values += [value for *_, value in self._names]
        return any(value for value in values if type(value) in (*_NUMBERS, Contents))

    def changed(self) -> str | None:
        """The attribute that has changed since the forward was traced; None if none has."""
        if self.stale is not None:
            return self.stale
        for look in (*self._looks, *self._still):
            name = look.changed()
            if name is not None:
                return f"`{name}` of a {look.cls.__name__}"
        for home, name, value in self._names:
            if _differs(_global(home, name), value):
                return f"`{name}` of {home}"
        for ref, cls in self._passed:
            if type(ref()) is not cls:
                return f"`__class__` of a {cls.__name__}"
        for cls, forward in self._forwards.items():
            if cls.forward is not forward:
                return f"`forward` of {cls.__name__}"
        return None

    def let_pass(self) -> bool:
        """Whether nobody would notice that some modules are not called: they have the classes
        that they had, no forward of their own, no hooks, and all modules have none."""
        for ref, cls in self._passed:
            module = ref()
            if module is None or not is_untouched(module, cls):
                return False
        if (self._passed or self._still) and all_are_hooked():
            return False
        for look in self._still:
            module = look.module()
            if module is None:
                continue
            # A module's own truth is another matter: torch.compile's wrappers have none.
            if is_hooked(module) or "forward" in module.__dict__:
                return False
            kind = type(module)
            if kind is not look.cls and kind.forward is not self._forwards[look.cls]:
                return False
        return True


for _class in (Guards, Seen, Contents, Same, Held, DeadChild):
    _class.__module__ = "fusedtrain.conversion"  # the name in pickles
