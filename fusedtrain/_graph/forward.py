"""Another forward or class for one module. What was changed is kept in the module's `__dict__`, and
survives deepcopy and pickle.

A forward in a module's `__dict__` cannot know who asks: a clone with a copy of the `__dict__` would
run on its original. So the class is asked. A :class:`Dispatcher` takes the place of its forward
and gives an instance with a replacement that one (docs/decisions/0017-whose-forward.md). Everybody
else gets the forward of the class: other instances, super(), torch.compile (but for depthwise
convolutions), torch.export, torch.fx, TorchScript, inspect.
"""

from __future__ import annotations

import copy
import functools
import linecache
import types
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .._recompute import MemoryPlan, recompute
from .._torch_private import is_fx_tracing, skip_frame
from .functions import resolve
from .guards import Guards
from .modules import FORWARD, home_of, is_patched, is_scripted
from .warning import level_outside

_KEY = "_fusedtrain_convert"  # of the record in the `__dict__` of a module with another class
_LATER = ("save",)  # attributes of fused classes that `convert` sets after all else


def _fingerprint(cls: type) -> str:
    """A text that tells the code of a class's forward from another, after a pickle is read."""
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    if code is None:
        return ""
    constants = [c for c in code.co_consts if isinstance(c, (int, float, str))]
    return f"{zlib.crc32(code.co_code)} {code.co_names} {constants}"


class Dispatcher:
    """Stand-in for the forward of a class; no instance with a forward in its `__dict__` asks."""

    def __init__(self, home: type) -> None:
        self.home, stock = home, vars(home)["forward"]
        self.stock = stock if hasattr(stock, "__get__") else staticmethod(stock)
        self.is_plain = isinstance(stock, types.FunctionType)
        self.__wrapped__ = stock  # for who reads the code of a class
        self.function = _dispatching(self)

    def __get__(self, module: Any, cls: Any = None) -> Any:
        # Asked at every forward of all instances of the class.
        if module is not None and FORWARD in module.__dict__ and self.finds(module) is not None:
            return types.MethodType(self.function, module)
        if torch.compiler.is_compiling() and module is not None and self.is_plain:
            new = module.__dict__.get(FORWARD)
            traced = new is not None and new.home is self.home and new.traced
            # torch 2.10 traces no bound method here.
            return functools.partial(traced or self.stock, module)
        return self.stock.__get__(module, cls)

    def finds(self, module: nn.Module) -> Replacement | None:
        """The replacement that a call of the module's forward runs; none while Dynamo traces."""
        new: Replacement | None = module.__dict__.get(FORWARD)
        # The home is another class within `super().forward`, the module another one if the
        # `__dict__` is a copy.
        if new is None or new.home is not self.home or new._module() is not module:
            return None
        return None if torch.compiler.is_compiling() else new

    def __reduce__(self) -> Any:  # cloudpickle's, of a class in a notebook
        return _itself, (self.stock,)


# nn.Module's own code asks for the forward of a compiled module, which is the first frame to trace.
skip_frame(Dispatcher.__get__)
skip_frame(Dispatcher.finds)


def _itself(stock: Any) -> Any:
    return stock


def _dispatching(dispatcher: Dispatcher) -> Callable[..., Any]:
    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        replacement = dispatcher.finds(module)
        if replacement is None:
            return dispatcher.stock(module, *args, **kwargs)
        return replacement.run(*args, **kwargs)

    stock = dispatcher.stock
    if isinstance(stock, types.FunctionType):  # TorchScript asks for source and globals
        forward = types.FunctionType(
            forward.__code__, stock.__globals__, "forward", None, forward.__closure__
        )
    return functools.update_wrapper(forward, stock)


class Replacement:
    """The other forward: `run` is what it does. `install` puts it into its module."""

    _module: Callable[[], nn.Module | None]
    run: Callable[..., Any]
    home: type  # the class with the dispatcher
    obstacle = "its forward is patched"  # why others leave the module
    traced: Callable[..., Any] | None = None  # the forward of a leaf, as torch.compile sees it

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.dispatch(self.home)  # the module may still be without its `__dict__`

    @property
    def stock(self) -> Callable[..., Any]:
        """The forward that the class has by now."""
        forward = vars(self.home)["forward"]
        stock: Callable[..., Any] = forward.stock if isinstance(forward, Dispatcher) else forward
        return stock

    def dispatch(self, kind: type) -> None:
        """Lets the class that defines the forward ask for replacements."""
        home = home_of(kind)
        if not isinstance(vars(home)["forward"], Dispatcher):
            home.forward = Dispatcher(home)
        self.home = home


