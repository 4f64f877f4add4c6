"""Fuses the ops after a batch norm into it, and activations into products and sums: in the forwards
that call them, which are rewritten. No other module changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from .._graph.effects import Effects
from .._graph.flow import Trace
from .._graph.forward import Rewritten, install
from .._graph.intercept import intercepting
from .._graph.records import assign
from .._graph.report import Unchanged
from ..nn.norm import OURS
from ._branches import Branch
from ._calls import Call
from ._edit import Edit
from ._gates import Product
from ._norms import Site, Step, fused_class, has_own_steps
from ._reordering import Unit, obstacle_of, places_of
from ._source import (
    Disagreement,
    copied,
    source_of,
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
    left_products: dict[fx.Node, Unchanged] = field(default_factory=dict)

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

    @intercepting()
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
        self.left_products[product.node] = Unchanged(product.name, product.title, reason)

    def _disagrees(self) -> bool:
        """Takes back all of one forward whose ways would no longer begin with the same calls.
        Returns whether there was one."""
        units: list[Product | Call] = [*self.products, *self.calls]
        for trace in {id(unit.trace): unit.trace for unit in units if unit.trace.ways}.values():
            products = [p for p in self.products if p.trace is trace]
            calls = [c for c in self.calls if c.trace is trace]
            try:
                Edit(trace, products=products, calls=calls).rewritten()
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
    edits: dict[int, Edit] = {}

    def edit(trace: Trace) -> Edit:
        return edits.setdefault(id(trace), Edit(trace))

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
    """Attributes of a norm beside its class. In its `__dict__`, modules are no children of it."""
    kinds = (kind for kind in ("act", "drop") if kind not in site.norm._modules)
    wanted: dict[str, Any] = {kind: nn.Identity() for kind in kinds}
    if not (has_own_steps(site.norm) or site.steps or site.overwrites):
        wanted["_as_torch"] = True
    return wanted
