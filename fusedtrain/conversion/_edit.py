"""The changes in one forward: its graphs with fused calls, their source, and the guards of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx, nn

from .._graph.flow import Trace
from .._graph.forward import Rewritten, install
from .._graph.guards import Guards, looked_at, parts_of
from .._graph.names import outside
from ._source import Source, joined, number_names, source_of, woven
from ._units import Change, Copy, Unit


@dataclass
class Edit:
    """All that changes in one forward."""

    trace: Trace
    changes: list[tuple[Unit, Change]] = field(default_factory=list)

    def install(self) -> None:
        source, imports, _ = self.rewritten()
        install(Rewritten(self.trace.module, source, imports, self._guards()))

    def _guards(self) -> Guards:
        """All that the source takes for granted."""
        passed = _once(module for _, change in self.changes for module in change.passed())
        still = _once(module for _, change in self.changes for module in change.crossed())
        reads, owner = self.trace.reads, self.trace.module
        return Guards(looked_at(reads), outside(reads, owner), passed, parts_of(still))

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
