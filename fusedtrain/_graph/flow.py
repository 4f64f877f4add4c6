"""Data flow between the modules of a model: each module's own forward, traced with torch.fx.

Every child counts as a leaf, so `if self.downsample is not None` is Python that just runs. Where
Python asks for what only a tensor could tell (`if x.dim() == 4`, `isinstance(x, list)`), all ways
through the forward are traced. The forward runs on stand-ins: the model's own state stays.
"""

from __future__ import annotations

import dis
import operator
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from .forward import has_foreign_forward
from .intercept import Reads, intercepting
from .modules import is_container, is_scripted
from .optional import (
    Usual,
    asks_results,
    computes_with_none,
    looks_at,
    optional_of,
    required_of,
    trials,
    usual_of,
    without_checks,
)
from .report import shown
from .tracer import (
    CONTEXT,
    KEPT,
    Choices,
    Tracer,
)
from .way import Mode as Mode, trace_once

_MOST_WAYS = 16
_ASKED = "what its forward does depends on its input"
_TRACING = ("torch.fx", "fusedtrain")
_PRODUCTS = (operator.mul, torch.mul, "mul")
_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
ALL_MODES: tuple[Mode, ...] = (
    (True, True, True), (False, False, False), (True, False, False), (False, True, True),
)  # fmt: skip
AS_IT_IS: tuple[Mode, ...] = ((None, None, None),)


@dataclass
class Trace:
    """The graphs of one module's forward: one for each way through it.

    `inexact` says why a graph cannot take the place of the forward, "" where it can. If that is
    its mode of training alone (`by_training`), the first graph is that of training, the second that
    of evaluation. If that is the truth of values alone, `ways` has the graph of each row of
    answers, in the order in which the forward asks. If it is optional arguments, `usual` has the
    calls whose graphs these are.
    """

    module: nn.Module
    graphs: list[fx.Graph] = field(default_factory=list)
    inexact: str = ""
    by_training: bool = False
    ways: dict[tuple[bool, ...], fx.Graph] = field(default_factory=dict)
    usual: Usual | None = None
    partial: bool = False  # ways are missing
    lists: bool = False  # it goes through lists, which have two items here
    bypassed: set[int] = field(default_factory=set)  # ids of modules called by their `forward`
    reads: Reads = field(default_factory=Reads)  # what it looked at, on every way
    _sources: dict[str, fx.Graph] = field(default_factory=dict)

    def add(self, graph: fx.Graph, tracer: Tracer) -> fx.Graph:
        """One way more, and what the tracer noticed on it. Returns the first graph of that way."""
        same = self._sources.setdefault(graph.python_code("self").src, graph)
        if same is graph:
            self.graphs.append(graph)
        for node, twin in zip(graph.nodes, same.nodes):
            twin.meta.update({key: node.meta[key] for key in (KEPT,) if key in node.meta})
        asked = _ASKED if tracer.choices.made else ""
        self.inexact = self.inexact or tracer.guessed or asked
        self.lists = self.lists or tracer.lists
        self.reads.update(tracer.seen.reads)
        self.bypassed |= {id(self.module.get_submodule(name)) for name in tracer.bypassed}
        return same

    @property
    def is_known(self) -> bool:
        """Whether the forward does what its graphs do, and nothing else."""
        return not self.inexact or self.by_training or bool(self.ways) or self.usual is not None

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


Value = tuple[Trace, fx.Node]  # in a graph of the trace


def trace(
    module: nn.Module, modes: tuple[Mode, ...] = ALL_MODES, usual: bool = False
) -> Trace | str:
    """All graphs of the forward of a module's class in these modes, or why there is none. `usual`:
    those of usual calls, where a forward looks at its optional arguments."""
    if is_scripted(module):
        return "it is scripted"
    forward = type(module).forward
    if has_foreign_forward(module):
        return "its forward is patched"
    if not isinstance(forward, types.FunctionType):
        return "its forward is no function"
    try:
        with intercepting():
            if forward is nn.Sequential.forward:
                result = Trace(module)
                result.add(*trace_once(module, Choices(), modes[0], {}))
                return result
            nullable = _nullable(module, modes[0])
            plain = _Plain(module, optional_of(forward, nullable), modes)
            usually = _trace_usual(module, modes, nullable, plain) if usual else None
            return usually or _trace_all(module, modes, plain)
    except Exception as error:  # whatever a forward makes of what is no tensor
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass
class _Modes:
    """Modes in which a forward has to be traced: all if it has asked for the training flag, and
    otherwise one with gradients and one without."""

    modes: tuple[Mode, ...]
    asked: bool = False

    def __iter__(self) -> Iterator[Mode]:
        seen = set()
        for mode in self.modes:
            if self.asked or mode[2] not in seen:
                seen.add(mode[2])
                yield mode


