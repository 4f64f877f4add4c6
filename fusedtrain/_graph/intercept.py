"""The one method of nn.Module that is replaced while forwards are traced.

torch.fx replaces `__call__` and `__getattr__` for each graph. At each replacement Python visits all
subclasses of nn.Module: for 0.4 ms beside timm (1,341 classes), for 1.3 ms beside transformers and
Lightning. That was 40 % of the time of `convert`. `__getattribute__` sees what both would see, and
is replaced once for all graphs of a module.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from .._torch_private import CALL_CODES, FxPatcher, set_fx_patcher

Reads = dict[int, tuple[nn.Module, set[str]]]  # id of a module: the module, names it was asked for

_TRACING = ("torch.fx", "fusedtrain._graph")
# The code through which every call and read of a module goes: no question of the forward's.
_MACHINERY = frozenset(
    function.__code__
    for function in (nn.Module.__getattr__, nn.Module.__setattr__, nn.Module.__delattr__)
).union(CALL_CODES)
_GETATTR, _CALL_CODE = nn.Module.__getattr__, nn.Module.__call__.__code__
_plain = object.__getattribute__
_one_at_a_time, _depth = threading.RLock(), 0
_active: list[Interceptor] = []  # traces in traces


class _Patcher(FxPatcher):
    """torch.fx's list of replaced functions, but for methods of nn.Module."""

    def __init__(self, methods: dict[str, Any]) -> None:
        super().__init__()
        self.methods = methods

    def patch_method(self, cls: type, name: str, new_fn: Any, deduplicate: bool = True) -> None:
        if cls is nn.Module and name in ("__call__", "__getattr__"):
            self.methods[name] = new_fn
        else:
            super().patch_method(cls, name, new_fn, deduplicate)


class Interceptor:
    """Answers reads of modules' attributes while one forward is traced, in this thread.

    Args:
        reads: filled with the attributes that Python code reads while `listens()`.
        originals: modules by the ids of their clones, which stand in for them.
    """

    def __init__(
        self, reads: Reads, originals: dict[int, nn.Module], listens: Callable[[], bool]
    ) -> None:
        self.reads, self.originals, self.listens = reads, originals, listens
        self.thread = threading.get_ident()
        self.asks_mode = False  # whether the training flag of a module was read
        self._methods: dict[str, Any] = {}  # of nn.Module: those that torch.fx would set

    def __enter__(self) -> Interceptor:
        self._before = set_fx_patcher(self._patcher)
        _active.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _active.remove(self)
        set_fx_patcher(self._before)

    def _patcher(self) -> Any:
        """The list for this trace; torch.fx's own for one of another thread, or inside of it."""
        if self._methods or threading.get_ident() != self.thread:
            return self._before()
        return _Patcher(self._methods)

    def read(self, module: nn.Module, name: str) -> Any:
        """`getattr(module, name)`."""
        frame = sys._getframe(2)
        if name == "training":
            self.asks_mode = True
        if name == "_compiled_call_impl" and frame.f_code is _CALL_CODE and self._methods:
            return partial(self._methods["__call__"], module)
        if (
            self.listens()
            and frame.f_code not in _MACHINERY
            and not str(frame.f_globals.get("__name__")).startswith(_TRACING)
        ):
            original = self.originals.get(id(module), module)
            self.reads.setdefault(id(original), (original, set()))[1].add(name)
        try:
            return _plain(module, name)
        except AttributeError:
            get = self._methods.get("__getattr__")
            if get is None or type(module).__getattr__ is not _GETATTR:
                raise
        return get(module, name)


def _read(module: nn.Module, name: str) -> Any:
    if _active and _active[-1].thread == threading.get_ident():
        return _active[-1].read(module, name)
    return _plain(module, name)


@contextmanager
def intercepting() -> Iterator[None]:
    """Context in which an :class:`Interceptor` sees the modules. One thread at a time.

    The outermost of several changes nn.Module.
    """
    global _depth
    patched: Any = nn.Module
    with _one_at_a_time:
        if not _depth:
            patched.__getattribute__ = _read
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
            if not _depth:
                del patched.__getattribute__
