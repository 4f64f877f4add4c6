"""Units that can be installed together: no two have one call, and none moves a call across another
that it disturbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from .._graph.effects import Effects
from .._graph.intercept import intercepting
from ._edit import edits_of
from ._reordering import obstacle_of, places_of
from ._sites import Site
from ._source import Disagreement
from ._units import Unit


class Plan:
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
        """Gives each call to the first that asks for it."""
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
            edit.install()
        return [edit.trace.module for edit in edits]
