"""The changes in one forward: its graphs with fused calls, their source, and the guards of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from .._graph.flow import Trace
from .._graph.guards import Guards, looked_at, parts_of
from .._graph.names import outside
from ..nn.parts import activation_of
from ..reference.pointwise import POINTWISE
from ._branches import Branch, add_branch
from ._calls import Call
from ._fused_calls import THEN, Then, handed, norm_then
from ._gates import Product
from ._norms import Site, Step
from ._reordering import chain_of
from ._source import Source, copied, joined, number_names, source_of, woven


@dataclass
class Edit:
    """All that changes in one forward."""

    trace: Trace
    sites: list[tuple[Site, int]] = field(default_factory=list)  # with the level that this is
    products: list[Product] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def guards(self) -> Guards:
        """All that the source takes for granted."""
        trace = self.trace
        passed = [trace.callee(node) for node in self._passed()]
        passed += [
            part for site, level in self.sites if level == 0 for part in site.norm.children()
        ]
        still = [trace.callee(node) for node in self._crossed()]
        return Guards(
            looked_at(trace.reads),
            outside(trace.reads, trace.module),
            {id(m): m for m in passed if m is not None}.values(),
            parts_of({id(m): m for m in still if m is not None}.values()),
        )

    def _passed(self) -> list[fx.Node]:
        """Calls that are no more."""
        nodes = [n for p in self.products for n in (*p.opened, p.node)]
        nodes += [n for b in self.branches for n in b.gone]
        for site, level in self.sites:
            for graph in self.trace.graphs:
                for call in _calls_of(site, level, self.trace, graph):
                    chain = _chain(call, site, self.trace)
                    nodes += chain if level == 0 else chain[1:]
                    if level < site.last:  # Identity, which would be handed the sum
                        nodes += _to_the_end(chain[-1])
        return nodes

    def _crossed(self) -> list[fx.Node]:
        """Calls across which the call of a whole part moves, an operand is read or random numbers
        are drawn."""
        crossed: list[fx.Node] = []
        groups = [((*reversed(b.gone), b.node), True) for b in self.branches]
        groups += [((*p.opened, p.node), True) for p in self.products]
        for site, level in self.sites:
            for graph in self.trace.graphs:
                for call in _calls_of(site, level, self.trace, graph):
                    moves = level > 0 and _moves(call, site, self.trace)
                    chain = _chain(call, site, self.trace)
                    matters = any(step.kind in ("drop", "add") for step in site.steps)
                    groups.append((tuple(chain), moves or matters))
                    crossed += [call] if moves else []
        for group, matters in groups:
            order = list(group[0].graph.nodes)
            places = [order.index(node) for node in group]
            between = order[min(places) : max(places)]
            crossed += [n for n in between if n not in group] if matters else []
        return crossed

    def rewritten(self) -> Source:
        module, graphs = self.trace.module, self.trace.graphs
        edited = {graph: self._edited(graph) for graph in graphs}
        if self.trace.ways:
            for graph in edited.values():
                number_names(graph)
        sources = {graph: source_of(module, edited[graph]) for graph in graphs}
        if self.trace.ways:
            return woven({a: (edited[g], sources[g]) for a, g in self.trace.ways.items()})
        return joined(*sources.values()) if self.trace.by_training else sources[graphs[0]]

    def _edited(self, original: fx.Graph) -> fx.Graph:
        graph, new = copied(original)
        replaced: dict[fx.Node, Any] = {}

        def present(node: fx.Node) -> Any:
            while node in replaced:
                node = replaced[node]
            return node

        def replace(nodes: list[fx.Node], value: Any) -> None:
            """Replaces calls in their order by the value of the last one."""
            nodes[-1].replace_all_uses_with(value)
            replaced[nodes[-1]] = value
            _erase(graph, nodes)

        for site, level in self.sites:
            for call in _calls_of(site, level, self.trace, original):
                self._fuse(site, level, call, graph, new, replace)
        # Operands are read off the calls as they are by now: one may be another sum or product.
        for product in (p for p in self.products if p.node.graph is original):
            node, gate = new[product.node], new[product.gate]
            match = product.match
            opened = gate.args[0] if match is None else present(new[match.input])
            with graph.inserting_before(node):
                call = product.replacement(graph, _other(node, gate), opened)
            replace([node], call)
            _erase(graph, [new[n] for n in product.opened])
        for branch_sum in self.branches:
            node, gone = new[branch_sum.node], [new[n] for n in branch_sum.gone]  # backwards
            scale = None if branch_sum.scale is None else new[branch_sum.scale]
            branch, shortcut = _other(gone[-1], scale), _other(node, gone[0])
            with graph.inserting_before(node):
                if scale is not None and scale.op == "call_module":
                    scale = graph.get_attr(str(scale.target))
                drop = branch_sum.drop
                drop = None if drop is None else graph.get_attr(str(drop.target))
                in_place = node.target in (operator.iadd, "add_")
                arguments = (shortcut, branch, scale, drop, *([True] if in_place else []))
                call = graph.call_function(add_branch, arguments)
            replace([node], call)
            for call in gone:
                graph.erase_node(call)
        for activation in self.calls:
            if activation.node.graph is original:
                nodes = [new[n] for n in activation.match.nodes]
                with graph.inserting_before(nodes[-1]):
                    call = activation.replacement(graph, lambda node: present(new[node]))
                replace(nodes, call)
        return graph

    def _fuse(
        self,
        site: Site,
        level: int,
        call: fx.Node,
        graph: fx.Graph,
        new: dict[fx.Node, fx.Node],
        replace: Callable[[list[fx.Node], Any], None],
    ) -> None:
        """One call in the place of that of the norm, or of the part that ends with it, and of what
        is done with the value in this forward."""
        chain = [new[node] for node in _chain(call, site, self.trace)]
        steps = [step for step in site.steps if step.trace is self.trace]
        place = chain[0]
        parameters: dict[str, Any] = {}
        for step in steps:
            node = new[_of_graph(step, call.graph)]
            if step.kind == "add":
                parameters["residual"] = node.args[1 - step.place]
                if step.in_place:
                    parameters["in_place"] = True
                place = node if _moves(call, site, self.trace) else place
        with graph.inserting_before(place):
            for step in steps:
                if step.kind == "add":
                    continue
                if step.is_call:
                    parameters[step.kind] = graph.get_attr(str(_of_graph(step, call.graph).target))
                else:
                    assert step.module is not None
                    parameters[step.kind] = _named(step.module)
            target = graph.get_attr(str(call.target))
            inner = level < site.last
            if inner:
                last = [node for node in graph.nodes if node.op == "placeholder"][-1]
                with graph.inserting_after(last):
                    then: Any = graph.placeholder(THEN, default_value=None)
            if level == 0:
                if inner:
                    parameters["then"] = then
                if site.overwrites:
                    parameters["overwrite_input"] = True
                fused = graph.call_function(norm_then, (target, *chain[0].args), parameters)
            else:
                if not inner:
                    then = graph.call_function(Then, (), parameters)
                arguments = (target, then, *chain[0].args)
                fused = graph.call_function(handed, arguments, dict(chain[0].kwargs))
        replace(chain, fused)


def _calls_of(site: Site, level: int, trace: Trace, graph: fx.Graph) -> list[fx.Node]:
    """The calls in a graph of the norm, or of the part that it is the end of."""
    calls = site.calls if level == 0 else [site.levels[level]]
    return [node for owner, node in calls if owner is trace and node.graph is graph]


def _of_graph(step: Step, graph: fx.Graph) -> fx.Node:
    return next(node for node in step.nodes if node.graph is graph)


def _chain(call: fx.Node, site: Site, trace: Trace) -> list[fx.Node]:
    """The calls of a graph that become one: from the norm's, or the part's, to the last step."""
    members = {
        node: step
        for step in site.steps
        if step.trace is trace
        for node in step.calls
        if node.graph is call.graph
    }
    return chain_of(call, members)


def _to_the_end(node: fx.Node) -> list[fx.Node]:
    """The calls through which a value goes until its forward returns it."""
    nodes = []
    while (node := next(iter(node.users))).op != "output":
        nodes.append(node)
    return nodes


def _moves(call: fx.Node, site: Site, trace: Trace) -> bool:
    """Whether the fused call has to wait for the other operand of the sum."""
    order = {node: i for i, node in enumerate(call.graph.nodes)}
    for step in site.steps:
        if step.kind == "add" and step.trace is trace:
            other = _of_graph(step, call.graph).args[1 - step.place]
            return isinstance(other, fx.Node) and order[other] > order[call]
    return False


def _named(module: nn.Module) -> tuple[Any, ...]:
    """Name and parameters of an activation that a function computes."""
    activation = activation_of(module)
    assert activation is not None
    row = POINTWISE[activation.op]
    return (row.name, *(activation.a, activation.b)[: len(row.parameters)])


def _other(call: fx.Node, than: fx.Node | None) -> Any:
    """The operand of a call that is not this one."""
    return next(operand for operand in call.args if operand is not than)


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    for node in reversed(nodes):
        graph.erase_node(node)
