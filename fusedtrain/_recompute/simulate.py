"""Time and peak of a training step that recomputes chosen outputs, from its record.

Follows `recipes.py`: an output is computed when the first use asks, and dropped after the last one;
a recipe keeps what it is computed from until its last user has run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .record import Record
from .torch_calls import LONGEST_PLANNED

_POINTS = 400  # of a timeline, at most, each with the most that was allocated in its moments
_GROUPS = 6  # of modules
_SHARE = 0.6  # of all bytes, at most, has one group; else names with more parts are the groups
_DEEPEST = 4


class Outcome(NamedTuple):
    """`milliseconds` of recomputation, and the most bytes that are allocated at a moment."""

    milliseconds: float
    peak: int
    moment: int


class Simulator:
    """Predictions from one record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        outputs, saves = record.outputs, record.saves
        self.first = len(saves) + 1  # the moment of backward's first node
        self._moments = self.first + record.nodes
        self.bytes = [record.bytes[output.storage] for output in outputs]
        self._saves_of: list[list[int]] = [[] for _ in outputs]  # nodes, by output
        self._asks: list[list[int]] = [[] for _ in range(record.nodes)]  # outputs, by node
        self._dependents: list[list[int]] = [[] for _ in outputs]
        for save in saves:
            if save.output >= 0:
                self._saves_of[save.output].append(
                    save.node if save.node >= 0 else record.nodes - 1
                )
                if save.node >= 0:
                    self._asks[save.node].append(save.output)
        for number, output in enumerate(outputs):
            for source in set(output.inputs):
                self._dependents[source].append(number)
        # Tensors that the forward's own variables hold, by storage: moments from, to.
        count = len(record.bytes)
        self._held = ([self._moments] * count, [-1] * count)
        for output in outputs:
            start, end = self._held
            start[output.storage] = min(start[output.storage], output.made)
            end[output.storage] = max(end[output.storage], output.died)
        self._rest = [0] * self._moments
        stored, _ = self.totals([False] * len(outputs))
        totals = record.totals + [0] * (self._moments - len(record.totals))
        self._rest = [total - kept for total, kept in zip(totals, stored)]

    def _uses(self, chosen: list[bool]) -> tuple[list[int], list[int]]:
        """The number of uses of each output's recipe, and the last node that holds the recipe."""
        uses, ends = [0] * len(chosen), [-1] * len(chosen)
        for number in range(len(chosen) - 1, -1, -1):
            if not chosen[number]:
                continue
            nodes = self._saves_of[number]
            end, count = max(nodes, default=-1), len(nodes)
            for other in self._dependents[number]:
                if uses[other]:
                    count += self.record.outputs[other].inputs.count(number)
                    end = max(end, ends[other])
            uses[number], ends[number] = count, end
        return uses, ends

    def _spans(
        self, chosen: list[bool], uses: list[int], ends: list[int]
    ) -> tuple[list[int], list[int]]:
        """The first and last moments at which each storage is held."""
        start, end = self._held[0][:], self._held[1][:]

        def hold(storage: int, since: int, until: int) -> None:
            start[storage] = min(start[storage], since)
            end[storage] = max(end[storage], until)

        last = self._moments - 1
        for save in self.record.saves:
            if save.output < 0 or not chosen[save.output]:
                hold(save.storage, save.made, last if save.node < 0 else self.first + save.node)
        for number, output in enumerate(self.record.outputs):
            if uses[number]:
                until = self.first + ends[number]
                for storage in output.reads:
                    hold(storage, output.made, until)
                for source in output.inputs:
                    if not chosen[source]:
                        hold(self.record.outputs[source].storage, output.made, until)
        return start, end

    def _summed(self, spans: Iterable[tuple[int, int, int]]) -> list[int]:
        changes = [0] * (self._moments + 1)
        for size, since, until in spans:
            if size and until >= since:
                changes[since] += size
                changes[until + 1] -= size
        return list(itertools.accumulate(changes[:-1]))

    def run(self, choice: Sequence[bool]) -> Outcome:
        totals, milliseconds = self.totals(choice)
        peak = max(totals)
        return Outcome(milliseconds, peak, totals.index(peak))

    def totals(self, choice: Sequence[bool]) -> tuple[list[int], float]:
        """Bytes by moment, and milliseconds of recomputation."""
        spans, recomputed, milliseconds = self._simulated(choice)
        kept = self._summed(zip(self.record.bytes, *spans))
        return list(map(sum, zip(kept, recomputed, self._rest))), milliseconds

    def areas(self, choice: Sequence[bool], groups: Sequence[str]) -> dict[str, list[int]]:
        """Bytes by moment: those kept of each group (`groups`: by storage), recomputed outputs, and
        the rest (gradients, and allocations of running ops)."""
        spans, recomputed, _ = self._simulated(choice)
        rows: dict[str, list[tuple[int, int, int]]] = {}
        for name, *row in zip(groups, self.record.bytes, *spans):
            if row[0]:
                rows.setdefault(name, []).append((row[0], row[1], row[2]))
        kept = {name: self._summed(group) for name, group in rows.items()}
        return {**kept, "recomputed": recomputed, "gradients and the rest": self._rest}

    def _simulated(
        self, choice: Sequence[bool]
    ) -> tuple[tuple[list[int], list[int]], list[int], float]:
        """The first and last moments of each storage, bytes of recomputed outputs by moment, and
        milliseconds of recomputation."""
        chosen = self._within_depth(choice)
        uses, ends = self._uses(chosen)
        backward = _Backward(self, chosen, uses)
        recomputed = [0] * self.first + [backward.run(asks) for asks in self._asks]
        return self._spans(chosen, uses, ends), recomputed, backward.milliseconds

    def place(self, moment: int) -> str:
        """The module that runs at a moment, and in which direction; "" for the model itself."""
        saves, node = self.record.saves, moment - self.first
        if node < 0:
            name, direction = saves[min(moment, len(saves) - 1)].module, "forward"
        else:
            name, direction = next((s.module for s in saves if s.node == node), ""), "backward"
        return f"the {direction} of {name}" if name else ""

    def _within_depth(self, choice: Sequence[bool]) -> list[bool]:
        chosen, depths = list(choice), [0] * len(choice)
        for number, output in enumerate(self.record.outputs):
            if chosen[number]:
                deepest = max((depths[source] for source in output.inputs), default=0)
                chosen[number] = deepest < LONGEST_PLANNED
                depths[number] = 1 + deepest if chosen[number] else 0
        return chosen