def _trace_all(module: nn.Module, modes: tuple[Mode, ...], plain: _Plain) -> Trace:
    result, error, optional = Trace(module), None, plain.optional
    result.reads.update(plain.reads)
    if plain.indifferent:
        optional = {}
    else:
        result.inexact = "its forward has optional arguments"
    by_mode: dict[bool | None, list[fx.Graph]] = {}
    ways: list[dict[tuple[bool, ...], fx.Graph]] = []  # of each mode
    known = not result.inexact  # whether all ways are known, and depend on nothing but decisions
    chosen = _Modes(modes)  # other modes have the same graphs
    for mode in chosen:
        for defaults in [{}, optional] if optional else [{}]:
            pending: list[tuple[bool, ...]] = [()]
            ways.append({})
            count = 0
            while pending:
                count += 1
                if count > _MOST_WAYS:
                    raise RuntimeError("its forward has too many branches")
                choices = Choices(pending.pop())
                try:
                    again = plain.ways.pop(mode, None) if not (choices.forced or defaults) else None
                    traced, tracer = again or trace_once(module, choices, mode, defaults)
                    choices = tracer.choices
                    graph = result.add(traced, tracer)
                    by_mode.setdefault(mode[0], []).append(graph)
                    ways[-1][tuple(choices.made)] = graph
                    known = known and not tracer.guessed
                    chosen.asked |= tracer.asks_mode
                except Exception as raised:  # of an assertion, say: other ways remain
                    error, known, chosen.asked = raised, False, True
                    result.partial = result.partial or not _is_refusal(raised)
                    if not choices.made and not optional:
                        raise
                    result.inexact = result.inexact or _ASKED
                pending += [
                    (*choices.made[:i], not choices.made[i])
                    for i in range(len(choices.forced), len(choices.made))
                ]
        chosen.asked |= any(w != ways[0] for w in ways)
    if not result.graphs and error is not None:
        raise error
    code = getattr(type(module).forward, "__code__", None)
    prints = code is not None and "print" in code.co_names
    if prints:
        result.inexact = result.inexact or "its forward prints"
    asks = asks_results(type(module))
    if known and not (prints or asks) and len(ways[0]) > 1 and all(w == ways[0] for w in ways):
        result.ways = ways[0]
    if len(result.graphs) > 1 and not result.inexact:
        result.inexact = "its forward depends on the mode of training"
        each = [len(set(map(id, by_mode.get(training, ())))) for training in (True, False)]
        result.by_training = each == [1, 1] and not asks
        if result.by_training:
            result.graphs = [by_mode[True][0], by_mode[False][0]]
    if not result.inexact and asks:
        result.inexact = "its forward asks whether a call returns None"
    return result


def _may_be_none(trace: Trace, node: fx.Node) -> bool:
    """Whether a value may be None, which its stand-in is not; those of torch's layers are not."""
    callee = trace.callee(node)
    if callee is not None:
        tuples = isinstance(callee, (nn.MultiheadAttention, nn.RNNBase))
        return tuples or not type(callee).__module__.startswith("torch.nn.modules.")
    of_list = node.target is operator.getitem and not isinstance(node.args[1], tuple)
    return of_list or node.target is getattr


def _nullable(module: nn.Module, mode: Mode) -> frozenset[str]:
    """Required arguments with which a forward does something else if they are None: a method or
    function that it calls may ask."""
    names, defaults = required_of(type(module).forward)
    if not names:
        return frozenset()
    try:
        graph, tracer = trace_once(module, Choices(), mode, defaults, extras=False)
    except Exception:
        return frozenset()
    if tracer.choices.made:  # it asks for values, and takes None for one of them
        return frozenset()
    nullable = set()
    for name in names:
        values = defaults | {name: None}
        try:
            traced, _ = trace_once(module, Choices(), mode, values, extras=False)
        except Exception:
            continue  # the forward takes no None
        if looks_at(graph, values, traced) and not computes_with_none(traced):
            nullable.add(name)
    return frozenset(nullable)


def _trace_usual(
    module: nn.Module, modes: tuple[Mode, ...], nullable: frozenset[str], plain: _Plain
) -> Trace | None:
    """The graphs of a forward for usual calls; None where they are those of all calls, or where
    they depend on more than the mode of training."""
    usual = usual_of(type(module).forward, nullable)
    if usual is None or plain.indifferent:
        return None
    result, by_mode = Trace(module), dict[bool | None, set[int]]()
    chosen, graphs = _Modes(modes), dict[bool | None, fx.Graph]()
    for mode in chosen:
        try:
            graph, tracer = trace_once(module, Choices(), mode, usual.defaults, extras=False)
        except Exception:
            return None
        if tracer.guessed or tracer.choices.made:
            return None
        without_checks(graph)
        graphs[mode[0]] = result.add(graph, tracer)
        by_mode.setdefault(mode[0], set()).add(id(graphs[mode[0]]))
        chosen.asked |= tracer.asks_mode
    code = getattr(type(module).forward, "__code__", None)
    prints = code is None or "print" in code.co_names
    if prints or any(len(ids) > 1 for ids in by_mode.values()):
        return None
    nodes = (node for graph in result.graphs for node in graph.nodes)
    if asks_results(type(module)) and any(_may_be_none(result, node) for node in nodes):
        return None
    if len(result.graphs) > 1:
        if set(graphs) != {True, False}:
            return None
        result.by_training, result.graphs = True, [graphs[True], graphs[False]]
    result.reads.update(plain.reads)
    result.inexact, result.usual = "its forward has optional arguments", usual
    return result


