"""The places that the forward of a model can write to: attributes of modules, objects and
containers that they reach, globals and variables of enclosing functions, and values of tensors.

:class:`State` keeps the first three by shallow copies: it finds what code has changed there, and
takes the change back. :class:`Preserver` keeps tensors, too, of which one run tells those that the
model writes to; no other is copied.
"""

from __future__ import annotations

import argparse
import copy
import copyreg
import functools
import logging
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import TorchDispatchMode
from .functions import codes_of
from .modules import is_library, is_scripted
from .tracer import same_generators

_NUMBERS = (int, float, complex, bool, str, bytes, types.NoneType, torch.dtype, torch.device)
_SEQUENCES = (list, set, deque)
_PLAIN = (types.SimpleNamespace, argparse.Namespace)  # objects of the standard library to look into
_DEEPEST = 3  # functions that functions call by name


def _names(code: types.CodeType) -> frozenset[str]:
    return frozenset(name for one in codes_of(code) for name in one.co_names)


_names_of = functools.lru_cache(4096)(_names)


class _Globals:
    """The names of a Python module that some code uses."""

    def __init__(self, values: dict[str, Any], names: frozenset[str]) -> None:
        self.values, self.names = values, names

    def read(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.names if name in self.values}

    def write(self, items: dict[str, Any]) -> None:
        for name in self.read().keys() - items.keys():
            del self.values[name]
        self.values.update(items)


class _Attributes:
    """Attributes of a class, its own ones."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def read(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self.cls).items() if not k.startswith(("__", "_abc_"))}

    def write(self, items: dict[str, Any]) -> None:
        now = self.read()
        for name in now.keys() - items.keys():
            delattr(self.cls, name)
        for name, value in items.items():
            if now.get(name) is not value:
                setattr(self.cls, name, value)


def _read(place: Any) -> list[Any]:
    """The contents; of a mapping its keys, then its values."""
    if isinstance(place, (_Globals, _Attributes)):
        place = place.read()
    if isinstance(place, dict):
        return [*place, *place.values()] if place else []
    if isinstance(place, types.CellType):
        try:
            return [place.cell_contents]
        except ValueError:  # not yet filled
            return []
    return list(place)


def _write(place: Any, items: list[Any]) -> None:
    half = len(items) // 2
    if isinstance(place, (_Globals, _Attributes)):
        place.write(dict(zip(items[:half], items[half:])))
    elif isinstance(place, types.CellType):
        if items:
            place.cell_contents = items[0]
        else:
            del place.cell_contents
    elif isinstance(place, dict):
        place.clear()
        place.update(zip(items[:half], items[half:]))
    else:
        place.clear()
        (place.update if isinstance(place, set) else place.extend)(items)


def _are_same(now: list[Any], before: list[Any]) -> bool:
    """Whether the items are the same objects; equal numbers need not be."""
    if len(now) != len(before):
        return False
    return all(map(operator.is_, now, before)) or all(
        a is b or (type(a) is type(b) and isinstance(a, _NUMBERS) and bool(a == b))
        for a, b in zip(now, before)
    )


class State:
    """The places that can be reached from some modules, objects and functions, with their contents.

    Args:
        roots: modules, objects or functions.
        kinds: the classes that are looked into, with their functions; None: those of all objects.
    """

    def __init__(self, roots: Iterable[Any], kinds: Iterable[type] | None = None) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._every_class = kinds is None
        self._seen: dict[int, Any] = {}
        self._places: list[tuple[Any, list[Any]]] = []
        known = [item for cls in kinds or () for item in self._of_class(cls)]
        pending: list[tuple[Any, int]] = [(root, 0) for root in (*roots, *known)]
        while pending:
            value, depth = pending.pop()
            if isinstance(value, _NUMBERS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value  # by reference: ids stay unique
            pending += [(inner, depth) for inner in self._inside(value, depth)]
            if isinstance(value, types.FunctionType) and depth < _DEEPEST:
                pending += [(inner, depth + 1) for inner in self._named(value)]

    def _keep(self, place: Any) -> list[Any]:
        items = _read(place)
        self._places.append((place, items))
        return items

    def _inside(self, value: Any, depth: int) -> Iterator[Any]:
        """Keeps one value, and yields the values in it."""
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
            return
        if isinstance(value, (dict, *_SEQUENCES)):
            yield from self._keep(value)
        elif isinstance(value, (tuple, frozenset)):
            yield from value
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                yield from self._keep(cell)
        elif isinstance(value, types.MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif _is_looked_into(value):
            yield from self._of_object(value)

    def _of_object(self, value: Any) -> Iterator[Any]:
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict):
            yield state
        for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
            if hasattr(value, name):  # read only: no module has slots
                yield getattr(value, name)
        if self._every_class:
            for cls in type(value).__mro__:
                yield from self._of_class(cls)

    def _of_class(self, cls: type) -> Iterator[Any]:
        if id(cls) not in self._seen and not is_library(cls.__module__):
            self._seen[id(cls)] = cls
            yield from self._keep(_Attributes(cls))

    def _named(self, function: types.FunctionType) -> Iterator[Any]:
        """Objects that a function of the user's knows by a global name."""
        values = function.__globals__
        if is_library(values.get("__name__")):
            return
        for item in self._keep(_Globals(values, _names_of(function.__code__))):
            if not isinstance(item, (type, types.ModuleType)):
                yield item

    def changed(self) -> bool:
        return not all(_are_same(_read(place), items) for place, items in self._places)

    def restore(self) -> None:
        for place, items in self._places:
            if not _are_same(_read(place), items):
                _write(place, items)


