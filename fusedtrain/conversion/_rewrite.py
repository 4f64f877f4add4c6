"""Fuses the ops after a batch norm into it, and activations into products and sums: in the forwards
that call them, which are rewritten. No other module changes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from .._graph.effects import Effects
from .._graph.flow import Trace
from .._graph.forward import Rewritten, install
from .._graph.guards import Guards, looked_at, parts_of
from .._graph.names import globals_of
from .._graph.records import assign
from .._graph.report import Left
from ..nn.norm import OURS
from ..nn.parts import activation_of
from ..reference.pointwise import POINTWISE
from ._branches import Branch, add_branch
from ._calls import Call
from ._fused_calls import THEN, Then, handed, norm_then
from ._gates import Product
from ._norms import Site, Step, fused_class, has_own_steps
from ._reordering import Unit, obstacle_of, places_of
from ._source import (
    Disagreement,
    Source,
    copied,
    joined,
    number_names,
    source_of,
    woven,
)


@dataclass
class Plan:
    """Sites that can be installed together. `left`: why one lost what it would have taken over."""

    effects: Effects
    sites: list[Site]
    products: list[Product] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)  # id of a norm
    left_calls: dict[fx.Node, str] = field(default_factory=dict)
    left_products: dict[fx.Node, Left] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._unfit: dict[int, str] = {}
        self.flow = self.effects.flow
        self._arbitrate()
        self._settle()
        while self._reorders() or self._disagrees():
            self._settle()
        # A gate that is never called computes nothing.
        opened = {n for product in self.products for n in product.opened}
        handed = [c for c in self.calls if self._is_passed(c.trace.module, opened)]
        self.calls = [c for c in self.calls if c not in handed]
        self.handed = {n for call in handed for n in call.match.nodes}

    def _is_passed(self, module: nn.Module, taken: set[fx.Node]) -> bool:
        """Whether other forwards do all that they called the module for."""
        calls = self.flow.calls(module)
        return bool(calls) and not self.flow.untraced(module) and all(n in taken for _, n in calls)

    def runs(self, module: nn.Module) -> bool:
        """Whether anybody but a caller from outside still calls a module."""
        return not self._is_passed(module, self.gone())

    def _settle(self) -> None:
        """Leaves what all of this can be done together."""
        while self._truncate():
            pass
        taken = {n for site in self.sites for step in site.steps for n in step.calls}
        taken |= {n for p in self.products for n in (p.node, *p.opened)}
        self.branches = [
            b
            for b in self.branches
            if not taken & {b.node, *b.gone} and not self._unfitness(b.trace)
        ]
        taken |= {n for b in self.branches for n in (b.node, *b.gone)}
        calls = []
        for call in self.calls:
            reason = self._unfitness(call.trace, several_ways=True)
            if not taken.isdisjoint(call.match.nodes):
                continue
            if reason:
                self.left_calls[call.node] = reason
            else:
                calls.append(call)
        self.calls = calls

    def gone(self) -> set[fx.Node]:
        """Calls of activations that something else computes."""
        gone = {n for site in self.sites for step in site.steps for n in step.calls}
        gone |= {n for p in self.products for n in p.opened} | self.handed
        return gone | {n for call in self.calls for n in call.match.nodes}

    def owners(self) -> list[nn.Module]:
        """Modules whose forward is rewritten, once each."""
        units: list[Product | Branch | Call] = [*self.products, *self.branches, *self.calls]
        owners = [unit.trace.module for unit in units]
        for site in self.sites:
            owners += site.owners
        return list(dict.fromkeys(owners))

    def _arbitrate(self) -> None:
        """One norm for each sum: one that can, the one called nearest to it, the later one."""
        best: dict[fx.Node, tuple[tuple[int, ...], Site]] = {}
        for site in self.sites:
            step = site.step("add")
            if step is None:
                continue
            traces = [trace for trace, _ in site.levels]
            level = traces.index(step.trace)
            order = list(step.trace.graphs[0].nodes).index(site.levels[level][1])
            unable = bool(self._obstacle(site, step) or obstacle_of(site, self.effects, {}))
            rank = (-int(unable), -level, order)
            rival = best.get(step.nodes[0])
            if rival is None or rank > rival[0]:
                best[step.nodes[0]] = (rank, site)
                site = rival[1] if rival else site
                if rival is None:
                    continue
            lost = site.step("add")
            assert lost is not None
            site.truncate(lost)

    def _cut(self, site: Site, step: Step, reason: str) -> None:
        site.truncate(step)
        self.left[id(site.norm)] = reason

    def _truncate(self) -> bool:
        """Cuts one step off that cannot be done; whether there was one."""
        taken = {
            node
            for site in self.sites
            for step in site.steps
            if step.is_call
            for node in step.nodes
        }
        taken |= {n for site in self.sites for step in site.steps for n in step.calls}
        for product in self.products[:]:
            reason = self._unfitness(product.trace, several_ways=True)
            if reason or not taken.isdisjoint(product.opened):
                self._leave(product, reason or "its gate is part of a batch norm")
        for site in self.sites:
            for step in site.steps:
                reason = self._obstacle(site, step)
                if reason:
                    self._cut(site, step, reason)
                    return True
        return False

    def _reorders(self) -> bool:
        """Takes back one step, product or sum that would move across something. Returns whether
        there was one."""
        units: list[Unit] = [*self.sites, *self.products, *self.branches, *self.calls]
        places = places_of(units, self.effects)
        for unit in units:
            obstacle = obstacle_of(unit, self.effects, places)
            if obstacle is None:
                continue
            reason, step = obstacle
            if isinstance(unit, Site):
                assert step is not None
                self._cut(unit, step, reason)
            if isinstance(unit, Product):
                self._leave(unit, reason)
            self.branches = [b for b in self.branches if b is not unit]
            if isinstance(unit, Call):
                self.left_calls[unit.node] = reason
            self.calls = [call for call in self.calls if call is not unit]
            return True
        return False

    def _leave(self, product: Product, reason: str) -> None:
        self.products = [p for p in self.products if p is not product]
        self.left_products[product.node] = Left(product.name, product.title, reason)

    def _disagrees(self) -> bool:
        """Takes back all of one forward whose ways would no longer begin with the same calls.
        Returns whether there was one."""
        units: list[Product | Call] = [*self.products, *self.calls]
        for trace in {id(unit.trace): unit.trace for unit in units if unit.trace.ways}.values():
            products = [p for p in self.products if p.trace is trace]
            calls = [c for c in self.calls if c.trace is trace]
            try:
                _Edit(trace, products=products, calls=calls).rewritten()
            except Disagreement:
                for product in products:
                    self._leave(product, trace.inexact)
                self.calls = [c for c in self.calls if c.trace is not trace]
                self.left_calls |= dict.fromkeys((c.node for c in calls), trace.inexact)
                return True
        return False

    def _obstacle(self, site: Site, step: Step) -> str:
        traces = [trace for trace, _ in site.levels]
        level = traces.index(step.trace)
        several = step.kind != "add" and level == 0
        reasons = [self._unfitness(trace, several) for trace in traces[: level + 1]]
        inner = [node for trace in traces[:level] for node in trace.graphs[0].nodes]
        if any(node.op == "placeholder" and str(node.target).startswith("*") for node in inner):
            return "a forward on the way to it takes any number of arguments"
        if step.overwrites:
            return "the sum is written over its other operand"
        return next(filter(None, reasons), "")

    def _unfitness(self, trace: Trace, several_ways: bool = False) -> str:
        """Why a forward cannot be rewritten; '' where it can. `several_ways`: it may have several
        ways, for training and for evaluation or by the truth of values."""
        key, name = id(trace.module), self.flow.names[id(trace.module)] or "the model"
        if trace.inexact and not (several_ways and trace.is_known):
            return f"{name} cannot be rewritten: {trace.inexact}"
        if key not in self._unfit:
            reason = ""
            for graph in trace.graphs:
                reason = reason or source_of(trace.module, copied(graph)[0])[2]
            self._unfit[key] = f"{name} cannot be rewritten: {reason}" if reason else ""
        return self._unfit[key]


def apply(plan: Plan) -> list[nn.Module]:
    """Installs all of a plan; returns the modules that have a forward of their own now."""
    edits: dict[int, _Edit] = {}

    def edit(trace: Trace) -> _Edit:
        return edits.setdefault(id(trace), _Edit(trace))

    for site in plan.sites:
        if becomes_ours(site):
            fused = fused_class(site.norm)
            assert fused is not None
            assign(site.norm, fused, _attributes(site))
        if site.steps or site.overwrites:
            for trace in {id(trace): trace for trace, _ in site.calls}.values():
                edit(trace).sites.append((site, 0))
            for level, (trace, _) in enumerate(site.levels[1 : site.last + 1], 1):
                edit(trace).sites.append((site, level))
    for product in plan.products:
        edit(product.trace).products.append(product)
    for branch in plan.branches:
        edit(branch.trace).branches.append(branch)
    for call in plan.calls:
        edit(call.trace).calls.append(call)
    for one in edits.values():
        source, imports, _ = one.rewritten()
        install(Rewritten(one.trace.module, source, imports, one.guards()))
    return [one.trace.module for one in edits.values()]


def becomes_ours(site: Site) -> bool:
    """Whether a norm gets a class of this package, with the numbers of its own: timm's, and those
    whose output is recomputed."""
    return type(site.norm) not in OURS or not (site.steps or site.overwrites)


def _attributes(site: Site) -> dict[str, Any]:
    """What a norm needs beside its class. In its `__dict__`, modules are no children of it."""
    kinds = (kind for kind in ("act", "drop") if kind not in site.norm._modules)
    wanted: dict[str, Any] = {kind: nn.Identity() for kind in kinds}
    if not (has_own_steps(site.norm) or site.steps or site.overwrites):
        wanted["_as_torch"] = True
    return wanted


@dataclass
class _Edit:
    """All that changes in one forward."""

    trace: Trace
    sites: list[tuple[Site, int]] = field(default_factory=list)  # with the level that this is
    products: list[Product] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def guards(self) -> Guards:
        """All that the source takes for granted."""
        trace, owner = self.trace, self.trace.module
        passed = [trace.callee(node) for node in self._passed()]
        passed += [
            part for site, level in self.sites if level == 0 for part in site.norm.children()
        ]
        still = [trace.callee(node) for node in self._crossed()]
        return Guards(
            looked_at(trace.reads),
            globals_of(owner),
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
            """Of calls in their order, the last of which gives the value."""
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
    """The calls of a graph that become one: from the norm, or the part, to the last step."""
    members = {
        node: step
        for step in site.steps
        if step.trace is trace
        for node in step.calls
        if node.graph is call.graph
    }
    nodes, left = [call], set(members)
    while left:
        following = next(iter(nodes[-1].users))
        step = members.get(following)
        whole = step is not None and len(step.calls) > len(step.nodes)  # a formula, in any order
        nodes += [n for n in members if members[n] is step] if whole else [following]
        left.difference_update(nodes)
    return nodes


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
