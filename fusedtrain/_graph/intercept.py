"""Everything that a forward looks at while it is traced: attributes of modules, by the one method
of nn.Module that is replaced meanwhile, and the Python code that runs, by a profile function.

torch.fx replaces `__call__` and `__getattr__` for each graph. At each replacement Python visits all
subclasses of nn.Module: for 0.4 ms beside timm (1,341 classes), for 1.3 ms beside transformers and
Lightning. That was 40 % of the time of `convert`. `__getattribute__` sees what both would see, and
is replaced once for all graphs of a module.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .._torch_private import CALL_CODES, FxPatcher, set_fx_patcher
from .modules import is_library

_TRACING = ("torch.fx", "fusedtrain._graph")
# The code through which every call and read of a module goes: no question of the forward's.
_MACHINERY = frozenset(
    function.__code__
    for function in (nn.Module.__getattr__, nn.Module.__setattr__, nn.Module.__delattr__)
).union(CALL_CODES)
# Entered by a helper of the forward, too, and where the state is what they would make of it now.
_CONTEXTS = frozenset(
    method.__code__
    for method in (
        torch.autocast.__enter__, torch.no_grad.__enter__, torch.enable_grad.__enter__,
        torch.inference_mode.__enter__, torch.set_grad_enabled.__init__,
        torch.autograd.graph.saved_tensors_hooks.__enter__,
    )
)  # fmt: skip
# Functions whose answer another day may be another.
_STATES: frozenset[Any] = frozenset(
    {
        torch.is_autocast_enabled, torch.is_autocast_cpu_enabled, torch.get_autocast_dtype,
        torch.get_autocast_cpu_dtype, torch.get_autocast_gpu_dtype, torch.is_inference_mode_enabled,
        torch.get_default_dtype, torch.get_num_threads,
        torch.are_deterministic_algorithms_enabled.__code__, torch.is_tensor.__code__,
    }
)  # fmt: skip
_PROBES = (hasattr, getattr)
_GETATTR, _CALL_CODE = nn.Module.__getattr__, nn.Module.__call__.__code__
_plain = object.__getattribute__
_one_at_a_time, _depth = threading.RLock(), 0
_active: list[Interceptor] = []  # traces in traces


@dataclass
class Reads:
    """The modules that a forward asks for attributes, by id, with the names; the code that runs,
    with the class of its first argument (itself, of a class method) and its globals; the functions
    that run with variables of enclosing ones, as long as they live."""

    modules: dict[int, tuple[nn.Module, set[str]]] = field(default_factory=dict)
    ran: dict[tuple[types.CodeType, type, int], dict[str, Any]] = field(default_factory=dict)

    closures: WeakKeyDictionary[types.FunctionType, None] = field(default_factory=WeakKeyDictionary)

    def add(self, module: nn.Module, names: set[str]) -> None:
        self.modules.setdefault(id(module), (module, set()))[1].update(names)

    def update(self, other: Reads) -> None:
        for module, names in other.modules.values():
            self.add(module, names)
        self.ran.update(other.ran)
        self.closures.update(other.closures)


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

    `reads` is filled while it is `listening()`.
    """

    def __init__(self) -> None:
        self.reads, self.listens = Reads(), False
        self.originals: dict[int, nn.Module] = {}  # modules by the ids of their clones
        self.thread = threading.get_ident()
        self.enters = False  # whether a context of torch was entered that a graph does not record
        self.probes = False  # whether it is within hasattr() or getattr()
        self.asks_state = ""  # the function of `_STATES` that was called
        self.asks_mode = False  # whether the training flag of a module was read
        self._frames: list[types.FrameType] = []  # of code with variables of enclosing functions
        self.methods: dict[str, Any] = {}  # of nn.Module: those that torch.fx would set

    def __enter__(self) -> Interceptor:
        self._profile: Any = sys.getprofile()
        # Python cannot set a profiler in C again, but cProfile does so itself.
        if not (self._profile is None or callable(self._profile) or self._is_standard()):
            raise RuntimeError("a profiler that sees Python calls is at work")
        self._before = set_fx_patcher(self._patcher)
        _active.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.listens = False
        _active.remove(self)
        set_fx_patcher(self._before)
        sys.setprofile(None if self._is_standard() else self._profile)
        if self._is_standard():
            self._profile.enable()

    def _is_standard(self) -> bool:
        """Whether cProfile was at work; from Python 3.12 on it is out of the way."""
        return type(self._profile).__module__ in ("cProfile", "_lsprof")

    @contextmanager
    def listening(self, whether: bool = True) -> Iterator[None]:
        """Context of the forward's work; not `whether`: of other work in it."""
        before = self.listens
        self._listen(whether)
        try:
            yield
        finally:
            self._listen(before)
            if whether:  # the frames have ended
                frames, self._frames = self._frames, []
                functions = filter(None, map(_function_of, frames))
                self.reads.closures.update(dict.fromkeys(functions))

    def _listen(self, whether: bool) -> None:
        if self.listens != whether:
            self.listens = whether
            sys.setprofile(self._note if whether else None)

    def _note(self, frame: types.FrameType, event: str, function: Any) -> None:
        names = frame.f_globals
        if event == "call" and frame.f_code in _CONTEXTS:
            self.enters = True
        if event == "call" and frame.f_code in _STATES:
            self.asks_state = frame.f_code.co_name
        if event.startswith("c_") and function in _PROBES:
            self.probes = event == "c_call" and not is_library(names.get("__name__"))
        if event == "c_call" and function in _STATES and not is_library(names.get("__name__")):
            self.asks_state = function.__name__
        if event != "call" or is_library(names.get("__name__")):
            return
        first: Any = next(iter(frame.f_locals.values()), None)
        if type(first) is tuple and first:  # (*args, **kwargs)
            first = first[0]
        kind = first if isinstance(first, type) else type(first)
        self.reads.ran[frame.f_code, kind, id(names)] = names
        if {*frame.f_code.co_freevars} - {"__class__"}:
            self._frames.append(frame)

    def _patcher(self) -> Any:
        """The list for this trace; torch.fx's own for one of another thread, or inside of it."""
        if self.methods or threading.get_ident() != self.thread:
            return self._before()
        return _Patcher(self.methods)

    def read(self, module: nn.Module, name: str) -> Any:
        """`getattr(module, name)`."""
        frame = sys._getframe(2)
        if name == "training":
            self.asks_mode = True
        if name == "_compiled_call_impl" and frame.f_code is _CALL_CODE and self.methods:
            return partial(self.methods["__call__"], module)
        if (
            self.listens
            and frame.f_code not in _MACHINERY
            and not str(frame.f_globals.get("__name__")).startswith(_TRACING)
        ):
            self.reads.add(self.originals.get(id(module), module), {name})
        try:
            return _plain(module, name)
        except AttributeError:
            get = self.methods.get("__getattr__")
            if get is None or type(module).__getattr__ is not _GETATTR:
                raise
        return get(module, name)


def _function_of(frame: types.FrameType) -> types.FunctionType | None:
    """The function of a call that has ended. The frame refers to it, in Python 3.10 to its cells
    alone; then it is searched for, which misses what `gc.freeze()` has hidden."""
    known = gc.get_referents(frame)
    pool = known if sys.version_info >= (3, 11) else gc.get_referrers(frame.f_code)
    cells = {*map(id, known)}
    for function in (f for f in pool if isinstance(f, types.FunctionType)):
        same = function.__code__ is frame.f_code
        if same and cells.issuperset(map(id, function.__closure__ or ())):
            return function
    return None


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
