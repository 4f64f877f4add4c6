"""Another forward or class for one module. What was changed is kept in the module's `__dict__`, and
survives deepcopy and pickle.

torch.compile, torch.export and torch.fx trace the forward of the class, and TorchScript and inspect
are shown that one, too.
"""

from __future__ import annotations

import copy
import linecache
import sys
import types
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .._recompute import MemoryPlan, recompute
from .._torch_private import is_fx_tracing
from .functions import resolve
from .guards import Guards
from .modules import is_scripted
from .warning import level_outside

_KEY = "_fusedtrain_convert"  # of the record in the `__dict__` of a module with another class
_LATER = ("save",)  # attributes of fused classes that `convert` sets after all else


def _template(replacement: Any, *args: Any, **kwargs: Any) -> Any:
    return replacement.run(*args, **kwargs)


def _of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _fingerprint(cls: type) -> str:
    """A text that tells the code of a class's forward from another, after a pickle is read."""
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    if code is None:
        return ""
    constants = [c for c in code.co_consts if isinstance(c, (int, float, str))]
    return f"{zlib.crc32(code.co_code)} {code.co_names} {constants}"


class Replacement:
    """The other forward: `run` is what it does. `install` puts it into its module."""

    _module: Callable[[], nn.Module | None]
    run: Callable[..., Any]
    # Methods that take the place of the module's, besides forward, and their names here.
    others: Mapping[str, str] = {}
    obstacle = "its forward is patched"  # why others leave the module

    @property
    def forward(self) -> types.MethodType:
        # pickle asks for this attribute of this object; TorchScript for the source and globals.
        module = self._module()
        if module is None:  # a pickle with circles is being read
            return types.MethodType(_template, self)
        original: Any = getattr(type(module), "forward")  # noqa: B009 (it may be None)
        function = types.FunctionType(_template.__code__, original.__globals__, "forward")
        function.__wrapped__ = original  # type: ignore[attr-defined]
        return types.MethodType(function, self)


_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class Rewritten(Replacement):
    """A forward from source, which runs where nobody can tell it from that of the class.

    That is: neither torch.compile, torch.export nor torch.fx follows it, the guards find what the
    source was made from, and nobody hooks a module that it does not call. Else the forward of the
    class runs. The module is not kept alive by it.

    `source` is a function named "forward", `imports` what the names in it stand for, written as
    "module:qualified.name": so that pickle needs no function that cannot be imported. Without a
    source it is the forward of the class. `recomputes`: it runs within `fusedtrain.recompute`,
    by this plan if it is one.
    """

    __module__ = "fusedtrain.conversion"  # the name in pickles
    others: Mapping[str, str] = {
        "_replicate_for_data_parallel": "replicate", "__getstate__": "state_of_module",
    }  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        source: str = "",
        imports: Mapping[str, str] | None = None,
        guards: Guards | None = None,
        recomputes: bool | MemoryPlan = False,
    ) -> None:
        state = {"module": module, "source": source, "recomputes": recomputes}
        self.__setstate__(state | {"imports": dict(imports or {}), "guards": guards or Guards()})

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies of a GraphModule are made from its graph, and would leave a copy of this behind.
        module = self._module()
        return (
            (OfGraph, ()) if isinstance(module, fx.GraphModule) else super().__reduce_ex__(protocol)
        )

    def __getstate__(self) -> dict[str, Any]:
        names = ("source", "imports", "guards", "recomputes")
        module: Any = self._module()
        state = {"module": module} | {name: getattr(self, name) for name in names}
        # A copy takes the forward that its class has by then for the one that was traced.
        same = module is not None and type(module).forward is self._class_forward
        state |= {"code": _fingerprint(type(module))} if same else {"source": ""}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._module = weakref.ref(state["module"])
        self.source: str = state["source"]
        self.imports: dict[str, str] = state["imports"]
        self.guards: Guards = state["guards"]
        fingerprint = _fingerprint(type(state["module"]))
        if state.get("code", fingerprint) != fingerprint:
            self.guards.stale = "`forward` of the class"  # its source has been edited since
        self.recomputes: bool | MemoryPlan = state["recomputes"]
        self._class_forward: Callable[..., Any] = type(state["module"]).forward
        self._warned = False
        self._attention: list[nn.Module] | None = None
        self.function = self._compiled()
        code = self.function.__code__
        self.arguments = code.co_varnames[: code.co_argcount]

    def _compiled(self) -> Callable[..., Any]:
        if not self.source:
            return _of_class
        name = f"<fusedtrain.convert {type(self._module()).__name__} {id(self)}>"
        # As fx does it: tracebacks show the line.
        linecache.cache[name] = (
            len(self.source), None, self.source.splitlines(keepends=True), name,
        )  # fmt: skip
        weakref.finalize(self, linecache.cache.pop, name, None)
        names = {name: resolve(path) for name, path in self.imports.items()}
        exec(compile(self.source, name, "exec"), names)
        function: Callable[..., Any] = names["forward"]
        return function

    def run(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if torch.compiler.is_compiling():
            return type(module).forward(module, *args, **kwargs)
        function = self.function if self.stands_in() else _of_class
        if self.recomputes and not is_fx_tracing():
            plan = self.recomputes if isinstance(self.recomputes, MemoryPlan) else None
            if plan is not None and self._takes_shortcuts():
                return function(module, *args, **kwargs)
            with recompute(plan):
                return function(module, *args, **kwargs)
        return function(module, *args, **kwargs)

    def _takes_shortcuts(self) -> bool:
        """Whether a part in eval mode takes torch's fast path, which a plan would switch off."""
        module: Any = self._module()
        if self._attention is None:
            self._attention = [m for m in module.modules() if isinstance(m, _WITH_FAST_PATH)]
        if all(part.training for part in self._attention):
            return False
        if torch.is_grad_enabled() and not self._warned:
            self._warned = True
            warnings.warn(
                "the memory plan is not followed while an nn.MultiheadAttention or "
                "nn.TransformerEncoder is in eval mode: its fast path computes other numbers than "
                "the functions that the plan knows",
                stacklevel=level_outside(),
            )
        return True

    def stands_in(self) -> bool:
        """Whether the source may run now in the place of the forward of the class."""
        if is_fx_tracing():
            return False
        module: Any = self._module()
        name = self.guards.changed()
        if name is None and type(module).forward is not self._class_forward:
            name = "`forward` of the class"
        if name is not None:
            self._warn(name)
            return False
        return self.guards.let_pass()

    def _warn(self, name: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self._module()).__name__}: {name} is not what fusedtrain.convert found. "
                "Its own forward runs while that is so, without fused ops. Call "
                "fusedtrain.revert, and convert once more",
                stacklevel=level_outside(),
            )

    def state_of_module(self) -> dict[str, Any]:
        """The state of the module for copy and pickle. A shallow copy gets the forward of the
        class: this one would run on its original."""
        module: Any = self._module()
        method = getattr(type(module), "__getstate__", None)  # every class has one from Python 3.11
        state: dict[str, Any] = vars(module) if method is None else method(module)
        if sys._getframe(1).f_code is not copy.copy.__code__:
            return state
        gone = ("forward", *self.others) if replacement_of(module) is self else tuple(self.others)
        return {name: value for name, value in state.items() if name not in gone}

    def replicate(self) -> nn.Module:
        """A replica whose forward is that of the class: this one would run on its original."""
        module: Any = self._module()
        replica: nn.Module = type(module)._replicate_for_data_parallel(module)
        state = vars(replica)
        for name in self.others:
            state.pop(name, None)
        if replacement_of(module) is self:  # else something else is around it by now
            state.pop("forward", None)
        return replica


