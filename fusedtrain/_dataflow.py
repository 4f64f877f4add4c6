"""Who hands what to whom in a model: each module's own forward, traced with torch.fx.

Every child counts as a leaf, so `if self.downsample is not None` is Python that just runs. Where
Python asks for what only a tensor could tell (`if x.dim() == 4`, `isinstance(x, list)`), all ways
through the forward are traced. The forward runs on stand-ins: the model's own state stays.
"""

from __future__ import annotations

import operator
import random
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from ._optional_arguments import looks_at, optional_of, trials
from ._rewritten import rewritten_of

_MOST_WAYS, _MOST_CHOICES = 16, 64
_SCRIPTED: Any = getattr(torch.jit, "ScriptModule", ())
# Made of other modules and without a forward.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_PRODUCTS = (operator.mul, torch.mul, "mul")
# own training flag, that of all children, gradients
_MODES = ((True, True, True), (False, False, False), (True, False, False), (False, True, True))


@dataclass
class Trace:
    """The graphs of one module's forward: one for each way through it.

    `inexact` says why a graph cannot take the place of the forward, "" where it can.
    """

    module: nn.Module
    graphs: list[fx.Graph]
    inexact: str = ""

    def callee(self, node: object) -> nn.Module | None:
        """The module that a node calls, if it does."""
        if not isinstance(node, fx.Node) or node.op != "call_module":
            return None
        return self.module.get_submodule(str(node.target))


@dataclass
class _Choices:
    """The answers of one way through a forward: those given, then always the first."""

    given: tuple[bool, ...]
    made: list[bool] = field(default_factory=list)

    def choose(self, first: bool) -> bool:
        place = len(self.made)
        if place >= _MOST_CHOICES:  # `while not done:`
            raise RuntimeError("its forward has too many branches")
        self.made.append(self.given[place] if place < len(self.given) else first)
        return self.made[-1]


