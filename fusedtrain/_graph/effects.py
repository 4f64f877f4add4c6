"""Reads and writes of the calls of a forward, and values that share memory: whether two calls may
change places.

A place is a piece of memory as one graph sees it: what a call has allocated, an argument, or the
storage of a tensor that the model registers. Functions and methods are judged by their schemas,
modules by their own graphs. A call of which nothing is known reads and writes all that it is
handed and all that it registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .._torch_private import NormBase, OpOverload, OpOverloadPacket, has_kernel_for
from .flow import Flow, Trace, trace
from .hooks import is_hooked
from .modules import STOCHASTIC_DEPTH, attribute_of, package_and_name
from .tracer import IN_PLACE

Place = tuple[str, Any]  # ("call", node), ("argument", placeholder) or ("storage", number)
Places = frozenset[Place]
_NOWHERE: Places = frozenset()

# Composite operators may return their input whatever the schema says; these never do.
_FRESH = {
    "batch_norm", "celu_", "concat", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "group_norm", "instance_norm", "layer_norm", "linear",
    "matmul", "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_avg_pool2d", "relu6",
    "scaled_dot_product_attention", "selu",
}  # fmt: skip
# Files of torch.nn whose modules make new memory and draw no random numbers, but for `_EXCEPT`.
_FRESH_FILES = {
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "conv", "instancenorm", "linear", "normalization",
                 "pooling")
} | {"fusedtrain.nn.activation", "fusedtrain.nn.depthwise", "fusedtrain.nn.norm",
     "fusedtrain.nn.pool", "fusedtrain.nn.sync_norm", "fusedtrain.folding._conv_act"}  # fmt: skip
_EXCEPT = ("Identity", "MultiheadAttention", "RReLU", "FractionalMaxPool2d", "FractionalMaxPool3d")
_HARMLESS = {"builtins", "math", "operator", "_operator"}  # modules of functions of fresh values


class Effect(NamedTuple):
    """Effect of one call. `value`: the places that its value may lie in. `known`: not supposed."""

    reads: Places
    writes: Places
    value: Places
    draws: bool = False  # random numbers
    known: bool = True

    def disturbs(self, other: Effect) -> bool:
        """Whether the two may not change places."""
        written = _meet(self.writes, other.reads | other.writes)
        return written or _meet(self.reads, other.writes) or (self.draws and other.draws)


def _meet(first: Places, second: Places) -> bool:
    """Whether they may share memory. Two arguments may be one tensor."""
    kinds = {kind for kind, _ in first} & {kind for kind, _ in second}
    return "argument" in kinds or bool(first & second)


class _Call(NamedTuple):
    """Effects of a function on the arguments of one call."""

    writes: tuple[Any, ...]
    shares: tuple[Any, ...]  # those that its value may share memory with
    draws: bool


@dataclass
class _Summary:
    """Effects of a module on its arguments (by number and name) and on registered tensors."""

    reads: Places = _NOWHERE
    writes: Places = _NOWHERE
    value: Places = _NOWHERE
    written: set[int | str] = field(default_factory=set)
    returned: set[int | str] = field(default_factory=set)
    everything: bool = False  # writes and returns any argument
    draws: bool = False


class Effects:
    """Effects of the calls in all graphs of a model, computed on demand. `form_of`: a module as it
    will be when the calls run."""

    def __init__(
        self, flow: Flow, form_of: Callable[[nn.Module], nn.Module] = lambda module: module
    ) -> None:
        self.flow, self.form_of = flow, form_of
        self._graphs: dict[int, dict[fx.Node, Effect]] = {}
        self._summaries: dict[int, _Summary | None] = {}
        self._traces: dict[int, Trace] = {}

    def of(self, owner: Trace, graph: fx.Graph) -> dict[fx.Node, Effect]:
        """The effect of each call in a graph of a forward."""
        if id(graph) not in self._graphs:
            effects: dict[fx.Node, Effect] = {}
            for node in graph.nodes:
                effects[node] = self._effect(owner, node, effects)
            self._graphs[id(graph)] = effects
        return self._graphs[id(graph)]

    def traces_within(self, modules: Iterable[nn.Module]) -> Iterator[Trace]:
        """The traces by which the effects of modules were judged; not of forwards that change what
        they read, as a count of calls."""
        parts = {id(part): None for module in modules for part in module.modules()}
        traces = (self._traces[key] for key in parts if key in self._traces)
        return (trace for trace in traces if trace.is_known)

    def is_overwritten(self, owner: Trace, node: fx.Node, surely: bool = False) -> bool:
        """Whether a call may write over the memory that `node` has allocated, in this forward or in
        those that its value is returned to. `surely`: whether one is known that does."""
        effects, place = self.of(owner, node.graph), ("call", node)
        if any(place in e.writes and (e.known or not surely) for e in effects.values()):
            return True
        if not any(n.op == "output" and place in effects[n].value for n in node.graph.nodes):
            return False
        if self.flow.untraced(owner.module) and not surely:
            return True
        return any(self.is_overwritten(*call, surely) for call in self.flow.calls(owner.module))

    def is_written_between(self, owner: Trace, first: fx.Node, last: fx.Node) -> bool:
        """Whether a call after one node and before another writes to more than a module's
        buffers."""
        effects, calls = self.of(owner, first.graph), list(first.graph.nodes)
        return any(
            kind != "storage" or node.op != "call_module"
            for node in calls[calls.index(first) + 1 : calls.index(last)]
            for kind, _ in effects[node].writes
        )

    def can_wait(self, owner: Trace, chain: list[fx.Node]) -> bool:
        """Whether all calls of a chain can work where the last one does: nothing writes their
        inputs in between."""
        effects, calls = self.of(owner, chain[0].graph), list(chain[0].graph.nodes)
        between = calls[calls.index(chain[0]) : calls.index(chain[-1])]
        waiting = [effects[call]._replace(writes=_NOWHERE, draws=False) for call in chain[:-1]]
        return not any(
            effect.disturbs(effects[node]._replace(draws=False))
            for effect in waiting
            for node in between
            if node not in chain
        )

    def is_private(self, owner: Trace, node: fx.Node, writer: fx.Node) -> bool:
        """Whether a call that writes to the value of a node shows that by its own value alone."""
        effects, calls = self.of(owner, node.graph), list(node.graph.nodes)
        memory, derived = effects[node].value, {writer}
        if any(kind != "call" for kind, _ in memory):
            return False
        if any(owner.is_kept(other) and effects[other].value & memory for other in calls):
            return False
        for later in calls[calls.index(writer) + 1 :]:
            if derived.intersection(later.all_input_nodes):
                derived.add(later)
            others = set(later.all_input_nodes) - derived
            if any(effects[other].value & memory for other in others):
                return False
        return True

    def _effect(self, owner: Trace, node: fx.Node, known: dict[fx.Node, Effect]) -> Effect:
        def places(value: Any) -> Places:
            return frozenset().union(*(known[n].value for n in _nodes(value)))

        inputs = places((node.args, node.kwargs))
        if node.op == "placeholder":
            return Effect(_NOWHERE, _NOWHERE, frozenset({("argument", node)}))
        if node.op == "get_attr":
            return Effect(_NOWHERE, _NOWHERE, _attribute_places(owner.module, str(node.target)))
        if node.op == "output":
            return Effect(inputs, _NOWHERE, inputs)
        fresh: Places = frozenset({("call", node)})
        if node.op == "call_module":
            module = owner.module.get_submodule(str(node.target))
            return self._module_effect(module, node, inputs, places, fresh)
        call = _call_of(node)
        if call is None:
            return Effect(inputs, inputs, inputs | fresh, True, False)
        return Effect(inputs, places(call.writes), places(call.shares) | fresh, call.draws)

    def _module_effect(
        self,
        module: nn.Module,
        node: fx.Node,
        inputs: Places,
        places: Callable[[Any], Places],
        fresh: Places,
    ) -> Effect:
        registered = _registered_places(module)
        summary = self._summary(module)
        if summary is None:
            everything = inputs | registered
            return Effect(everything, everything, everything | fresh, True, False)

        def of(which: set[int | str]) -> Places:
            if summary.everything and which:
                return inputs
            chosen = [node.args[k] for k in which if isinstance(k, int) and k < len(node.args)]
            chosen += [value for name, value in node.kwargs.items() if name in which]
            return places(chosen)

        writes = summary.writes | of(summary.written)
        value = summary.value | of(summary.returned) | fresh
        return Effect(inputs | registered | summary.reads, writes, value, summary.draws)

    def _summary(self, module: nn.Module) -> _Summary | None:
        """Effects of a call of a module; None if nothing is known."""
        if id(module) not in self._summaries:
            self._summaries[id(module)] = None  # of a module that calls itself
            self._summaries[id(module)] = self._summarise(module)
        return self._summaries[id(module)]

    def _summarise(self, module: nn.Module) -> _Summary | None:
        if is_hooked(module):
            return None
        form = self.form_of(module)
        if "forward" not in vars(module) and _is_familiar(form):
            return _familiar(form)
        traced = self.flow.trace_of(module) or trace(module, self.flow.modes)
        if isinstance(traced, str) or traced.usual is not None:
            return None
        self._traces[id(module)] = traced
        return self._summary_of(traced)

    def _summary_of(self, owner: Trace) -> _Summary:
        total = _Summary()
        for graph in owner.graphs:
            effects = self.of(owner, graph)
            names: dict[Place, tuple[int, str]] = {}
            for number, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
                names["argument", node] = (number, str(node.target))
                total.everything |= str(node.target).startswith("*")
            for node, effect in effects.items():
                total.reads |= _stored(effect.reads)
                total.writes |= _stored(effect.writes)
                total.draws |= effect.draws
                total.written.update(*(names[p] for p in effect.writes if p in names))
                if node.op == "output":
                    total.value |= _stored(effect.value)
                    total.returned.update(*(names[p] for p in effect.value if p in names))
        return total


def _nodes(value: Any) -> Iterator[fx.Node]:
    nodes: list[fx.Node] = []
    fx.node.map_arg(value, nodes.append)
    return iter(nodes)


def _stored(places: Places) -> Places:
    return frozenset(place for place in places if place[0] == "storage")


def _storage(tensor: Tensor) -> Place:
    try:
        return "storage", tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):  # lazy, a subclass
        return "storage", id(tensor)


def _registered_places(module: nn.Module) -> Places:
    return frozenset(map(_storage, (*module.parameters(), *module.buffers())))


def _attribute_places(module: nn.Module, path: str) -> Places:
    tensor = attribute_of(module, path)
    return frozenset({_storage(tensor)}) if isinstance(tensor, Tensor) else _NOWHERE


def _is_familiar(module: nn.Module) -> bool:
    """Whether the effects of a module are known from its class."""
    if package_and_name(module) in STOCHASTIC_DEPTH:
        return True
    cls = type(module)
    forward = getattr(cls.forward, "__module__", "")
    return forward in _FRESH_FILES and cls.__name__ not in _EXCEPT


def _familiar(module: nn.Module) -> _Summary:
    first: set[int | str] = {0, "input"}
    if package_and_name(module) in STOCHASTIC_DEPTH:
        return _Summary(returned=first, draws=True)
    buffers = frozenset(map(_storage, module.buffers()))
    summary = _Summary(writes=buffers if isinstance(module, NormBase) else _NOWHERE)
    if getattr(module, "inplace", False) or getattr(module, "overwrite_input", False):
        summary.written = summary.returned = first
    drop = getattr(module, "drop", None)
    summary.draws = drop is not None and type(drop) is not nn.Identity
    return summary


def _call_of(node: fx.Node) -> _Call | None:
    """Known effects of a function or method, for one call of it."""
    target, args, kwargs = node.target, node.args, dict(node.kwargs)
    if node.op == "call_method":
        return _schema_call(_packet(str(target)), str(target), args, kwargs, strict=False)
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return _schema_call(target, "", args, kwargs, strict=True)
    name = getattr(target, "__name__", "")
    module = (getattr(target, "__module__", None) or "").partition(".")[0]
    if module in _HARMLESS and not name.startswith("_"):
        if name in (*IN_PLACE, "setitem", "delitem", "setattr"):
            return _Call(args[:1], args[:1], False)
        shares = args if name in ("getitem", "getattr", "pos", "index") else ()
        return _Call((), shares, False)
    if inspect.isfunction(target) and module in ("torch", "fusedtrain"):
        return _python_call(target, name, args, kwargs)
    if module == "torch" or (not module and isinstance(target, type(torch.relu))):
        return _schema_call(_packet(name), name, args, kwargs, strict=True)
    return None


def _python_call(
    target: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call | None:
    """Functions of torch.nn.functional and fusedtrain.functional: by their flags."""
    try:
        bound = inspect.signature(target).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    if name.endswith("_"):
        return None
    shares = [bound["out"]] if "out" in bound else []
    if any(bound.get(flag, False) is not False for flag in ("inplace", "overwrite_input")):
        shares.append(next(iter(bound.values())))
    written = shares + [value for key, value in bound.items() if key.startswith("running_")]
    if bound.get("max_norm") is not None:
        written.append(bound.get("weight"))
    op = _packet(name)
    if op is None or not _is_fresh(op, name):
        shares = [*bound.values()]
    draws = "training" in bound if op is None else _draws(op)
    return _Call(tuple(written), tuple(shares), draws)


def _packet(name: str) -> Any:
    return getattr(torch.ops.aten, name, None)


def _schema_call(
    op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], strict: bool
) -> _Call | None:
    """Effects by the schemas of all overloads. Not `strict`: a method without one, such as `float`,
    may return its input and writes it only if its name says so."""
    if op is None:
        if strict:
            return None
        return _Call(args[:1] if name.endswith("_") else (), (*args, *kwargs.values()), False)
    written: list[Any] = [kwargs["out"]] if "out" in kwargs else []
    shares: list[Any] = list(written)
    for overload in _overloads(op):
        positional = [a for a in overload._schema.arguments if not a.kwarg_only]
        values = list(zip(positional, args))
        values += [(a, kwargs[a.name]) for a in overload._schema.arguments if a.name in kwargs]
        for argument, value in values:
            alias = argument.alias_info
            if alias is not None:
                shares.append(value)
            if argument.name.startswith("running_") or (alias is not None and alias.is_write):
                written.append(value)
    if not _is_fresh(op, name):
        shares += [*args, *kwargs.values()]
    return _Call(tuple(written), tuple(shares), _draws(op))


def _draws(op: Any) -> bool:
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in _overloads(op))


def _overloads(op: Any) -> Iterable[Any]:
    if isinstance(op, OpOverload):
        return (op,)
    return [getattr(op, overload) for overload in op.overloads()]


@cache
def _is_fresh(op: Any, name: str) -> bool:
    """Whether a value shares memory with nothing but what the schema says. Composite operators,
    `dropout` in eval mode for one, may return their input all the same."""
    if name in _FRESH:
        return True
    known = False
    for overload in _overloads(op):
        try:
            composite = has_kernel_for(overload.name(), "CompositeImplicitAutograd")
        except RuntimeError:  # an overload that only TorchScript has
            continue
        if composite:
            return False
        known = True
    return known
