"""Units that can be installed together, and the forwards that they change: no two units have one
call, and none moves a call across another that it disturbs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from .._graph.effects import Effects
from .._graph.flow import Trace
from .._graph.forward import Rewritten, install
from .._graph.guards import Guards, looked_at, parts_of
from .._graph.intercept import intercepting
from .._graph.names import outside
from ._reordering import obstacle_of, places_of
from ._sites import Site
from ._source import Disagreement, Source, joined, number_names, source_of, woven
from ._units import Change, Copy, Unit


class FusionPlan:
    """The units that get all of their calls. `units` come in the order in which they choose; those
    that stay, or lose a step, get the reason."""

    def __init__(self, effects: Effects, units: Sequence[Unit]) -> None:
        self.effects, self.flow = effects, effects.flow
        self._candidates, self.units = list(units), list(units)
        self._arbitrate()
        self._share()
        while self._reorders() or self._disagrees():
            self._share()
        for unit in self._candidates:
            if unit not in self.units:
                unit.reason = unit.lost
        # A gate that is never called computes nothing.
        gone = self.gone()
        idle = {owner for owner in self.owners() if self.is_passed(owner, gone)}
        self.units = [unit for unit in self.units if idle.isdisjoint(unit.owners)]

    @property
    def sites(self) -> list[Site]:
        return [unit for unit in self.units if isinstance(unit, Site)]

    def owners(self) -> list[nn.Module]:
        """Modules whose forward is rewritten, once each."""
        return list(dict.fromkeys(owner for unit in self.units for owner in unit.owners))

    def gone(self) -> set[fx.Node]:
        """Calls that something else computes."""
        return {n for unit in self.units for change in unit.changes for n in change.gone}

    def is_passed(self, module: nn.Module, gone: set[fx.Node]) -> bool:
        """Whether other forwards do all that they called a module for, once calls are gone."""
        calls = self.flow.calls(module)
        return bool(calls) and not self.flow.untraced(module) and all(n in gone for _, n in calls)

    @intercepting()
    def _arbitrate(self) -> None:
        """One norm for each sum: one that can, the one called nearest to it, the later one. The
        others need no reason."""
        ranked, sites = [], self.sites
        for number, site in enumerate(sites):
            step = next((step for step in site.steps if step.kind == "add"), None)
            if step is not None:
                level = site.level_of(step)
                order = list(step.trace.graphs[0].nodes).index(site.levels[level][1])
                barred = site.barred is not None and site.barred[0] == step
                able = not barred and obstacle_of(site, self.effects, {}) is None
                ranked.append(((able, -level, order, number), site, step))
        taken = set()
        for _, site, step in sorted(ranked, key=lambda row: row[0], reverse=True):
            if step.nodes[0] in taken:
                site.give_up(step)
            taken.add(step.nodes[0])
        for site in sites:
            if site.barred is not None and site.barred[0] in site.steps:
                self._give_up(site, site.barred[1], site.barred[0])

    def _share(self) -> None:
        """Assigns each call to the first unit that asks for it."""
        self.units, taken = [], set[fx.Node]()
        for unit in self._candidates:
            calls = {node for change in unit.changes for node in change.gone}
            if taken.isdisjoint(calls):
                self.units.append(unit)
                taken |= calls

    def _give_up(self, unit: Unit, reason: str, step: Any = None) -> None:
        unit.reason = reason
        if not unit.give_up(step):
            self._candidates.remove(unit)

    def _reorders(self) -> bool:
        """Takes back one step or unit that would move across something. Returns whether there was
        one."""
        places = places_of(self.units)
        for unit in self.units:
            obstacle = obstacle_of(unit, self.effects, places)
            if obstacle is not None:
                self._give_up(unit, *obstacle)
                return True
        return False

    def _disagrees(self) -> bool:
        """Takes back all of one forward whose ways would no longer begin with the same calls.
        Returns whether there was one."""
        # A norm is fused on all ways alike.
        for edit in edits_of(unit for unit in self.units if unit.change):
            try:
                if edit.trace.ways:
                    edit.rewritten()
            except Disagreement:
                for unit, _ in edit.changes:
                    self._give_up(unit, edit.trace.inexact)
                return True
        return False

    def apply(self) -> list[nn.Module]:
        """Installs all; returns the modules that have a forward of their own now."""
        for site in self.sites:
            site.assign()
        edits = edits_of(self.units)
        for edit in edits:
            edit.install(self.effects)
        return [edit.trace.module for edit in edits]


@dataclass
class Edit:
    """All that changes in one forward."""

    trace: Trace
    changes: list[tuple[Unit, Change]] = field(default_factory=list)

    def install(self, effects: Effects) -> None:
        source, imports, _ = self.rewritten()
        install(Rewritten(self.trace.module, source, imports, self._guards(effects)))

    def _guards(self, effects: Effects) -> Guards:
        """All that the source takes for granted."""
        passed = _once(module for _, change in self.changes for module in change.passed())
        still = _once(module for _, change in self.changes for module in change.crossed())
        traces = [self.trace, *effects.traces_within(still)]
        looked = [row for trace in traces for row in looked_at(trace.reads)]
        looked += parts_of(module for module in passed if module._modules)
        names = [row for trace in traces for row in outside(trace.reads, trace.module)]
        return Guards(looked, dict.fromkeys(names), passed, parts_of(still))

    def rewritten(self) -> Source:
        module, graphs = self.trace.module, self.trace.graphs
        edited = {graph: self._edited(graph) for graph in graphs}
        if self.trace.ways:
            for graph in edited.values():
                number_names(graph)
        sources = {graph: source_of(module, edited[graph]) for graph in graphs}
        for _, _, reason in sources.values():  # `Rules.of_source` has asked for the stock forward
            assert not reason, reason
        if self.trace.ways:
            return woven({a: (edited[g], sources[g]) for a, g in self.trace.ways.items()})
        source, imports, _ = (
            joined(*sources.values()) if self.trace.by_training else sources[graphs[0]]
        )
        usual = self.trace.usual
        return source if usual is None else usual.entered(source), imports, ""

    def _edited(self, original: fx.Graph) -> fx.Graph:
        copy = Copy(original)
        for unit, change in self.changes:
            if change.graph is original:
                copy.replace(unit, change)
        return copy.graph


def edits_of(units: Iterable[Unit]) -> list[Edit]:
    """One for each forward that changes."""
    edits: dict[int, Edit] = {}
    for unit in units:
        for change in unit.changes:
            edit = edits.setdefault(id(change.trace), Edit(change.trace))
            edit.changes.append((unit, change))
    return list(edits.values())


def _once(modules: Iterable[nn.Module | None]) -> list[nn.Module]:
    return list(dict.fromkeys(module for module in modules if module is not None))
