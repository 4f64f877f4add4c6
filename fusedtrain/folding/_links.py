"""Pairs of a convolution and the batch norm it feeds, found by following the data through the
traces of :mod:`fusedtrain._graph.flow`: out of the forward that made a value into those that called
it, and into the forwards of modules that made or take it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F

from .._graph.flow import AS_IT_IS, Flow, Mode, Trace, Value, input_of, trace
from .._graph.hooks import is_hooked
from ._kinds import conv_kind, is_norm

BATCH_NORM_CALLS = (F.batch_norm, torch.batch_norm)


class Link(NamedTuple):
    """A convolution whose output goes into a norm and nowhere else; or the other way round."""

    conv: nn.Module
    norm: nn.Module | None  # None: a call of F.batch_norm
    norm_first: bool
    flat: bool  # whether what goes in surely has two dimensions, as after torch.flatten(x, 1)
    levels: list[nn.Module]  # modules that the value enters or leaves on its way
    hops: list[tuple[Trace, fx.Node, fx.Node]]  # between each pair of calls the value waits


def flow_of(model: nn.Module, modes: tuple[Mode, ...] = AS_IT_IS) -> Flow:
    """The flow of a model in the mode that it is in, or in another one."""
    return Flow(model, _has_flow, modes=modes, whole=True)


def _has_flow(module: nn.Module) -> bool:
    if is_norm(module) or not module._modules:
        return False
    return any(is_norm(m) or conv_kind(m) is not None for m in module.modules())


@dataclass
class _Walk:
    """The ways of some values to the calls for which `ends` is true."""

    ends: Callable[[Trace, fx.Node], bool]
    reached: list[Value] = field(default_factory=list)
    levels: list[nn.Module] = field(default_factory=list)
    hops: list[tuple[Trace, fx.Node, fx.Node]] = field(default_factory=list)
    seen: set[fx.Node] = field(default_factory=set)


class Links:
    """Links of a model. `through` tells of modules that pass their input on unchanged."""

    def __init__(
        self, flow: Flow, through: Callable[[nn.Module], bool] = lambda m: type(m) is nn.Identity
    ) -> None:
        self.flow, self.through = flow, through
        self._others: dict[int, Trace | str] = {}

    def times(self, module: nn.Module) -> int:
        """Number of calls by all callers, each on the way with the most calls."""
        ways = Counter((id(owner), node.graph) for owner, node in self.flow.calls(module))
        return sum(
            max(n for (o, _), n in ways.items() if o == owner) for owner in {o for o, _ in ways}
        )

    def is_called(self, norm: nn.Module) -> bool:
        """False where all that contains it was traced and nothing calls it (in this mode)."""
        return bool(self.flow.calls(norm)) or bool(self._untraced(norm))

    def _untraced(self, norm: nn.Module) -> list[nn.Module]:
        return [
            m
            for m in self.flow.model.modules()
            if id(m) in self.flow.failed and any(part is norm for part in m.modules())
        ]

    def norms(self) -> Iterator[nn.Module]:
        yield from filter(is_norm, self.flow.model.modules())

    def calls(self) -> Iterator[Value]:
        """The calls of F.batch_norm, on the way through each forward that has the most."""
        for owner in self.flow.traces:
            ways = [
                [
                    node
                    for node in graph.nodes
                    if node.op == "call_function" and node.target in BATCH_NORM_CALLS
                ]
                for graph in owner.graphs
            ]
            yield from ((owner, node) for node in max(ways, key=len))

    def before(self, norm: nn.Module) -> Link | str:
        """The convolution before a norm, or why there is none that only this norm sees."""
        return self._misused(norm) or self._link(self.flow.calls(norm), norm, False)

    def before_call(self, owner: Trace, node: fx.Node) -> Link | str:
        """The convolution before a call of F.batch_norm, likewise."""
        return self._link([(owner, node)], None, False)

    def after(self, norm: nn.Module) -> Link | str:
        """The convolution after a norm, likewise."""
        return self._misused(norm) or self._link(self.flow.calls(norm), norm, True)

    def _link(self, norms: list[Value], norm: nn.Module | None, norm_first: bool) -> Link | str:
        """The convolution to which calls of a norm lead, and which leads back to no others."""
        walk = _Walk(lambda owner, node: conv_kind(owner.callee(node)) is not None)
        if reason := self._follow(walk, norms, down=norm_first):
            return reason
        conv = self._one_of(walk)
        if isinstance(conv, str):
            return conv
        convs, ends = self.flow.calls(conv), {node for _, node in norms}
        back = _Walk(lambda owner, node: node in ends)
        if self._follow(back, convs, down=not norm_first):
            name = self.flow.name(conv)
            others = f"{name} has other inputs, too"
            return others if norm_first else f"the output of {name} is used elsewhere, too"
        first, hops = (norms, walk.hops) if norm_first else (convs, back.hops)
        flat = all(self._is_flat(owner, input_of(node)) for owner, node in first)
        return Link(conv, norm, norm_first, flat, walk.levels + back.levels, hops)

    def _follow(self, walk: _Walk, calls: list[Value], down: bool) -> str:
        """Follows the values of calls, or their inputs; the reason where that fails."""
        reasons = (
            self._down(walk, owner, node) if down else self._up(walk, owner, input_of(node))
            for owner, node in calls
        )
        return next(filter(None, reasons), "")

    def _misused(self, norm: nn.Module) -> str:
        """Reason why the known calls of a norm do not show its use, or ''."""
        if not self.flow.calls(norm):
            untraced = self._untraced(norm)
            if not untraced:
                return "no forward calls it"
            why = self.flow.failed[id(untraced[-1])]
            return f"torch.fx cannot trace {self.flow.name(untraced[-1])} ({why})"
        times = self.times(norm)
        return f"called {times} times" if times > 1 else self._by_name(norm)

    def _one_of(self, walk: _Walk) -> nn.Module | str:
        """The convolution that a walk has led to."""
        convs = {id(conv): conv for owner, node in walk.reached if (conv := owner.callee(node))}
        names = sorted(self.flow.name(conv) for conv in convs.values())
        if len(names) != 1:
            return f"its convolution is now one, now another ({', '.join(names)})"
        conv = next(iter(convs.values()))
        times = self.times(conv)
        if times > 1:
            return f"{names[0]} is called {times} times"
        reason = self._by_name(conv)
        return f"{names[0]}: {reason}" if reason else conv

    def _by_name(self, module: nn.Module) -> str:
        callers = (t.module for t in self.flow.traces if id(module) in t.bypassed)
        return next((f"{self.flow.name(m)} calls its forward by name" for m in callers), "")

    def _inside(self, module: nn.Module) -> Trace | None:
        """The trace of a module that consists of others, in which a value can be followed."""
        known = self.flow.trace_of(module)
        torchs = type(module).__module__.startswith("torch.nn.")
        leaf = is_norm(module) or conv_kind(module) is not None
        leaf = leaf or (torchs and not isinstance(module, nn.Sequential))
        if leaf or is_hooked(module) or not module._modules or id(module) in self.flow.failed:
            return None
        if known is None:
            if id(module) not in self._others:
                self._others[id(module)] = trace(module, self.flow.modes)
            other = self._others[id(module)]
            known = other if isinstance(other, Trace) else None
        return None if known is None or known.partial or known.lists else known

    def _callers(self, owner: Trace) -> list[Value]:
        """The calls of a module, if its value is that of its forward."""
        return [] if is_hooked(owner.module) else self.flow.calls(owner.module)

    def _sources(self, owner: Trace, value: fx.Node) -> list[tuple[Trace, object]]:
        """The same value in the forwards around this one, or in the forward that computes it."""
        if value.op == "placeholder":
            return [(outer, _argument(value, call)) for outer, call in self._callers(owner)]
        module = owner.callee(value)
        inside = None if module is None else self._inside(module)
        if inside is None:
            return []
        return [(inside, graph.output_node().args[0]) for graph in inside.graphs]

    def _up(self, walk: _Walk, owner: Trace, value: object) -> str:
        """Follows a value to the calls that made it; why that fails."""
        if not isinstance(value, fx.Node):
            return "its input is not a tensor of the same forward"
        if value in walk.seen:
            return ""
        walk.seen.add(value)
        module = owner.callee(value)
        if walk.ends(owner, value):
            walk.reached.append((owner, value))
            return ""
        if module is not None and self.through(module) and not is_hooked(module):
            return self._up(walk, owner, input_of(value))
        sources = self._sources(owner, value)
        if not sources:
            if value.op == "placeholder":
                return "its input comes from outside, where torch.fx cannot see"
            kind = _title(value) if module is None else type(module).__name__
            return f"its input is the output of {kind}"
        walk.levels.append(owner.module if module is None else module)
        return next(filter(None, (self._up(walk, *source) for source in sources)), "")

    def _down(self, walk: _Walk, owner: Trace, value: fx.Node) -> str:
        """Follows a value to the calls that alone read it; why that fails."""
        if value in walk.seen:
            return ""
        walk.seen.add(value)
        if owner.is_kept(value):
            return "its output is stored, too"
        if len(value.users) != 1:
            return "its output has several uses" if value.users else "its output is not used"
        user = next(iter(value.users))
        walk.hops.append((owner, value, user))
        if user.op == "output":
            callers = self._callers(owner) if user.args[0] is value else []
            walk.levels.append(owner.module)
            reasons = (self._down(walk, *call) for call in callers)
            return next(filter(None, reasons), "") if callers else "its output leaves"
        module = owner.callee(user)
        if _places_of(value, user) == 1:
            if input_of(user) is value and walk.ends(owner, user):
                walk.reached.append((owner, user))
                return ""
            if module is not None and self.through(module) and not is_hooked(module):
                return self._down(walk, owner, user)
            inside = None if module is None else self._inside(module)
            if module is not None and inside is not None:
                walk.levels.append(module)
                taken = [
                    node
                    for graph in inside.graphs
                    for node in graph.nodes
                    if node.op == "placeholder" and _argument(node, user) is value
                ]
                reasons = (self._down(walk, inside, node) for node in taken)
                return next(filter(None, reasons), "") if taken else "no convolution follows"
        return "no convolution follows"

    def _is_flat(self, owner: Trace, value: object) -> bool:
        """Whether a value surely has two dimensions."""
        if not isinstance(value, fx.Node):
            return False
        module = owner.callee(value)
        if isinstance(module, nn.Flatten):
            return module.start_dim == 1 and module.end_dim == -1
        flattens = value.target is torch.flatten or value.target == "flatten"
        if value.op in ("call_function", "call_method") and flattens:
            return value.args[1:] == (1,) or value.kwargs == {"start_dim": 1}
        keeps = module is not None and (
            isinstance(module, (nn.Linear, nn.Dropout, nn.Identity))
            or type(module).__module__ == "torch.nn.modules.activation"
            or is_norm(module)
        )
        if keeps or value.target in (F.relu, torch.relu, F.dropout):
            return self._is_flat(owner, input_of(value))
        sources = self._sources(owner, value)
        return bool(sources) and all(self._is_flat(*source) for source in sources)


def _argument(placeholder: fx.Node, call: fx.Node) -> object:
    """The value that a call hands over for an argument of a forward."""
    names = [str(n.target) for n in placeholder.graph.nodes if n.op == "placeholder"]
    name = str(placeholder.target)
    place = names.index(name)
    if any(other.startswith("*") for other in names[: place + 1]):
        return None
    return call.args[place] if place < len(call.args) else call.kwargs.get(name)


def _places_of(value: fx.Node, call: fx.Node) -> int:
    """Number of arguments of a call that are a value, or hold it."""
    arguments: list[fx.Node] = []
    fx.node.map_arg((call.args, call.kwargs), arguments.append)
    return arguments.count(value)


def _title(node: fx.Node) -> str:
    target: Any = node.target
    if node.op == "call_function":
        return f"a call of {target.__name__}"
    return f"a call of .{target}()" if node.op == "call_method" else str(target)
