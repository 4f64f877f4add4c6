"""Time and peak of a training step under a choice of what is recomputed, from its profile.

Follows `_recompute.recipes`: an output is computed when the first use asks, and dropped after the
last one; a recipe keeps what it is computed from until its last user has run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .._recompute.planned import LONGEST_PLANNED
from ._profile import Profile


class Outcome(NamedTuple):
    """`milliseconds` of recomputation, and the most bytes that are allocated at a moment."""

    milliseconds: float
    peak: int
    moment: int


class Simulator:
    """Answers for one profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        steps, saves = profile.steps, profile.saves
        self.first = len(saves) + 1  # the moment of backward's first node
        self._moments = self.first + profile.nodes
        self.bytes = [profile.bytes[step.storage] for step in steps]
        self._saves_of: list[list[int]] = [[] for _ in steps]  # nodes, by step
        self._asks: list[list[int]] = [[] for _ in range(profile.nodes)]  # steps, by node
        self._dependents: list[list[int]] = [[] for _ in steps]
        for save in saves:
            if save.step >= 0:
                self._saves_of[save.step].append(save.node if save.node >= 0 else profile.nodes - 1)
                if save.node >= 0:
                    self._asks[save.node].append(save.step)
        for number, step in enumerate(steps):
            for source in set(step.inputs):
                self._dependents[source].append(number)
        # Tensors that the forward's own variables hold, by storage: moments from, to.
        count = len(profile.bytes)
        self._held = ([self._moments] * count, [-1] * count)
        for step in steps:
            start, end = self._held
            start[step.storage] = min(start[step.storage], step.made)
            end[step.storage] = max(end[step.storage], min(step.died, self._moments - 1))
        self._rest = [0] * self._moments
        stored = self._kept([False] * len(steps), [0] * len(steps), [-1] * len(steps))
        totals = profile.totals + [0] * (self._moments - len(profile.totals))
        self._rest = [total - kept for total, kept in zip(totals, stored)]

    def _uses(self, chosen: list[bool]) -> tuple[list[int], list[int]]:
        """The number of uses of each step's recipe, and the last node that holds the recipe."""
        uses, ends = [0] * len(chosen), [-1] * len(chosen)
        for number in range(len(chosen) - 1, -1, -1):
            if not chosen[number]:
                continue
            nodes = self._saves_of[number]
            end, count = max(nodes, default=-1), len(nodes)
            for other in self._dependents[number]:
                if uses[other]:
                    count += self.profile.steps[other].inputs.count(number)
                    end = max(end, ends[other])
            uses[number], ends[number] = count, end
        return uses, ends

    def _kept(self, chosen: list[bool], uses: list[int], ends: list[int]) -> list[int]:
        """Bytes of storages that autograd, recipes or the forward hold, by moment."""
        start, end = self._spans(chosen, uses, ends)
        return self._summed(zip(self.profile.bytes, start, end))

    def _spans(
        self, chosen: list[bool], uses: list[int], ends: list[int]
    ) -> tuple[list[int], list[int]]:
        """The first and last moments at which each storage is held."""
        start, end = self._held[0][:], self._held[1][:]

        def hold(storage: int, since: int, until: int) -> None:
            start[storage] = min(start[storage], since)
            end[storage] = max(end[storage], until)

        last = self._moments - 1
        for save in self.profile.saves:
            if save.step < 0 or not chosen[save.step]:
                hold(save.storage, save.made, last if save.node < 0 else self.first + save.node)
        for number, step in enumerate(self.profile.steps):
            if uses[number]:
                until = self.first + ends[number]
                for storage in step.reads:
                    hold(storage, step.made, until)
                for source in step.inputs:
                    if not chosen[source]:
                        hold(self.profile.steps[source].storage, step.made, until)
        return start, end

    def _summed(self, spans: Iterable[tuple[int, int, int]]) -> list[int]:
        changes = [0] * (self._moments + 1)
        for size, since, until in spans:
            if size and until >= since:
                changes[since] += size
                changes[until + 1] -= size
        kept, now = [], 0
        for change in changes[:-1]:
            now += change
            kept.append(now)
        return kept

    def run(self, choice: Sequence[bool]) -> Outcome:
        totals, milliseconds = self.totals(choice)
        peak = max(totals)
        return Outcome(milliseconds, peak, totals.index(peak))

    def totals(self, choice: Sequence[bool]) -> tuple[list[int], float]:
        """Bytes by moment, and milliseconds of recomputation."""
        chosen = self._within_depth(choice)
        uses, ends = self._uses(chosen)
        kept = self._kept(chosen, uses, ends)
        backward = _Backward(self, chosen, uses)
        totals = list(map(sum, zip(kept, self._rest)))
        for node, asks in enumerate(self._asks):
            totals[self.first + node] += backward.run(asks)
        return totals, backward.milliseconds

    def areas(self, choice: Sequence[bool], groups: Sequence[str]) -> dict[str, list[int]]:
        """Bytes by moment: those kept of each group (`groups`: by storage), recomputed outputs, and
        the rest (gradients, and allocations of running ops)."""
        chosen = self._within_depth(choice)
        uses, ends = self._uses(chosen)
        spans: dict[str, list[tuple[int, int, int]]] = {}
        held = zip(groups, self.profile.bytes, *self._spans(chosen, uses, ends))
        for name, size, since, until in held:
            if size:
                spans.setdefault(name, []).append((size, since, until))
        backward = _Backward(self, chosen, uses)
        recomputed = [0] * self.first + [backward.run(asks) for asks in self._asks]
        kept = {name: self._summed(rows) for name, rows in spans.items()}
        return {**kept, "recomputed": recomputed, "gradients and the rest": self._rest}

    def place(self, moment: int) -> str:
        """The module whose forward or backward runs at a moment."""
        saves = self.profile.saves
        if moment < self.first:
            return saves[min(moment, len(saves) - 1)].module
        node = moment - self.first
        return next((save.module for save in saves if save.node == node), "")

    def _within_depth(self, choice: Sequence[bool]) -> list[bool]:
        chosen, depths = list(choice), [0] * len(choice)
        for number, step in enumerate(self.profile.steps):
            if chosen[number]:
                deepest = max((depths[source] for source in step.inputs), default=0)
                chosen[number] = deepest < LONGEST_PLANNED
                depths[number] = 1 + deepest if chosen[number] else 0
        return chosen


