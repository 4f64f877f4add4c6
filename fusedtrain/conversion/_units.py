"""One unit of a conversion: calls in forwards that become one fused call.

Finders make units, with the reason where one has to stay. A plan takes those that go together, an
example proves them, and the report has a line for each, whatever kind they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from torch import fx, nn

from .._graph.flow import Trace
from ._source import copied


@dataclass(eq=False)
class Change:
    """The calls of one graph that one fused call replaces."""

    trace: Trace
    nodes: Sequence[fx.Node]  # in the order of their work; the fused call has the last one's value
    place: fx.Node  # the one of them where the fused call works
    kept: tuple[fx.Node, ...] = ()  # values that it may save for backward
    crosses: bool = True  # it has another operand or draws numbers, across what is in between
    steps: Mapping[fx.Node, Any] = field(default_factory=dict)  # parts that can be given up
    draws_later: Any = None  # the step of a forward further out that draws random numbers
    overwrites: bool = False  # the input of the first call
    inner: fx.Node | None = None  # the call of a module that goes on, with less to do outside
    ending: Sequence[fx.Node] | None = None  # where steps further out are handed to it: the calls
    # from it to the end of the forward, of Identity, which would get their value

    @property
    def graph(self) -> fx.Graph:
        return self.nodes[0].graph

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self.graph.nodes)}

    @property
    def gone(self) -> list[fx.Node]:
        return [node for node in self.nodes if node is not self.inner]

    def passed(self) -> Iterator[nn.Module]:
        """Modules that are called no more, with their children."""
        for module in map(self.trace.callee, (*self.gone, *(self.ending or ()))):
            if module is not None:
                yield from (module, *module.children())

    def crossed(self) -> Iterator[nn.Module | None]:
        """Modules across whose calls the call of a whole part moves, an operand is read or random
        numbers are drawn; the module that moves, if it reads what others read, too; and who made
        the input that is written over."""
        places = [self.order[node] for node in self.nodes]
        between = list(self.order)[min(places) : max(places)] if self.crosses else []
        others = [n for n in between if n not in self.nodes and n.op.startswith("call")]
        yield from map(self.trace.callee, (*others, *(self.nodes[:1] if others else ())))
        if self.inner is not None and self.place is not self.inner:
            yield self.trace.callee(self.inner)
        if self.overwrites:
            yield self.trace.callee(self.nodes[0].args[0])


class Copy:
    """A copy of a graph, in which calls give way to fused ones."""

    def __init__(self, original: fx.Graph) -> None:
        self.graph, self._new = copied(original)
        self._replaced: dict[fx.Node, fx.Node] = {}

    def of(self, value: Any) -> Any:
        """The present copy of a value, which may be that of a fused call; constants as they are."""
        if not isinstance(value, fx.Node):
            return value
        node = self._new[value]
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def replace(self, unit: Unit, change: Change) -> None:
        nodes = [self._new[node] for node in change.nodes]
        with self.graph.inserting_before(self._new[change.place]):
            value = unit.written(change, self)
        nodes[-1].replace_all_uses_with(value)
        self._replaced[nodes[-1]] = value
        for node in reversed(nodes):
            self.graph.erase_node(node)


@dataclass(eq=False, kw_only=True)
class Unit:
    """Calls that become one. `module`: the one whose forward calls them, or a norm, by which the
    unit is chosen and undone. `title`: its kind in the report, '' for the class of the module.
    `reason`: why it stays, or lost a part; '' also if another unit does its work."""

    lines: ClassVar[str]  # field of the report where it is fused
    left: ClassVar[str] = ""  # field of the report where it stays
    lost: ClassVar[str] = ""  # the reason if another unit has its calls

    name: str
    module: nn.Module
    title: str = ""
    reason: str = ""
    change: Change | None = None  # the only one; None also if there is none

    @property
    def changes(self) -> Sequence[Change]:
        """One for each graph in which calls become one."""
        return () if self.change is None else (self.change,)

    @property
    def parts(self) -> Iterable[nn.Module]:
        """Activations of the model that are part of it."""
        return ()

    @property
    def owners(self) -> list[nn.Module]:
        """Modules whose forwards change."""
        return [change.trace.module for change in self.changes]

    @property
    def place(self) -> nn.Module:
        """Module whose output contains the fused result."""
        return self.module

    @property
    def idle(self) -> str | None:
        """Reason why the unit gains nothing ('' for no line in the report); None if it gains."""
        return None

    def give_up(self, step: Any) -> bool:
        """Leaves one step to its own call, with all later ones (None: all of it). Returns whether
        the unit goes on without."""
        return False

    def leave_out(self, undone: Mapping[int, str]) -> None:
        """Goes on without parts that were undone, by their ids."""
        reasons = (undone.get(id(part), "") for part in self.parts)
        self.reason = self.reason or next(filter(None, reasons), "")

    def written(self, change: Change, copy: Copy) -> fx.Node:
        """The fused call in the copy of a graph."""
        raise NotImplementedError

    def line(self, source: str) -> Any:
        """The entry of the report. `source`: the class of the module before."""
        raise NotImplementedError
