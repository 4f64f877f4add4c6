"""Tests of the order of calls in a rewritten forward.

A fused call works where one of the calls that it replaces stood; the others move there. No call may
move across another one that writes its inputs or reads its outputs, and no two calls that draw
random numbers may change places. Nobody may overwrite later what backward needs only now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from .._graph.effects import Effect, Effects
from ._units import Change, Unit

OVERWRITTEN = "memory that it needs is overwritten in between"
OVERWRITTEN_LATER = "what backward would need is overwritten later"
DRAWN = "random numbers are drawn in between"


def places_of(units: Iterable[Unit]) -> dict[fx.Node, int]:
    """New place of each call that becomes part of another, as a number among its graph's calls."""
    changes = [change for unit in units for change in unit.changes]
    return {node: change.order[change.place] for change in changes for node in change.nodes}


def obstacle_of(
    unit: Unit, effects: Effects, places: Mapping[fx.Node, int]
) -> tuple[str, Any] | None:
    """Reason why the calls of a unit may not become one, and the step to give up (None: all).

    `places`: of all units, see :func:`places_of`."""
    obstacles = (_obstacle(change, effects, places) for change in unit.changes)
    return next(filter(None, obstacles), None)


def _obstacle(
    change: Change, all_effects: Effects, elsewhere: Mapping[fx.Node, int]
) -> tuple[str, Any] | None:
    order, effects = change.order, all_effects.of(change.trace, change.graph)
    first, to = change.nodes[0], order[change.place]
    others = [node for node in order if node not in set(change.nodes)]
    for node in change.nodes:
        for other in others:
            before = order[other] < order[node]
            after = elsewhere.get(other, order[other]) < to
            if before != after and effects[node].disturbs(effects[other]):
                silent = effects[node]._replace(draws=False)
                overwrites = silent.disturbs(effects[other])
                return OVERWRITTEN if overwrites else DRAWN, _step(change, node)
    for node in change.nodes[1:]:
        if _disturbs_within(change, effects, node):
            return OVERWRITTEN, _step(change, node)
    later = [effects[node] for node in others if order[node] > order[first]]
    for value in change.kept:
        needed = Effect(effects[value].value, frozenset(), frozenset())
        if any(needed.disturbs(effect) for effect in later):
            return OVERWRITTEN_LATER, _step(change, first)
    if change.draws_later is not None and any(effect.draws for effect in later):
        return DRAWN, change.draws_later
    return None


def _step(change: Change, node: fx.Node) -> Any:
    """The step that a call is, or what makes it move: the sum waits for its other operand."""
    steps = list(change.steps.values())
    adds = [step for step in steps if step.kind == "add"]
    return change.steps.get(node) or next(iter(adds or steps), None)


def _disturbs_within(change: Change, effects: Mapping[fx.Node, Effect], later: fx.Node) -> bool:
    """Whether the first call writes what a later one reads, by another way than the values that
    they hand on."""
    handed = {("call", node) for node in change.nodes}
    one, two = (
        Effect(effect.reads - handed, effect.writes - handed, frozenset())
        for effect in (effects[change.nodes[0]], effects[later])
    )
    return one.disturbs(two)
