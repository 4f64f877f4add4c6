"""Whether a rewritten forward does in another order what must keep its order.

A fused call works where one of the calls that it replaces stood, the others move there. No call may
move across another one that writes what it reads, reads what it writes, or, as it does, draws
random numbers; nor may anybody write later what backward needs only now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from .._graph.effects import Effect, Effects
from ._branches import Branch
from ._calls import Call
from ._gates import Product
from ._norms import Site, Step

OVERWRITTEN = "memory that it needs is overwritten in between"
OVERWRITTEN_LATER = "what backward would need is overwritten later"
DRAWN = "random numbers are drawn in between"


Unit = Site | Product | Branch | Call


@dataclass
class Move:
    """The change that one fused call makes to one graph."""

    unit: Unit
    graph: fx.Graph
    effects: dict[fx.Node, Effect]
    group: list[fx.Node]  # calls that become one, in their order
    place: fx.Node  # the one of the group where they work
    steps: dict[fx.Node, Step] = field(default_factory=dict)  # of a site, by their calls
    kept: tuple[fx.Node, ...] = ()  # values that the fused call may save for backward
    drop: Step | None = None  # of a forward further out: draws random numbers

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self.graph.nodes)}

    def obstacle(self, elsewhere: Mapping[fx.Node, int]) -> tuple[str, Step | None] | None:
        """The reason against the move, and the step of a site that has to stay.

        `elsewhere`: where calls of other groups work, by their numbers in the graph."""
        order = self.order
        start, to = order[self.group[0]], order[self.place]
        others = [node for node in order if node not in set(self.group)]
        for node in self.group:
            for other in others:
                before = order[other] < order[node]
                after = elsewhere.get(other, order[other]) < to
                if before != after and self.effects[node].disturbs(self.effects[other]):
                    silent = self.effects[node]._replace(draws=False)
                    return OVERWRITTEN if silent.disturbs(
                        self.effects[other]
                    ) else DRAWN, self._step(node)
        for node in self.group[1:]:
            if self._disturbs_within(self.group[0], node):
                return OVERWRITTEN, self._step(node)
        later = [self.effects[node] for node in others if order[node] > start]
        for value in self.kept:
            needed = Effect(self.effects[value].value, frozenset(), frozenset())
            if any(needed.disturbs(effect) for effect in later):
                return OVERWRITTEN_LATER, self._step(self.group[0])
        if self.drop is not None and any(effect.draws for effect in later):
            return DRAWN, self.drop
        return None

    def _step(self, node: fx.Node) -> Step | None:
        """The step that a call is, or what makes it move: the sum waits for its other operand."""
        steps = list(self.steps.values())
        adds = [step for step in steps if step.kind == "add"]
        return self.steps.get(node) or next(iter(adds or steps), None)

    def _disturbs_within(self, first: fx.Node, later: fx.Node) -> bool:
        """Whether the group's first call writes what a later one reads, by another way than the
        values that they hand on."""
        handed = {("call", node) for node in self.group}
        one, two = (
            Effect(effect.reads - handed, effect.writes - handed, frozenset())
            for effect in (self.effects[first], self.effects[later])
        )
        return one.disturbs(two)


def places_of(units: Sequence[Unit], effects: Effects) -> dict[fx.Node, int]:
    """Where calls that become part of another one work, by the numbers of the calls in a graph."""
    moves = [move for unit in units for move in _moves_of(unit, effects)]
    return {node: move.order[move.place] for move in moves for node in move.group}


def obstacle_of(
    unit: Unit, effects: Effects, places: Mapping[fx.Node, int]
) -> tuple[str, Step | None] | None:
    """Why the calls of a unit may not become one, and for a site the step that is too much.

    `places`: of all units, see :func:`places_of`."""
    obstacles = (move.obstacle(places) for move in _moves_of(unit, effects))
    return next(filter(None, obstacles), None)


def _moves_of(unit: Unit, effects: Effects) -> Iterator[Move]:
    """One for each graph in which calls become one."""
    if isinstance(unit, Site):
        yield from _of_site(unit, effects)
        return
    graph = unit.node.graph
    known = effects.of(unit.trace, graph)
    if isinstance(unit, Product):
        yield Move(unit, graph, known, [*unit.opened, unit.node], unit.node, kept=unit.kept)
    elif isinstance(unit, Call):
        yield Move(unit, graph, known, [*unit.match.nodes], unit.node, kept=unit.kept)
    else:
        yield Move(unit, graph, known, [*reversed(unit.gone), unit.node], unit.node)


def _of_site(site: Site, effects: Effects) -> Iterator[Move]:
    pending = list(site.steps)
    for owner, called in site.levels:
        steps = [step for step in pending if step.trace is owner]
        pending = [step for step in pending if step.trace is not owner]
        for graph in owner.graphs:
            calls = [n for n in graph.nodes if owner.callee(n) is owner.callee(called)]
            if len(calls) != 1 or not (steps or pending):
                continue
            members = {n: step for step in steps for n in step.calls if n.graph is graph}
            group = chain_of(calls[0], members)
            move = Move(site, graph, effects.of(owner, graph), group, calls[0], members)
            for node, step in members.items():
                residual = node.args[1 - step.place] if step.kind == "add" else None
                if isinstance(residual, fx.Node):
                    move.kept = (residual,)
                    if move.order[residual] > move.order[calls[0]]:
                        move.place = node
            move.drop = next((step for step in pending if step.kind == "drop"), None)
            yield move


def chain_of(first: fx.Node, members: dict[fx.Node, Step]) -> list[fx.Node]:
    """From the call of a norm to the last of the calls that become part of it."""
    nodes, left = [first], set(members)
    while left:
        following = next(iter(nodes[-1].users))
        step = members.get(following)
        whole = step is not None and len(step.calls) > len(step.nodes)  # a formula, in any order
        nodes += [n for n in members if members[n] is step] if whole else [following]
        left.difference_update(nodes)
    return nodes