def _is_refusal(error: Exception) -> bool:
    """Whether a forward raises an error by itself, which is no fault of the stand-ins."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_frame.f_globals.get("__name__", "").startswith(_TRACING):
        return False
    code = last.tb_frame.f_code.co_code
    return dis.opname[code[last.tb_lasti]] == "RAISE_VARARGS"


class _Plain:
    """The calls of a forward without optional arguments. `indifferent`: it takes one way whatever
    these are. `ways`: the first of each mode, as far as they were needed; `reads`: what the forward
    looked at to find out."""

    def __init__(
        self, module: nn.Module, optional: dict[str, Any] | None, modes: tuple[Mode, ...]
    ) -> None:
        self.optional, self.reads = optional, Reads()
        self.ways: dict[Mode, tuple[fx.Graph, Tracer]] = {}
        self.indifferent = self._is_indifferent(module, modes) if optional else optional is not None

    def _is_indifferent(self, module: nn.Module, modes: tuple[Mode, ...]) -> bool:
        assert self.optional is not None
        chosen = _Modes(modes)
        for mode in chosen:
            try:
                graph, tracer = self.ways[mode] = trace_once(module, Choices(), mode, {})
            except Exception:
                return False
            chosen.asked |= tracer.asks_mode
            if tracer.guessed or tracer.choices.made:
                return False
            for number, values in enumerate(trials(self.optional)):
                try:
                    traced, tracer = trace_once(module, Choices(), mode, values)
                    self.reads.update(tracer.seen.reads)
                except Exception:
                    chosen.asked = True
                    if number == 0:
                        return False
                    continue  # the forward would not take that either
                chosen.asked |= tracer.asks_mode
                if tracer.guessed or tracer.choices.made or looks_at(graph, values, traced):
                    return False
        return True


def input_of(node: fx.Node) -> object:
    """The first argument of a call of a module or function."""
    if node.args:
        return node.args[0]
    return node.kwargs.get("input", node.kwargs.get("x"))


def is_sum(node: fx.Node) -> bool:
    """Whether a call adds two operands; a module may be called "add", too."""
    return node.op in ("call_function", "call_method") and node.target in _SUMS


def is_product(node: fx.Node) -> bool:
    """Whether a call multiplies two operands; a module may be called "mul", too."""
    multiplies = node.op in ("call_function", "call_method") and node.target in _PRODUCTS
    return multiplies and len(node.args) == 2 and not node.kwargs


def _near(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that a forward calls as a rule: its children, and those of containers among them."""
    for child in module._modules.values():
        if child is not None:
            yield child
            if is_container(child):
                yield from _near(child)


@dataclass
class Flow:
    """The traces of those forwards of a model that `may_call` names.

    `whole`: a forward with
    ways that are not known counts as one that cannot be traced.
    """

    model: nn.Module
    may_call: Callable[[nn.Module], bool]
    modes: tuple[Mode, ...] = ALL_MODES
    whole: bool = False
    failed: dict[int, str] = field(default_factory=dict)  # id of a module: why it has no trace
    names: dict[int, str] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)  # how often a module is registered

    @intercepting()
    def __post_init__(self) -> None:
        self._calls: dict[int, list[Value]] = {}
        self._owners: dict[int, list[nn.Module]] = {}
        self._traces: dict[int, Trace] = {}
        for name, module in self.model.named_modules():
            self.names[id(module)] = name
            for child in module._modules.values():
                if child is not None:
                    self.places[id(child)] = self.places.get(id(child), 0) + 1
            if is_container(module):
                continue
            for part in _near(module):
                self._owners.setdefault(id(part), []).append(module)
            if not is_scripted(module) and self.may_call(module):
                self._add(module)

    def _add(self, module: nn.Module) -> None:
        result = trace(module, self.modes, usual=not self.whole)
        if isinstance(result, Trace) and self.whole and (result.partial or result.lists):
            result = result.inexact
        if isinstance(result, str):
            self.failed[id(module)] = result
            return
        self._traces[id(module)] = result
        for graph in result.graphs:
            for node in graph.nodes:
                callee = result.callee(node)
                if callee is not None:
                    self._calls.setdefault(id(callee), []).append((result, node))

    @property
    def traces(self) -> list[Trace]:
        return list(self._traces.values())

    def name(self, module: nn.Module) -> str:
        return shown(self.names[id(module)])

    def trace_of(self, module: nn.Module) -> Trace | None:
        return self._traces.get(id(module))

    def calls(self, module: nn.Module) -> list[Value]:
        """Every call of a module, on every way through every forward."""
        return self._calls.get(id(module), [])

    def untraced(self, module: nn.Module) -> list[nn.Module]:
        """Modules that may call this one, a child of theirs, and have no trace."""
        traces = ((owner, self.trace_of(owner)) for owner in self._owners.get(id(module), []))
        return [owner for owner, trace in traces if trace is None or trace.usual]