class _Proxy(fx.Proxy):
    """Also records `x += y` for what it is, which fx would take for `x = x + y`, and refuses
    `x.data = y`, which fx would not record."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise AttributeError(f"its forward sets `{name}` of a tensor")
        super().__setattr__(name, value)


def _in_place(name: str) -> Any:
    function = getattr(operator, name)

    def record(self: fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


IN_PLACE = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
)  # fmt: skip
for _name in IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _in_place(_name))


class _Tracer(fx.Tracer):
    # So that a forward which updates a buffer in place updates nothing here.
    proxy_buffer_attributes = True
    sees_conversions = True  # forwards as they run, not as they were before `convert`

    def __init__(self, choices: _Choices) -> None:
        super().__init__()
        self.choices = choices
        self.guessed = ""
        self.kinds: dict[fx.Node, bool] = {}
        self.context = _context()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _context() != self.context:
            self.guessed = "its forward works under no_grad, autocast or checkpoint"
        if "set_" in args:  # Tensor.set_
            self.guessed = "its forward puts one tensor into the place of another"
        return super().create_node(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.guessed = "what its forward does depends on its input"
        return self.choices.choose(False)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        self.guessed = "its forward takes a list of tensors"
        item: Any = obj
        return iter((item[0], item[1]))

    def is_instance(self, obj: fx.Proxy, kinds: Any) -> bool:
        """A tensor at first, then a list."""
        flat = kinds if isinstance(kinds, tuple) else (kinds,)
        if not {torch.Tensor, list, tuple} & set(flat):
            if obj.node.op == "placeholder" and obj.node.args:  # optional: may be a str, say
                self.guessed = "its forward asks for the type of its input"
            return isinstance(obj, kinds)
        self.guessed = "its forward asks for the type of its input"
        if obj.node not in self.kinds:
            self.kinds[obj.node] = self.choices.choose(True)
        return (torch.Tensor in flat) == self.kinds[obj.node]


@cache
def _device_types() -> tuple[str, str]:
    return "cpu", str(torch.accelerator.current_accelerator(False) or "cuda")


def _context() -> tuple[Any, ...]:
    """What a `with` around a call changes, and a graph does not tell."""
    autocast = [
        (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _device_types()
    ]
    # Those of torch.utils.checkpoint, say.
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, hooks(False))


class _Watch(TorchDispatchMode):
    """Notes whether anything is computed while a forward runs on stand-ins."""

    computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed = True
        return func(*args, **(kwargs or {}))


@contextmanager
def _answering(forward: Any, tracer: _Tracer) -> Iterator[None]:
    """Lets the file that a forward was written in ask for the types of stand-ins."""
    names = forward.__globals__
    had, before = "isinstance" in names, names.get("isinstance")

    def is_instance(obj: Any, kinds: Any) -> bool:
        return (
            tracer.is_instance(obj, kinds) if isinstance(obj, fx.Proxy) else isinstance(obj, kinds)
        )

    names["isinstance"] = is_instance
    try:
        yield
    finally:
        if had:
            names["isinstance"] = before
        else:
            del names["isinstance"]


def _clone(root: nn.Module) -> nn.Module:
    """The module, whose forward may store in it what it likes: tensors are shared, no more."""
    clones = {
        id(m): m if isinstance(m, _SCRIPTED) else object.__new__(type(m)) for m in root.modules()
    }

    def copied(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return clones.get(id(value), value)
        if type(value) in (list, tuple, set):
            return type(value)(map(copied, value))
        if type(value) in (dict, OrderedDict):
            return type(value)((key, copied(item)) for key, item in value.items())
        return value

    for module in root.modules():
        clone = clones[id(module)]
        if clone is not module:
            vars(clone).update((key, copied(value)) for key, value in vars(module).items())
    return clones[id(root)]


def _stored(root: nn.Module) -> list[Any]:
    """What its modules have in them, to be compared by identity."""

    def identity(value: Any) -> Any:
        if type(value) in (list, tuple):
            return [id(item) for item in value]
        if type(value) in (dict, OrderedDict):
            return [(key, id(item)) for key, item in value.items()]
        # Equal numbers need not be one object.
        return value if type(value) in (int, float, str, bool) else id(value)

    return [[(key, identity(v)) for key, v in vars(m).items()] for m in root.modules()]


def _forward_of(module: nn.Module, converted: bool) -> Any:
    rewritten = rewritten_of(module) if converted else None
    if rewritten is None or not rewritten.source:
        return type(module).forward
    return rewritten._function


def _trace_once(
    module: nn.Module,
    choices: _Choices,
    mode: tuple[bool, bool, bool],
    defaults: dict[str, Any],
    converted: bool = False,
) -> tuple[fx.Graph, str]:
    """One way through a forward, and what makes it one of several."""
    own, children, gradients = mode
    clone, tracer, watch = _clone(module), _Tracer(choices), _Watch()
    forward, cls = _forward_of(module, converted), type(module)
    if forward is not cls.forward:
        clone.__class__ = type(cls.__name__, (cls,), {"forward": forward})
    for part in clone.modules():
        if not isinstance(part, _SCRIPTED):
            vars(part)["training"] = own if part is clone else children
    state, stored = random.getstate(), _stored(clone)
    try:
        with torch.set_grad_enabled(gradients):
            tracer.context = _context()
            with _answering(type(clone).forward, tracer), watch, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about what the stand-ins lack
                graph = tracer.trace(clone, defaults or None)
        drawn = random.getstate() != state
    finally:
        random.setstate(state)
    if watch.computed or drawn:
        tracer.guessed = tracer.guessed or "its forward computes from more than its input"
    if _stored(clone) != stored:
        tracer.guessed = tracer.guessed or "its forward stores something"
    return graph, tracer.guessed


def trace(module: nn.Module, converted: bool = False) -> Trace | str:
    """All graphs of a forward, or why there is none. `converted`: of that which convert gave it."""
    if isinstance(module, _SCRIPTED):
        return "it is scripted"
    forward = _forward_of(module, converted)
    if "forward" in vars(module) and forward is type(module).forward:
        return "its forward is patched"
    if not isinstance(forward, types.FunctionType):
        return "its forward is no function"
    try:
        if forward is nn.Sequential.forward:
            return Trace(module, [_trace_once(module, _Choices(()), _MODES[0], {})[0]])
        return _trace_all(module, optional_of(forward), converted)
    except Exception as error:  # whatever a forward makes of what is no tensor
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _trace_all(module: nn.Module, optional: dict[str, Any] | None, converted: bool) -> Trace:
    graphs: dict[str, fx.Graph] = {}
    indifferent = _is_indifferent(module, optional, converted)
    inexact = "" if indifferent else "its forward has optional arguments"
    if not inexact:
        optional = {}
    error: Exception | None = None
    for mode in _MODES:
        for defaults in [{}, optional] if optional else [{}]:
            pending: list[tuple[bool, ...]] = [()]
            ways = 0
            while pending:
                ways += 1
                if ways > _MOST_WAYS:
                    raise RuntimeError("its forward has too many branches")
                choices = _Choices(pending.pop())
                try:
                    graph, guessed = _trace_once(module, choices, mode, defaults, converted)
                    graphs.setdefault(graph.python_code("self").src, graph)
                    inexact = inexact or guessed
                except Exception as raised:  # of an assertion, say: other ways remain
                    error = raised
                    if not choices.made and not optional:
                        raise
                    inexact = inexact or "what its forward does depends on its input"
                pending += [
                    (*choices.made[:i], not choices.made[i])
                    for i in range(len(choices.given), len(choices.made))
                ]
    if not graphs and error is not None:
        raise error
    if len(graphs) > 1:
        inexact = inexact or "its forward depends on the mode of training"
    return Trace(module, list(graphs.values()), inexact)


def _is_indifferent(module: nn.Module, optional: dict[str, Any] | None, converted: bool) -> bool:
    """Whether a forward has no optional arguments, or takes one way whatever they are."""
    if not optional:
        return optional is not None
    for mode in _MODES:
        try:
            plain, guessed = _trace_once(module, _Choices(()), mode, {}, converted)
        except Exception:
            return False
        if guessed:
            return False
        for number, values in enumerate(trials(optional)):
            try:
                traced, guessed = _trace_once(module, _Choices(()), mode, values, converted)
            except Exception:
                if number == 0:
                    return False
                continue  # the forward would not take that either
            if guessed or looks_at(plain, values, traced):
                return False
    return True


def is_product(node: fx.Node) -> bool:
    """Whether a call multiplies two operands; a module may be called "mul", too."""
    multiplies = node.op in ("call_function", "call_method") and node.target in _PRODUCTS
    return multiplies and len(node.args) == 2 and not node.kwargs


def _is_container(module: nn.Module) -> bool:
    """Whether it is made of other modules, and has no forward."""
    if isinstance(module, _SCRIPTED):
        return False
    return isinstance(module, _CONTAINERS) or type(module).forward is nn.Module.forward


def _near(module: nn.Module) -> Iterator[nn.Module]:
    """What a forward calls as a rule: its children, and those of containers among them."""
    for child in module._modules.values():
        if child is not None:
            yield child
            if _is_container(child):
                yield from _near(child)


@dataclass
class Flow:
    """The traces of all forwards of a model that may call a batch norm, or one of `others`; with
    `converted`, of those that convert has rewritten as they are now."""

    model: nn.Module
    others: Callable[[nn.Module], bool] = lambda _: False  # of what a forward calls
    worth: Callable[[nn.Module], bool] = lambda _: False  # of the module itself
    converted: bool = False
    failed: dict[int, str] = field(default_factory=dict)  # id of a module: why it has no trace
    names: dict[int, str] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)  # how often a module is registered

    def __post_init__(self) -> None:
        self._calls: dict[int, list[tuple[Trace, fx.Graph, fx.Node]]] = {}
        self._owners: dict[int, list[nn.Module]] = {}
        self._traced: set[int] = set()
        self.traces: list[Trace] = []
        for name, module in self.model.named_modules():
            self.names[id(module)] = name
            for child in module._modules.values():
                if child is not None:
                    self.places[id(child)] = self.places.get(id(child), 0) + 1
            if not _is_container(module):
                for part in _near(module):
                    self._owners.setdefault(id(part), []).append(module)
            if not self._may_call(module):
                continue
            found = trace(module, self.converted)
            if isinstance(found, str):
                self.failed[id(module)] = found
                continue
            self._traced.add(id(module))
            self.traces.append(found)
            for graph in found.graphs:
                for node in graph.nodes:
                    callee = found.callee(node)
                    if callee is not None:
                        self._calls.setdefault(id(callee), []).append((found, graph, node))

    def _may_call(self, module: nn.Module) -> bool:
        if isinstance(module, (_BatchNorm, _SCRIPTED)) or _is_container(module):
            return False
        forward = type(module).forward
        # Wrappers such as DistributedDataParallel call what they wrap and no part of it.
        foreign = (forward.__module__ or "").startswith("torch.")
        if foreign and forward is not nn.Sequential.forward:
            return False
        if any(isinstance(part, _BatchNorm) for part in module.modules()):
            return True
        if forward is nn.Sequential.forward:
            return False
        return any(map(self.others, _near(module))) or self.worth(module)

    def calls(self, module: nn.Module) -> list[tuple[Trace, fx.Graph, fx.Node]]:
        """Every call of a module, on every way through every forward."""
        return self._calls.get(id(module), [])

    def untraced(self, module: nn.Module) -> list[nn.Module]:
        """Modules that may call this one, a child of theirs, and have no trace."""
        owners = self._owners.get(id(module), [])
        return [owner for owner in owners if id(owner) not in self._traced]