class _Backward:
    """The recomputed outputs that live while backward's nodes run one after the other."""

    def __init__(self, simulator: Simulator, chosen: list[bool], uses: list[int]) -> None:
        self._steps, self._bytes = simulator.profile.steps, simulator.bytes
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
            sources = [s for s in self._steps[number].inputs if self._chosen[s]]
            for source in sources:
                self._take(source, first)
            self.milliseconds += self._steps[number].milliseconds
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
    choice: Sequence[bool], small: tuple[int, Profile], large: tuple[int, Profile]
) -> list[tuple[float, float]]:
    """Lines whose largest value at a batch is the peak there: bytes of no batch, and bytes a
    sample. Two batches with their profiles show how the bytes of each moment grow."""
    (first, one), (second, other) = small, large
    totals = (Simulator(profile).totals(choice)[0] for profile in (one, other))
    slopes: dict[float, float] = {}
    for less, more in zip(*totals):
        slope = (more - less) / (second - first)
        slopes[slope] = max(slopes.get(slope, -math.inf), less - slope * first)
    hull: list[tuple[float, float]] = []
    for slope, base in sorted(slopes.items()):
        line = (base, slope)
        while hull and (base >= hull[-1][0] or (len(hull) > 1 and _hidden(hull[-2:], line))):
            hull.pop()
        hull.append(line)
    return hull


def _hidden(two: list[tuple[float, float]], third: tuple[float, float]) -> bool:
    """Whether the second of three lines, of rising slopes, is nowhere the largest."""
    (left, least), (middle, medium), (right, most) = *two, third
    return (middle - right) * (medium - least) <= (left - middle) * (most - medium)
