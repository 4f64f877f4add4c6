"""Batch norms that become one op with the steps after them: drop, residual add, activation.

A site starts at the call of a norm and follows the value as long as nobody else reads it, out of
the forward that called the norm where the value is what that forward returns.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx, nn
from torch.nn.utils import parametrize

from .. import nn as fused_nn
from .._graph.flow import Flow, Trace, Value, is_sum
from .._graph.forward import obstacle_of
from .._graph.hooks import is_hooked
from .._graph.modules import STOCHASTIC_DEPTH, package_and_name
from .._graph.tracer import IN_PLACE
from ..nn.parts import ROW_OF, activation_of, is_stochastic_depth
from ._formulas import Match, call_of, matches_of, name_of_call

_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_FUSED: dict[type, type] = {
    base: getattr(fused_nn, base.__name__.replace("Norm", "NormAct")) for base in _TORCH
}
_FUSED[nn.SyncBatchNorm] = fused_nn.SyncBatchNormAct
_FUSED.update({fused: fused for fused in tuple(_FUSED.values())})
_TIMM: dict[str, type] = {
    "timm.layers.norm_act:BatchNormAct2d": fused_nn.BatchNormAct2d,
    "timm.layers.norm_act:SyncBatchNormAct": fused_nn.SyncBatchNormAct,
}
_ORDER = ("drop", "add", "act")


MODULE_OF: dict[str, type] = {
    row.name: cls for cls, row in ROW_OF.items() if cls.__module__ == "fusedtrain.nn.activation"
}


class Step(NamedTuple):
    """One call after a norm that becomes part of it."""

    kind: str  # of _ORDER
    trace: Trace
    nodes: tuple[fx.Node, ...]  # one in each graph
    module: nn.Module | None  # of the model, or made for a function; None for "add"
    is_call: bool = False  # of a module of the model
    place: int = 0  # "add": which operand comes from the norm
    in_place: bool = False
    matches: tuple[Match, ...] = ()  # "act" that is no call of a module: one in each graph

    @property
    def work(self) -> tuple[Any, ...]:
        """Equal for steps that do the same on two ways through a forward."""
        assert self.module is not None
        same = id(self.module) if self.is_call else activation_of(self.module)
        return self.kind, self.is_call, same

    @property
    def calls(self) -> tuple[fx.Node, ...]:
        """All calls that are gone with it."""
        return tuple(n for m in self.matches for n in m.nodes) if self.matches else self.nodes

    @property
    def overwrites(self) -> bool:
        """Whether the sum is written over its other operand."""
        return self.in_place and self.place == 1


@dataclass
class Site:
    """A norm and what it takes over. `levels`: the forwards through which its value goes, from
    that which calls the norm outwards, each with the node whose value it is there."""

    norm: nn.Module
    name: str
    steps: list[Step] = field(default_factory=list)
    levels: list[Value] = field(default_factory=list)
    calls: list[Value] = field(default_factory=list)  # of the norm
    overwrites: bool = False  # the norm its input

    @property
    def last(self) -> int:
        """The level of its last step."""
        traces = [trace for trace, _ in self.levels]
        return max((traces.index(step.trace) for step in self.steps), default=0)

    @property
    def owners(self) -> list[nn.Module]:
        """Modules whose forwards call the norm, or a part that it is the end of."""
        if not (self.steps or self.overwrites):
            return []
        return [trace.module for trace, _ in (*self.calls, *self.levels[1 : self.last + 1])]

    def step(self, kind: str) -> Step | None:
        return next((step for step in self.steps if step.kind == kind), None)

    def truncate(self, step: Step) -> None:
        del self.steps[self.steps.index(step) :]


class _Walk(NamedTuple):
    steps: list[Step]
    returned: bool  # whether the value is what the forward returns
    blocked: str = ""  # by what


def fused_class(module: nn.Module) -> type | None:
    """The class that a norm can be given."""
    cls = type(module)
    return _FUSED.get(cls) or _TIMM.get(f"{cls.__module__}:{cls.__qualname__}")


def has_own_steps(module: nn.Module) -> bool:
    """Whether it has an activation or a drop layer already."""
    parts = (getattr(module, "act", None), getattr(module, "drop", None))
    return any(part is not None and type(part) is not nn.Identity for part in parts)


def obstacle(module: nn.Module) -> str:
    """Why a norm has to stay as it is; '' where it need not."""
    if parametrize.is_parametrized(module):
        return "parametrized"
    if fused_class(module) is None:
        base = next((cls for cls in type(module).__mro__ if cls in _FUSED), None)
        return f"subclass of torch.nn.{base.__name__}" if base else "no fused version"
    if reason := obstacle_of(module):
        return reason
    if is_hooked(module):
        return "it has hooks"
    act = getattr(module, "act", None)
    if act is not None and activation_of(act) is None:
        return f"{type(act).__name__} has no kernel inside of batch norm"
    return ""


class Finder:
    """Finds the sites of a model; `excluded` are ids of modules that nobody touches."""

    def __init__(self, flow: Flow, excluded: set[int]) -> None:
        self.flow, self.excluded = flow, excluded

    def find(self, norm: nn.Module) -> Site | str:
        """The site of a norm, or why there is none; "" where nothing of the kind follows."""
        calls = self.flow.calls(norm)
        site = Site(norm, self.flow.names[id(norm)], calls=calls)
        if not calls:
            for owner in self.flow.untraced(norm):
                if id(owner) in self.flow.failed:
                    where = self.flow.names[id(owner)] or "the model"
                    return f"torch.fx cannot trace {where} ({self.flow.failed[id(owner)]})"
            return ""
        trace, node = calls[0]
        walks = [self._walk(*call, []) for call in calls]
        walk = self._agreed(trace, walks)
        if isinstance(walk, str):
            return walk
        site.levels.append((trace, node))
        while walk.returned and not trace.inexact:
            above = self._above(trace.module)
            if above is None:
                break
            trace, node = above
            site.levels.append((trace, node))
            walk = self._walk(trace, node, walk.steps)
        site.steps = walk.steps
        if not site.steps:
            return walk.blocked
        graphs = {call.graph for _, call in calls}
        if len(graphs) < len(calls) or any(owner is not calls[0][0] for owner, _ in calls):
            return f"called {len(calls)} times"
        return site

    def _above(self, module: nn.Module) -> Value | None:
        """The only call of a module, of which nothing else than its value is known."""
        calls = self.flow.calls(module)
        if len(calls) != 1 or self.flow.places.get(id(module), 0) != 1:
            return None
        if id(module) in self.excluded or is_hooked(module):
            return None
        return calls[0]

    def _agreed(self, trace: Trace, walks: list[_Walk]) -> _Walk | str:
        """The steps that follow on every way through the forward, or why these are not known."""
        if not trace.inexact:
            return walks[0]
        # In a forward with several ways, only steps that all ways share.
        kept = [[s for s in walk.steps if s.kind != "add"] for walk in walks]
        for walk, steps in zip(walks, kept):
            if steps != walk.steps[: len(steps)]:
                return trace.inexact
        if len({tuple(s.work for s in steps) for steps in kept}) > 1:
            return trace.inexact
        merged = [
            s._replace(
                nodes=tuple(steps[i].nodes[0] for steps in kept),
                matches=tuple(match for steps in kept for match in steps[i].matches),
            )
            for i, s in enumerate(kept[0])
        ]
        lost = len(walks[0].steps) > len(kept[0])
        return _Walk(merged, False, trace.inexact if lost else walks[0].blocked)

    def _walk(self, trace: Trace, node: fx.Node, before: list[Step]) -> _Walk:
        value, steps = node, list(before)
        if not (len(node.args) == 1 and not node.kwargs):
            return _Walk(steps, False)
        while True:
            if trace.is_kept(value):
                return _Walk(steps, False, "its output is stored, too")
            users = list(value.users)
            formula = next((m for m in matches_of(value.graph).values() if m.computes(value)), None)
            if formula is not None and formula.widens and len(users) > 1:
                return _Walk(steps, False, f"under autocast {formula.name} is in float32 here")
            if formula is not None and not formula.widens:
                users = [formula.root]
            if len(users) != 1:
                kinds = [self._step(trace, value, user) for user in users]
                shared = any(isinstance(kind, Step) for kind in kinds)
                return _Walk(steps, False, _why_shared(value) if shared else "")
            user = users[0]
            if user.op == "output":
                return _Walk(steps, user.args[0] is value)
            if formula is not None and users == [formula.root]:
                step: Step | str | None = _activation(trace, formula)
            else:
                step = self._step(trace, value, user)
            if step is not None and not trace.are_alike(node, user):
                step = "what follows it is under another no_grad, autocast or checkpoint"
            if isinstance(step, str):
                return _Walk(steps, False, step)
            if step is not None:
                rank = _ORDER.index(step.kind)
                if steps and rank <= _ORDER.index(steps[-1].kind):
                    return _Walk(steps, False)
                steps.append(step)
                if step.kind == "act":
                    return _Walk(steps, False)
            value = user

    def _step(self, trace: Trace, value: fx.Node, user: fx.Node) -> Step | str | None:
        """The use of a value by a call: a step, nothing (None), or something else (why not)."""
        module = trace.callee(user)
        if module is not None:
            if user.args != (value,) or user.kwargs:
                return ""
            return self._module_step(trace, user, module)
        if user.op not in ("call_function", "call_method"):
            return ""
        if is_sum(user):
            return _addition(trace, value, user)
        name = name_of_call(user)
        if not name or user.args[:1] != (value,) or user.all_input_nodes != [value]:
            return ""
        match = call_of(user)
        return _activation(trace, match) if match else _no_kernel(name)

    def _module_step(self, trace: Trace, user: fx.Node, module: nn.Module) -> Step | str | None:
        kind = type(module).__name__
        hooked = is_hooked(module)
        name = self.flow.names[id(module)]
        if type(module) is nn.Identity and not hooked and "forward" not in vars(module):
            return None
        known = is_activation(module)
        if not known and package_and_name(module) not in STOCHASTIC_DEPTH:
            return ""
        if id(module) in self.excluded:
            return f"{name} is excluded"
        if hooked:
            return f"{name} has hooks"
        if "forward" in vars(module):
            return f"the forward of {name} is patched"
        if known and activation_of(module) is not None:
            return Step("act", trace, (user,), module, True)
        if not known and is_stochastic_depth(module):
            return Step("drop", trace, (user,), module, True)
        return f"{kind} has no kernel inside of batch norm"


def _activation(trace: Trace, match: Match) -> Step | str:
    made = module_of(match)
    if made is None:
        return _no_kernel(match.name)
    return Step("act", trace, (match.root,), made, matches=(match,))


def _why_shared(value: fx.Node) -> str:
    for user in value.users:
        name = str(getattr(user.target, "__name__", user.target))
        if user.args[:1] == (value,) and (name.endswith("_") or name in IN_PLACE):
            return f"{name} writes over its output"
    return "its output is used elsewhere, too"


def _no_kernel(name: str) -> str:
    return f"{name} has no kernel inside of batch norm with these arguments"


def is_activation(module: nn.Module) -> bool:
    files = ("torch.nn.modules.activation", "timm.layers.activations", "fusedtrain.nn.activation")
    plain = type(module).__name__ not in ("Softmax", "Softmax2d", "GLU", "MultiheadAttention")
    return plain and any(cls.__module__.startswith(files) for cls in type(module).__mro__)


def _addition(trace: Trace, value: fx.Node, user: fx.Node) -> Step | str:
    if len(user.args) != 2 or not set(user.kwargs) <= {"alpha"} or user.kwargs.get("alpha", 1) != 1:
        return ""
    first, second = user.args
    other = second if first is value else first
    if not isinstance(other, fx.Node) or other is value:
        return ""
    in_place = user.target in (operator.iadd, "add_")
    return Step("add", trace, (user,), None, False, int(first is not value), in_place)


def module_of(match: Match) -> nn.Module | None:
    """The activation module that does the same, if batch norm has a kernel for it."""
    parameters = {name: v for name, v in match.parameters.items() if name != "inplace"}
    if (
        match.widens
        or not parameters.keys() <= inspect.signature(MODULE_OF[match.name]).parameters.keys()
    ):
        return None
    module: nn.Module = MODULE_OF[match.name](**parameters)
    return None if activation_of(module) is None else module
