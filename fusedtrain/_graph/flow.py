"""Who hands what to whom in a model: each module's own forward, traced with torch.fx.

Every child counts as a leaf, so `if self.downsample is not None` is Python that just runs. Where
Python asks for what only a tensor could tell (`if x.dim() == 4`, `isinstance(x, list)`), all ways
through the forward are traced. The forward runs on stand-ins: the model's own state stays.
"""

from __future__ import annotations

import dis
import functools
import operator
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .forward import rewritten_of
from .optional import asks_results, looks_at, optional_of, trials
from .tracer import (
    BYPASSED,
    CONTEXT,
    KEPT,
    Choices,
    Tracer,
    Watch,
    answering,
    bypass,
    context_now,
    has_with,
    random_states,
    set_random_states,
)

_MOST_WAYS = 16
_TRACING = ("torch.fx", "fusedtrain")
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
    partial: bool = False  # ways are missing
    bypassed: set[int] = field(default_factory=set)  # ids of modules called by their `forward`

    @staticmethod
    def is_kept(node: fx.Node) -> bool:
        """Whether its value outlives the forward, in an attribute or a global list, say."""
        return KEPT in node.meta

    @staticmethod
    def are_alike(first: fx.Node, second: fx.Node) -> bool:
        """Whether both are computed under the same no_grad, autocast and the like."""
        return first.meta.get(CONTEXT) == second.meta.get(CONTEXT)

    def callee(self, node: object) -> nn.Module | None:
        """The module that a node calls, if it does."""
        if not isinstance(node, fx.Node) or node.op != "call_module":
            return None
        return self.module.get_submodule(str(node.target))


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
    choices: Choices,
    mode: tuple[bool, bool, bool],
    defaults: dict[str, Any],
    converted: bool = False,
) -> tuple[fx.Graph, str]:
    """One way through a forward, and what makes it one of several."""
    own, children, gradients = mode
    clone, tracer, watch = _clone(module), Tracer(choices), Watch()
    forward, cls = _forward_of(module, converted), type(module)
    if forward is not cls.forward:
        clone.__class__ = type(cls.__name__, (cls,), {"forward": forward})
    for part in clone.modules():
        if not isinstance(part, _SCRIPTED):
            vars(part)["training"] = own if part is clone else children
            if part is not clone and "forward" not in vars(part):
                vars(part)["forward"] = functools.partial(bypass, tracer, part)
    states, stored = random_states(), _stored(clone)
    try:
        with torch.set_grad_enabled(gradients):
            tracer.context = context_now()
            with answering(type(clone).forward, tracer), watch, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about what the stand-ins lack
                graph = tracer.trace(clone, defaults or None)
        tracer.mark_kept()
        drawn = str(random_states()) != str(states)
    finally:
        set_random_states(states)
    if watch.computed or drawn:
        tracer.guessed = tracer.guessed or "its forward computes from more than its input"
    if _stored(clone) != stored:
        tracer.guessed = tracer.guessed or "its forward stores something"
    for bypassed in tracer.bypassed:
        graph.output_node().meta.setdefault(BYPASSED, set()).add(bypassed)
    if has_with(forward):
        tracer.guessed = tracer.guessed or "its forward has a with statement"
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
            graph, guessed = _trace_once(module, Choices(()), _MODES[0], {})
            return _made(module, [graph], guessed)
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
    partial = False
    for mode in _MODES:
        for defaults in [{}, optional] if optional else [{}]:
            pending: list[tuple[bool, ...]] = [()]
            ways = 0
            while pending:
                ways += 1
                if ways > _MOST_WAYS:
                    raise RuntimeError("its forward has too many branches")
                choices = Choices(pending.pop())
                try:
                    graph, guessed = _trace_once(module, choices, mode, defaults, converted)
                    _note(graph, graphs.setdefault(graph.python_code("self").src, graph))
                    inexact = inexact or guessed
                except Exception as raised:  # of an assertion, say: other ways remain
                    error = raised
                    partial = partial or not _is_refusal(raised)
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
    if not inexact and asks_results(type(module)):
        inexact = "its forward asks whether a call returns None"
    return _made(module, list(graphs.values()), inexact, partial)


def _made(module: nn.Module, graphs: list[fx.Graph], inexact: str, partial: bool = False) -> Trace:
    names = {name for graph in graphs for name in graph.output_node().meta.get(BYPASSED, ())}
    bypassed = {id(module.get_submodule(name)) for name in names}
    return Trace(module, graphs, inexact, partial, bypassed)


def _note(graph: fx.Graph, same: fx.Graph) -> None:
    """Hands what is known of the values of a graph on to one of the same code."""
    for node, twin in zip(graph.nodes, same.nodes):
        twin.meta.update({key: node.meta[key] for key in (KEPT,) if key in node.meta})
    bypassed = graph.output_node().meta.get(BYPASSED)
    if bypassed:
        same.output_node().meta.setdefault(BYPASSED, set()).update(bypassed)


def _is_refusal(error: Exception) -> bool:
    """Whether a forward raises an error by itself, which is no fault of the stand-ins."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_frame.f_globals.get("__name__", "").startswith(_TRACING):
        return False
    code = last.tb_frame.f_code.co_code
    return dis.opname[code[last.tb_lasti]] == "RAISE_VARARGS"


def _is_indifferent(module: nn.Module, optional: dict[str, Any] | None, converted: bool) -> bool:
    """Whether a forward has no optional arguments, or takes one way whatever they are."""
    if not optional:
        return optional is not None
    for mode in _MODES:
        try:
            plain, guessed = _trace_once(module, Choices(()), mode, {}, converted)
        except Exception:
            return False
        if guessed:
            return False
        for number, values in enumerate(trials(optional)):
            try:
                traced, guessed = _trace_once(module, Choices(()), mode, values, converted)
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


def _refers(module: nn.Module) -> bool:
    """Whether an attribute holds a module without registering it: `self.parent = [parent]`."""
    held = (v if type(v) in (list, tuple) else (v,) for v in vars(module).values())
    return any(isinstance(item, nn.Module) for values in held for item in values)


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
        reaches = any(map(self.others, module.modules())) or _refers(module)
        return reaches or self.worth(module)

    def calls(self, module: nn.Module) -> list[tuple[Trace, fx.Graph, fx.Node]]:
        """Every call of a module, on every way through every forward."""
        return self._calls.get(id(module), [])

    def untraced(self, module: nn.Module) -> list[nn.Module]:
        """Modules that may call this one, a child of theirs, and have no trace."""
        owners = self._owners.get(id(module), [])
        return [owner for owner in owners if id(owner) not in self._traced]