class OfGraph:
    """In the place of what a GraphModule had in its `__dict__`, of which no copy takes notice."""

    __module__ = "fusedtrain.conversion"  # the name in pickles
    forward = replicate = state_of_module = None


def install(replacement: Replacement) -> None:
    module = replacement._module()
    assert module is not None
    vars(module)["forward"] = replacement.forward
    others = replacement.others.items()
    vars(module).update({name: getattr(replacement, ours) for name, ours in others})


def obstacle_of(module: nn.Module) -> str:
    """Why a module whose forward is another than that of its class stays as it is; mostly ''."""
    if "forward" not in vars(module):
        return ""
    replacement = replacement_of(module)
    return Replacement.obstacle if replacement is None else replacement.obstacle


def replacement_of(module: nn.Module) -> Replacement | None:
    held = vars(module).get("forward")
    owner = getattr(held, "__self__", held)
    return owner if isinstance(owner, Replacement) else None


def rewritten_of(module: nn.Module) -> Rewritten | None:
    replacement = replacement_of(module)
    return replacement if isinstance(replacement, Rewritten) else None


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether something else has replaced the forward of its class."""
    return is_scripted(module) or ("forward" in vars(module) and rewritten_of(module) is None)


def remove(module: nn.Module) -> bool:
    """Whether there was one."""
    rewritten = rewritten_of(module)
    if rewritten is None:
        return False
    for name in ("forward", *rewritten.others):
        vars(module).pop(name, None)
    return True


class Record(NamedTuple):
    """The changes of a module that was given another class."""

    original: type
    fused: type
    added: tuple[str, ...]  # __dict__ keys which the original did not have
    replaced: dict[str, Any]  # and those which had another value


Record.__module__ = "fusedtrain.conversion"  # the name in pickles


def record_of(module: nn.Module) -> Record | None:
    return vars(module).get(_KEY)


def assign(module: nn.Module, fused: type, wanted: Mapping[str, Any]) -> None:
    """Gives the module a class and attributes."""
    attributes = vars(module)
    added = tuple(key for key in wanted if key not in attributes)
    replaced = {key: attributes[key] for key in wanted if key in attributes}
    record = Record(type(module), fused, added, replaced)
    module.__class__ = fused
    attributes.update(wanted)
    attributes[_KEY] = record


def assigned(module: nn.Module) -> tuple[type, dict[str, Any]]:
    """The class and the attributes that a module was given."""
    record = record_of(module)
    assert record is not None
    return record.fused, {key: vars(module)[key] for key in (*record.added, *record.replaced)}


def restore(module: nn.Module) -> bool:
    """Takes back class, attributes and forward; whether there was anything to take back."""
    rewritten, record = remove(module), record_of(module)
    if record is None:
        return rewritten
    attributes = vars(module)
    for key in (_KEY, *record.added, *_LATER):
        attributes.pop(key, None)
    attributes.update(record.replaced)
    module.__class__ = record.original
    return True


def is_changed(module: nn.Module) -> bool:
    return record_of(module) is not None or rewritten_of(module) is not None


def set_recomputing(module: nn.Module, wanted: bool | MemoryPlan) -> None:
    """Whether a model's forward, rewritten or not, runs within `fusedtrain.recompute`, and by which
    plan. One that recomputes nothing costs nothing."""
    if isinstance(wanted, MemoryPlan) and not wanted.recomputed:
        wanted = False
    now = rewritten_of(module)
    if (now is not None and now.recomputes) == wanted:
        return
    if now is not None and now.source:
        install(Rewritten(module, now.source, now.imports, now.guards, wanted))
    elif wanted:
        install(Rewritten(module, recomputes=wanted))
    else:
        remove(module)
