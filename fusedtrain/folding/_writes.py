"""In-place writes in a graph: nothing is moved across them."""

from __future__ import annotations

from torch import fx

from .._graph.effects import Effects
from .._graph.flow import Trace


def written_between(effects: Effects, trace: Trace, first: fx.Node, last: fx.Node) -> bool:
    """Whether a call after one node and before another writes to more than a module's buffers."""
    known, graph = effects.of(trace, first.graph), list(first.graph.nodes)
    return any(
        kind != "storage" or node.op != "call_module"
        for node in graph[graph.index(first) + 1 : graph.index(last)]
        for kind, _ in known[node].writes
    )


def can_wait(effects: Effects, trace: Trace, calls: list[fx.Node]) -> bool:
    """Whether all of these calls, which follow upon each other, can work where the last one is:
    what they read is not written in between."""
    known, graph = effects.of(trace, calls[0].graph), list(calls[0].graph.nodes)
    between = graph[graph.index(calls[0]) : graph.index(calls[-1])]
    waiting = [known[call]._replace(writes=frozenset(), draws=False) for call in calls[:-1]]
    return not any(
        effect.disturbs(known[node]._replace(draws=False))
        for effect in waiting
        for node in between
        if node not in calls
    )


def is_own(effects: Effects, trace: Trace, node: fx.Node, writer: fx.Node) -> bool:
    """Whether nobody sees that a call writes to the value of a node, but by the call's value."""
    known, graph = effects.of(trace, node.graph), list(node.graph.nodes)
    memory, derived = known[node].value, {writer}
    if any(kind != "call" for kind, _ in memory):
        return False
    if any(trace.is_kept(other) and known[other].value & memory for other in graph):
        return False
    for later in graph[graph.index(writer) + 1 :]:
        if derived.intersection(later.all_input_nodes):
            derived.add(later)
        others = set(later.all_input_nodes) - derived
        if any(known[other].value & memory for other in others):
            return False
    return True
