"""A batch norm and the steps after it, as one unit: one call for each forward through which the
value goes, from the one that calls the norm outwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx, nn

from .. import nn as fused_nn
from .._graph.flow import Trace, Value
from .._graph.forward import assign
from .._graph.report import title
from ..nn.norm import OURS
from ..nn.parts import activation_of
from ..reference.pointwise import POINTWISE
from ._formulas import Match
from ._fused_calls import EPILOGUE, Epilogue, norm_act_of, timms_norm, with_epilogue
from ._report import FusedNorm
from ._units import Change, Copy, Unit

_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FUSED: dict[type, type] = {
    base: getattr(fused_nn, base.__name__.replace("Norm", "NormAct")) for base in _TORCH
}
FUSED[nn.SyncBatchNorm] = fused_nn.SyncBatchNormAct
FUSED.update({fused: fused for fused in tuple(FUSED.values())})
_TIMM = {
    f"{home}{name}": name
    for name in ("BatchNormAct2d", "SyncBatchNormAct")
    for home in ("timm.layers.norm_act:", "fusedtrain.conversion:Timm")
}


def fused_class(module: nn.Module) -> type | None:
    """The class that a norm can be given."""
    cls = type(module)
    name = _TIMM.get(f"{cls.__module__}:{cls.__qualname__}")
    return FUSED.get(cls) if name is None else timms_norm(name)


def has_own_steps(module: nn.Module) -> bool:
    """Whether a norm has an activation or a drop layer already."""
    parts = (getattr(module, "act", None), getattr(module, "drop", None))
    return any(part is not None and type(part) is not nn.Identity for part in parts)


class EpilogueStep(NamedTuple):
    """One call after a norm that becomes part of it."""

    kind: str  # "drop", "add", "act"
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

    def of_graph(self, graph: fx.Graph) -> fx.Node:
        return next(node for node in self.nodes if node.graph is graph)


@dataclass(eq=False, kw_only=True)
class Site(Unit):
    """`levels`: the forwards through which the value goes, from that which calls the norm outwards,
    each with the node whose value it is there."""

    lines, left = "norms", "left"

    steps: tuple[EpilogueStep, ...] = ()
    levels: list[Value] = field(default_factory=list)
    calls: list[Value] = field(default_factory=list)  # of the norm
    overwrites: bool = False  # the norm its input
    alone: bool = False  # of use without any step
    # The first step that it cannot take over, and why.
    barred: tuple[EpilogueStep, str] | None = None

    def level_of(self, step: EpilogueStep) -> int:
        return [trace for trace, _ in self.levels].index(step.trace)

    @property
    def last(self) -> int:
        """The level of its last step."""
        return max(map(self.level_of, self.steps), default=0)

    @property
    def parts(self) -> list[nn.Module]:
        return [step.module for step in self.steps if step.module is not None]

    @property
    def place(self) -> nn.Module:
        if not (self.steps or self.overwrites):
            return self.module
        return (self.levels or self.calls)[self.last][0].module

    @property
    def changes(self) -> list[Change]:
        if not (self.steps or self.overwrites):
            return []
        calls = [(0, *call) for call in self.calls]
        outer = enumerate(self.levels[1 : self.last + 1], 1)
        calls += [(level, *call) for level, call in outer]
        return [self._change(*call) for call in calls]

    def _change(self, level: int, trace: Trace, call: fx.Node) -> Change:
        steps = [step for step in self.steps if step.trace is trace]
        members = {n: step for step in steps for n in step.calls if n.graph is call.graph}
        later = [step for step in self.steps if self.levels and self.level_of(step) > level]
        nodes = _chain(call, members)
        change = Change(trace, nodes, call, steps=members)
        change.crosses = any(step.kind in ("drop", "add") for step in self.steps)
        change.draws_later = next((step for step in later if step.kind == "drop"), None)
        change.inner = call if level else None
        change.overwrites = self.overwrites and not level
        if level < self.last:
            change.ending = list(_to_the_end(nodes[-1]))
        for node, step in members.items():
            residual = node.args[1 - step.place] if step.kind == "add" else None
            if isinstance(residual, fx.Node):
                change.kept = (residual,)
                if change.order[residual] > change.order[call]:
                    change.place = node
        return change

    @property
    def idle(self) -> str | None:
        return None if self.steps or self.overwrites or self.alone else self.reason

    def give_up(self, step: EpilogueStep | None) -> bool:
        self.steps = self.steps[: self.steps.index(step) if step in self.steps else 0]
        return True

    def leave_out(self, undone: Mapping[int, str]) -> None:
        step = next((step for step in self.steps if id(step.module) in undone), None)
        if step is not None:
            self.give_up(step)

    def written(self, change: Change, copy: Copy) -> fx.Node:
        """One call in the place of that of the norm, or of the part that ends with it, and of the
        steps in this forward."""
        graph, call = copy.graph, change.nodes[0]
        parameters: dict[str, Any] = {}
        for step in (step for step in self.steps if step.trace is change.trace):
            node = step.of_graph(call.graph)
            if step.kind == "add":
                parameters["residual"] = copy.of(node.args[1 - step.place])
                if step.in_place:
                    parameters["in_place"] = True
                elif step.place == 1:
                    parameters["residual_first"] = True
            elif step.is_call:
                parameters[step.kind] = graph.get_attr(str(node.target))
            else:
                parameters[step.kind] = named(step.module)
        target = graph.get_attr(str(call.target))
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), copy.of)
        epilogue: Any = None
        if change.ending is not None:
            last = [node for node in graph.nodes if node.op == "placeholder"][-1]
            with graph.inserting_after(last):
                epilogue = graph.placeholder(EPILOGUE, default_value=None)
        if change.inner is None:
            if epilogue is not None:
                parameters["epilogue"] = epilogue
            if self.overwrites:
                parameters["overwrite_input"] = True
            return graph.call_function(norm_act_of, (target, *args), parameters)
        if epilogue is None:
            epilogue = graph.call_function(Epilogue, (), parameters)
        return graph.call_function(with_epilogue, (target, epilogue, *args), kwargs)

    @property
    def becomes_ours(self) -> bool:
        """Whether the norm gets a class of this package, with the numbers of its own: timm's, and
        those whose output is recomputed."""
        return type(self.module) not in OURS or not (self.steps or self.overwrites)

    def assign(self) -> None:
        """Sets class and attributes of the norm. Modules in its `__dict__` are no children."""
        if not self.becomes_ours:
            return
        kinds = (kind for kind in ("act", "drop") if kind not in self.module._modules)
        wanted: dict[str, Any] = {kind: nn.Identity() for kind in kinds}
        if not (has_own_steps(self.module) or self.steps or self.overwrites):
            wanted["_as_torch"] = True
        fused = fused_class(self.module)
        assert fused is not None
        assign(self.module, fused, wanted)

    def line(self, source: str) -> FusedNorm:
        parts = ["add" if s.module is None else type(s.module).__name__ for s in self.steps]
        fused = fused_class(self.module)
        assert fused is not None
        fused = next(cls for cls in fused.__mro__ if cls.__module__.startswith("fusedtrain.nn."))
        target = title(fused) if self.becomes_ours else "fusedtrain.functional.batch_norm_act"
        return FusedNorm(self.name, source, target, tuple(parts))


def _chain(first: fx.Node, members: dict[fx.Node, EpilogueStep]) -> list[fx.Node]:
    """From the call of a norm to the last of the calls that become part of it."""
    nodes, left = [first], set(members)
    while left:
        following = next(iter(nodes[-1].users))
        step = members.get(following)
        whole = step is not None and len(step.calls) > len(step.nodes)  # a formula, in any order
        nodes += [n for n in members if members[n] is step] if whole else [following]
        left.difference_update(nodes)
    return nodes


def _to_the_end(node: fx.Node) -> Iterator[fx.Node]:
    """The calls through which a value goes until its forward returns it."""
    while (node := next(iter(node.users))).op != "output":
        yield node


def named(module: nn.Module | None) -> tuple[Any, ...]:
    """Name and parameters of an activation that a function computes."""
    activation = None if module is None else activation_of(module)
    assert activation is not None
    row = POINTWISE[activation.op]
    return (row.name, *(activation.a, activation.b)[: len(row.parameters)])
