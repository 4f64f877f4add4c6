"""Gives batch norms what follows them, and takes it out of the forwards around them.

An activation or drop module whose every call has gone into a norm hands on its input, wherever it
is called. A forward is rewritten only for what has no module (a sum, a function), and where some
calls of a module stay.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from .._graph.effects import Effects
from .._graph.flow import Trace
from .._graph.forward import PassesOn, Rewritten, install, remove, restore
from .._graph.records import assign, record_of
from .._graph.report import Left
from .._graph.unseen_calls import numbers_of
from ..nn.parts import activation_of
from ..reference.pointwise import POINTWISE
from ._branches import Branch, add_branch
from ._calls import Call
from ._formulas import Match
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
    passing: dict[int, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._unfit: dict[int, str] = {}
        self.flow = self.effects.flow
        self._arbitrate()
        self._settle()
        while self._reorders() or self._disagrees():
            self._settle()
        # A gate that hands on its input computes nothing.
        handed = [c for c in self.calls if id(c.trace.module) in self.passing]
        self.calls = [c for c in self.calls if c not in handed]
        self.handed = {n for call in handed for n in call.match.nodes}

    def _settle(self) -> None:
        """Leaves what all of this can be done together."""
        while self._truncate():
            pass
        for product in self.products[:]:
            if not (product.match or product.aside or id(product.module) in self.passing):
                self._leave(product, "its gate is called elsewhere, too")
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
        """Modules whose forward computes a product, a sum or an activation otherwise, once each."""
        units: list[Product | Branch | Call] = [*self.products, *self.branches, *self.calls]
        return list(dict.fromkeys(unit.trace.module for unit in units))

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
        taken |= {p.gate for p in self.products if not p.aside}
        steps = [step for site in self.sites for step in site.steps if step.is_call]
        self.passing = {}
        for module in (*(step.module for step in steps), *(p.module for p in self.products)):
            if module is None or self.flow.untraced(module):
                continue
            if all(node in taken for _, node in self.flow.calls(module)):
                self.passing[id(module)] = module
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
        if step.kind != "add":
            passes = step.is_call and id(step.module) in self.passing
            functions = not step.is_call
            return "" if passes else self._unfitness(step.trace, several_ways=functions)
        traces = [trace for trace, _ in site.levels]
        level = traces.index(step.trace)
        reasons = [self._unfitness(trace) for trace in traces[: level + 1]]
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
            if isinstance(trace.module, fx.GraphModule):
                reason = "it is a GraphModule"
            for graph in trace.graphs:
                reason = reason or source_of(trace.module, copied(graph)[0])[2]
            self._unfit[key] = f"{name} cannot be rewritten: {reason}" if reason else ""
        return self._unfit[key]


def apply(plan: Plan) -> list[nn.Module]:
    """Installs all sites of a plan; returns the modules other than norms that have a forward of
    their own now."""
    changed: list[nn.Module] = []
    edits: dict[int, _Edit] = {}

    def edit(trace: Trace) -> _Edit:
        return edits.setdefault(id(trace), _Edit(trace))

    for site in plan.sites:
        assign(site.norm, _class_for(site.norm), _attributes(site))
        for step in site.steps:
            if step.kind == "add":
                traces = [trace for trace, _ in site.levels]
                level = traces.index(step.trace)
                keyword = "residual"
                for trace, callee in site.levels[:level]:
                    edit(trace).routed, edit(trace).keyword = callee, keyword
                    keyword = _keyword(trace)
                edit(step.trace).adds.append((site.levels[level][1], step, keyword))
            elif not (step.is_call and id(step.module) in plan.passing):
                edit(step.trace).removed += step.matches or step.nodes[:1]
    for product in plan.products:
        edit(product.trace).products.append(product)
    for branch in plan.branches:
        edit(branch.trace).branches.append(branch)
    for call in plan.calls:
        edit(call.trace).calls.append(call)
    for one in edits.values():
        source, imports, _ = one.rewritten()
        install(Rewritten(one.trace.module, source, imports, frozen=one.frozen()))
        changed.append(one.trace.module)
    for module in plan.passing.values():
        install(PassesOn(module))
        changed.append(module)
    return changed


def undo(plan: Plan) -> None:
    """Takes back what `apply` did, and leaves activations their fused classes."""
    for site in plan.sites:
        if record_of(site.norm) is not None:
            restore(site.norm)
        for trace, _ in site.levels:
            remove(trace.module)
    for product in plan.products:
        remove(product.trace.module)
    for branch in plan.branches:
        remove(branch.trace.module)
    for call in plan.calls:
        remove(call.trace.module)
    for module in plan.passing.values():
        remove(module)


def _class_for(norm: nn.Module) -> type:
    fused = fused_class(norm)
    assert fused is not None
    return fused


def _attributes(site: Site) -> dict[str, Any]:
    """What a norm needs beside its class. In its `__dict__`, modules are no children of it."""
    wanted: dict[str, Any] = {}
    for kind in ("act", "drop"):
        step = site.step(kind)
        if step is not None:
            wanted[kind] = step.module
        elif kind not in site.norm._modules:
            wanted[kind] = nn.Identity()
    add = site.step("add")
    if add is not None:
        wanted["_adds"] = "in place" if add.in_place else "out of place"
    if not site.steps and not has_own_steps(site.norm):
        wanted["_as_torch"] = True
    wanted["overwrite_input"] = site.overwrites or getattr(site.norm, "overwrite_input", False)
    return wanted


@dataclass
class _Edit:
    """All that changes in one forward."""

    trace: Trace
    removed: list[fx.Node | Match] = field(default_factory=list)
    adds: list[tuple[fx.Node, Step, str]] = field(default_factory=list)  # with a keyword
    products: list[Product] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    routed: fx.Node | None = None  # is handed a residual from outside
    keyword: str = ""  # by which it takes that

    def frozen(self) -> dict[str, Any]:
        """The present numbers of the module and of its gates, which stand in the source."""
        numbers = numbers_of(self.trace.module)
        for product in self.products:
            if product.inner is not None:
                numbers[f"{product.gate.target}.__class__"] = type(product.module)
            if product.module is None or product.aside or product.inner is not None:
                continue
            row = POINTWISE[activation_of(product.module).op]  # type: ignore[union-attr]
            for name in (*row.parameters, "approximate"):
                if hasattr(product.module, name):
                    numbers[f"{product.gate.target}.{name}"] = getattr(product.module, name)
        return numbers

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

        def replace(node: fx.Node, value: Any) -> None:
            replace_all([node], value)

        def replace_all(nodes: list[fx.Node], value: Any) -> None:
            """Of calls in their order, the last of which gives the value."""
            nodes[-1].replace_all_uses_with(value)
            replaced[nodes[-1]] = value
            _erase(graph, nodes)

        if self.routed is not None:
            last = [node for node in graph.nodes if node.op == "placeholder"][-1]
            with graph.inserting_after(last):
                residual = graph.placeholder(_keyword(self.trace), default_value=None)
            new[self.routed].kwargs = {self.keyword: residual}
        for one in self.removed:
            if isinstance(one, fx.Node):
                replace(new[one], new[one].args[0])
            elif one.root.graph is original:
                replace_all([new[n] for n in one.nodes], present(new[one.input]))
        for callee, step, keyword in self.adds:
            total, call = new[step.nodes[0]], new[callee]
            branch, other = total.args[step.place], total.args[1 - step.place]
            order = {node: i for i, node in enumerate(graph.nodes)}
            if isinstance(other, fx.Node) and order[other] > order[call]:
                for node in _chain(call, branch):
                    total.prepend(node)
            call.kwargs = {keyword: other}
            replace(total, branch)
        # Operands are read off the calls as they are by now: one may be another sum or product.
        for product in (p for p in self.products if p.node.graph is original):
            node, gate = new[product.node], new[product.gate]
            with graph.inserting_before(node):
                if product.aside:
                    call = product.call_aside(graph, _other(node, gate), gate)
                else:
                    # An activation module hands on its input: its call stays for its hooks.
                    match = product.match
                    opened = gate if match is None else present(new[match.input])
                    call = product.replacement(graph, _other(node, gate), opened)
            replace(node, call)
            if product.match is not None or product.aside:
                _erase(graph, [new[n] for n in product.opened])
        for branch_sum in self.branches:
            node, gone = new[branch_sum.node], [new[n] for n in branch_sum.gone]  # backwards
            scale = None if branch_sum.scale is None else new[branch_sum.scale]
            branch, shortcut = _other(gone[-1], scale), _other(node, gone[0])
            with graph.inserting_before(node):
                if scale is not None and scale.op == "call_module":
                    scale = graph.get_attr(f"{scale.target}.gamma")
                drop = branch_sum.drop
                drop = None if drop is None else graph.get_attr(str(drop.target))
                in_place = node.target in (operator.iadd, "add_")
                arguments = (shortcut, branch, scale, drop, *([True] if in_place else []))
                call = graph.call_function(add_branch, arguments)
            replace(node, call)
            for call in gone:
                graph.erase_node(call)
        for activation in self.calls:
            if activation.node.graph is original:
                nodes = [new[n] for n in activation.match.nodes]
                with graph.inserting_before(nodes[-1]):
                    call = activation.replacement(graph, lambda node: present(new[node]))
                replace_all(nodes, call)
        return graph


def _keyword(trace: Trace) -> str:
    """The name of a rewritten forward's residual argument: none of the other arguments'."""
    taken = {str(node.target) for node in trace.graphs[0].nodes if node.op == "placeholder"}
    name = "residual"
    while name in taken:
        name = f"outer_{name}"
    return name


def _other(call: fx.Node, than: fx.Node | None) -> Any:
    """The operand of a call that is not this one."""
    return next(operand for operand in call.args if operand is not than)


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    for node in reversed(nodes):
        graph.erase_node(node)


def _chain(first: fx.Node, last: Any) -> list[fx.Node]:
    """The calls from that of a norm to that of which the value is added."""
    nodes = [first]
    while nodes[-1] is not last:
        nodes.append(next(iter(nodes[-1].users)))
    return nodes