class _Backward:
    """The recomputed outputs that live while backward's nodes run one after the other."""

    def __init__(self, simulator: Simulator, chosen: list[bool], uses: list[int]) -> None:
        self._outputs, self._bytes = simulator.record.outputs, simulator.bytes
        self._chosen, self._left = chosen, uses[:]
        self._computed = [False] * len(chosen)
        self._holders = [0] * len(chosen)
        self._stored = [False] * len(chosen)  # the recipe has the value
        self._alive = self._most = 0
        self.milliseconds = 0.0

    def run(self, asks: list[int]) -> int:
        """The most bytes of recomputed outputs while a node runs that asks for these."""
        self._most = self._alive
        wanted = [number for number in asks if self._chosen[number]]
        for number in wanted:
            self._take(number, True)
        for number in wanted:
            self._release(number)
        return self._most

    def _take(self, number: int, asked: bool) -> None:
        """Computes the output unless it is there. The caller holds it until `_release`."""
        if not self._stored[number]:
            first = not self._computed[number]
            self._computed[number] = True
            sources = [s for s in self._outputs[number].inputs if self._chosen[s]]
            for source in sources:
                self._take(source, first)
            self.milliseconds += self._outputs[number].milliseconds
            self._hold(number)
            for source in sources:
                self._release(source)
            if self._left[number] > 0:
                self._stored[number] = True
                self._hold(number)
        else:
            self._hold(number)
        if asked:
            self._left[number] -= 1
            if self._left[number] <= 0 and self._stored[number]:
                self._stored[number] = False
                self._release(number)

    def _hold(self, number: int) -> None:
        if not self._holders[number]:
            self._alive += self._bytes[number]
            self._most = max(self._most, self._alive)
        self._holders[number] += 1

    def _release(self, number: int) -> None:
        self._holders[number] -= 1
        if not self._holders[number]:
            self._alive -= self._bytes[number]


def peak_lines(
    choice: Sequence[bool], small: tuple[int, Record], large: tuple[int, Record]
) -> list[tuple[float, float]]:
    """Lines whose largest value at a batch is the peak there: bytes of no batch, and bytes a
    sample. Two batches with their records show how the bytes of each moment grow."""
    (first, one), (second, other) = small, large
    totals = (Simulator(record).totals(choice)[0] for record in (one, other))
    slopes = [((more - less) / (second - first), less) for less, more in zip(*totals)]
    lines: list[tuple[float, float]] = []
    for slope, base in sorted(((s, less - s * first) for s, less in slopes), reverse=True):
        if not lines or base > lines[-1][0]:  # else a steeper line is nowhere below
            lines.append((base, slope))
    return lines


def timelines(simulator: Simulator, chosen: Sequence[bool]) -> dict[str, Any]:
    """Fields of a MemoryPlan: `timeline_store`, `timeline` and `backward_at`."""
    group_of = _groups(simulator.record)
    areas = simulator.areas(chosen, group_of)
    totals = [sum(values) for values in zip(*areas.values())]
    store = simulator.record.totals
    count = max(len(totals), 1)
    size = -(-count // _POINTS)
    shares = [range(start, min(start + size, count)) for start in range(0, count, size)]
    largest = [max(share, key=totals.__getitem__) for share in shares if totals]
    return {
        "timeline_store": [max(store[share.start : share.stop], default=0) for share in shares],
        "timeline": {name: [values[at] for at in largest] for name, values in areas.items()},
        "backward_at": simulator.first // size,
    }


def _groups(record: Record) -> list[str]:
    """The group of modules that made each storage, or "other modules"."""
    modules = [""] * len(record.bytes)
    for save in record.saves:
        modules[save.storage] = modules[save.storage] or save.module
    for output in record.outputs:
        modules[output.storage] = output.module
    for depth in range(1, _DEEPEST + 1):
        names = [".".join(module.split(".")[:depth]) for module in modules]
        sizes = Counter[str]()
        for name, size in zip(names, record.bytes):
            sizes[name] += size
        if max(sizes.values(), default=0) <= _SHARE * sizes.total():
            break
    largest = {name for name, size in sizes.most_common(_GROUPS) if name and size}
    return [name if name in largest else "other modules" for name in names]