_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class Rewritten(Replacement):
    """Generated forward; runs only while its guards hold, else the forward of the class runs.

    It also gives way to torch.compile, torch.export and torch.fx, and to hooks of a module that it
    does not call. It does not keep the module alive.

    `source` is a function named "forward", `imports` what the names in it stand for, written as
    "module:qualified.name": so that pickle needs no function that cannot be imported. Without a
    source it is the forward of the class. `recomputes`: it runs within `fusedtrain.recompute`,
    by this plan if it is one.
    """

    __module__ = "fusedtrain.conversion"  # the name in pickles

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
        gone = module is None or isinstance(module, fx.GraphModule)
        return (type(None), ()) if gone else super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewritten | None:
        if id(self._module()) not in memo:  # in a copy of its module's `__dict__`
            return None
        new = memo[id(self)] = Rewritten.__new__(Rewritten)
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        names = ("source", "imports", "guards", "recomputes")
        module: Any = self._module()
        state = {"module": module} | {name: getattr(self, name) for name in names}
        # A copy takes the forward that its class has by then for the one that was traced.
        same = module is not None and self.stock is self._class_forward
        same = same and home_of(type(module)) is self.home
        state |= {"code": _fingerprint(type(module))} if same else {"source": ""}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._module = weakref.ref(state["module"])
        self.dispatch(type(state["module"]))
        self.source: str = state["source"]
        self.imports: dict[str, str] = state["imports"]
        self.guards: Guards = state["guards"]
        fingerprint = _fingerprint(type(state["module"]))
        if state.get("code", fingerprint) != fingerprint:
            self.guards.stale = "`forward` of the class"  # its source has been edited since
        self.recomputes: bool | MemoryPlan = state["recomputes"]
        self._class_forward = self.stock
        self._warned = False
        self._attention: list[nn.Module] | None = None
        self.traced = None
        self.arguments: tuple[str, ...] = ()
        if self.source:
            self.function = self._compiled()
            code = self.function.__code__
            self.arguments = code.co_varnames[: code.co_argcount]

    def _compiled(self) -> Callable[..., Any]:
        name = f"<fusedtrain.convert {type(self._module()).__name__} {id(self)}>"
        # As fx does it: tracebacks show the line.
        linecache.cache[name] = (
            len(self.source), None, self.source.splitlines(keepends=True), name,
        )  # fmt: skip
        weakref.finalize(self, linecache.cache.pop, name, None)
        names = {name: resolve(path) for name, path in self.imports.items()}
        self.traced = next((f for f in names.values() if getattr(f, "is_traced", False)), None)
        exec(compile(self.source, name, "exec"), names)
        function: Callable[..., Any] = names["forward"]
        return function

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        function = self.function if self.source and self.stands_in() else self.stock
        if self.recomputes and not is_fx_tracing():
            plan = self.recomputes if isinstance(self.recomputes, MemoryPlan) else None
            if plan is not None and self._takes_shortcuts():
                return self._called(function, module, *args, **kwargs)
            with recompute(plan):
                return self._called(function, module, *args, **kwargs)
        return self._called(function, module, *args, **kwargs)

    def _called(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The value of a forward; of the stock one where the generated one declines the call."""
        value = function(*args, **kwargs)
        return self.stock(*args, **kwargs) if value is NotImplemented else value

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

    def is_called(self, module: nn.Module) -> bool:
        """Whether a call of its module asks for it: nobody has set another forward since."""
        if "forward" in module.__dict__ or home_of(type(module)) is not self.home:
            return False
        return module.__dict__.get("_compiled_call_impl") is None

    def stands_in(self) -> bool:
        """Whether the generated forward may run now instead of that of the class."""
        if is_fx_tracing():
            return False
        name = self.guards.changed()
        if name is None and self.stock is not self._class_forward:
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


def install(replacement: Replacement) -> None:
    module = replacement._module()
    assert module is not None
    replacement.dispatch(type(module))
    vars(module)[FORWARD] = replacement


def obstacle_of(module: nn.Module) -> str:
    """Reason why a replaced forward blocks conversion, or ''."""
    if is_patched(module):
        return Replacement.obstacle
    replacement = replacement_of(module)
    return "" if replacement is None else replacement.obstacle


def replacement_of(module: nn.Module) -> Replacement | None:
    replacement: Replacement | None = vars(module).get(FORWARD)
    return replacement if replacement is not None and replacement._module() is module else None


def rewritten_of(module: nn.Module) -> Rewritten | None:
    replacement = replacement_of(module)
    return replacement if isinstance(replacement, Rewritten) else None


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether something else has replaced the forward of its class."""
    replacement = vars(module).get(FORWARD)
    foreign = replacement is not None and not isinstance(replacement, Rewritten)
    return is_scripted(module) or "forward" in vars(module) or foreign


def remove(module: nn.Module) -> bool:
    """Whether there was one."""
    if rewritten_of(module) is None:
        return False
    del vars(module)[FORWARD]
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
    """Sets class and attributes of a module, and records the former ones."""
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