@contextmanager
def restored(*roots: Any) -> Iterator[None]:
    """Context whose end takes back what was written to places that can be reached from some roots;
    values of tensors are not."""
    state = State(roots)
    try:
        yield
    finally:
        state.restore()


def duplicate(model: nn.Module) -> nn.Module:
    """A deep copy. Tensors that a forward has left in attributes are copied without their graph,
    which deepcopy refuses."""
    tensors = State([model]).tensors
    memo: dict[int, Any] = {
        key: tensor.detach().clone() for key, tensor in tensors.items() if not tensor.is_leaf
    }
    return copy.deepcopy(model, memo)


def is_opaque(value: Any) -> bool:
    """Whether a value has a state that cannot be looked into: an iterator, a queue, a file.
    Values (sizes, enumerations, paths) are compared by their contents, and so have a hash."""
    if isinstance(value, (*_NUMBERS, dict, *_SEQUENCES, nn.Module, Tensor, logging.Logger)):
        return False
    hashed: Any = type(value).__hash__
    return (
        (hashed is None or hashed is object.__hash__)
        and not callable(value)
        and not _is_looked_into(value)
        and not isinstance(value, (type, types.ModuleType))
    )


def _is_looked_into(value: Any) -> bool:
    """Whether a value is a module or an object of the user's. Objects of libraries may be in use by
    others: a queue, a thread, a process group. Those of classes in C show nothing: an array."""
    if isinstance(value, nn.Module):
        return not is_scripted(value)
    if isinstance(value, (type, types.ModuleType, logging.Logger)):
        return False
    kind = type(value)
    shows = hasattr(value, "__dict__") or hasattr(kind, "__slots__")
    return isinstance(value, _PLAIN) or (shows and not is_library(kind.__module__))


class _Writes(TorchDispatchMode):
    """Keeps memory of some tensors before something writes to it."""

    def __init__(self, keep: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.keep = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, name in _written(func):
            value = kwargs.get(name) if place >= len(args) else args[place]
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, Tensor):
                    self.keep(one)
        return func(*args, **kwargs)


@functools.cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Arguments that an operator writes to. The schema of torch's batch norm does not say so."""
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name.startswith("running_")
    ]


class Preserver:
    """Leaves a model as it is: attributes and objects that it reaches, values of its tensors,
    gradients, generators.

    The first run is for finding out: operators that write to memory of the model are seen by a
    mode, in whose presence ops of this package are computed by torch's.
    """

    def __init__(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise RuntimeError(
                    f"{name}: is not initialized yet; call the model on the example once before"
                )
        self.model = model
        self._written: set[int] | None = None  # ids of tensors

    @contextmanager
    def __call__(self, seed: int | None = 0) -> Iterator[None]:
        """Context of one run, which starts without gradients."""
        state = State([self.model])
        buffers = {id(buffer) for buffer in self.model.buffers()}
        tensors = _Tensors(state.tensors.values())
        tensors.keep_all(buffers | (self._written or set()))
        gradients = [(t, t.grad) for t in state.tensors.values() if t.is_leaf and t.requires_grad]
        flags = [(t, t.requires_grad) for t in state.tensors.values() if t.is_leaf]
        try:
            for tensor, _ in gradients:
                tensor.grad = None
            with same_generators(seed):
                if self._written is None:
                    with _Writes(tensors.keep):
                        yield
                else:
                    yield
        finally:
            state.restore()
            self._written = tensors.restore() | (self._written or set())
            for tensor, flag in flags:
                tensor.requires_grad_(flag)
            for tensor, gradient in gradients:
                tensor.grad = gradient


class _Tensors:
    """Tensors, and the memory of those that are written to."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._places: dict[int, list[tuple[Tensor, Tensor]]] = {}  # with aliases, by storage
        self._saved: dict[int, Any] = {}
        for tensor in tensors:
            key = _storage(tensor)
            if key:
                self._places.setdefault(key, []).append((tensor, tensor.detach()))

    def keep_all(self, ids: set[int]) -> None:
        for pairs in list(self._places.values()):
            for tensor, _ in pairs:
                if id(tensor) in ids:
                    self.keep(tensor)

    def keep(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key in self._places and key not in self._saved:
            self._saved[key] = tensor.untyped_storage().clone()

    def restore(self) -> set[int]:
        """Returns the ids of tensors whose memory was kept."""
        for key, pairs in self._places.items():
            for tensor, alias in pairs:
                same = tensor.shape == alias.shape and tensor.stride() == alias.stride()
                if _storage(tensor) != key or not same:
                    tensor.data = alias
            saved = self._saved.get(key)
            if saved is not None:
                storage = pairs[0][1].untyped_storage()
                if storage.nbytes() != saved.nbytes():
                    storage.resize_(saved.nbytes())
                storage.copy_(saved)
        return {id(tensor) for key in self._saved for tensor, _ in self._places[key]}


def _storage(tensor: Tensor) -> int:
    """A number for its memory; 0 where it has none of a known kind."""
    try:
        return 0 if tensor.is_meta else tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):
        return 0
