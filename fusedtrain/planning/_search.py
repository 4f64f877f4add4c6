"""The choice of what backward recomputes: the least time whose simulated peak fits a budget.

Two families of choices are simulated, and paths between each of these and "keep everything":

- the forward cut into K segments, in which all but the tensors that cross a cut is recomputed
  (Chen et al., arXiv:1604.06174, with cuts where few bytes cross);
- the cheapest bytes first: outputs by milliseconds a byte, however many are recomputed.

A path takes outputs out of recomputation one by one, the dearest bytes first. All that was
simulated is remembered, so that a smaller budget never gets a larger peak.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from ._simulate import Outcome, Simulator

_POINTS = 48  # of a path that are simulated
_SEGMENTS = 40  # most of them
_STARTS = 4  # choices, unlike each other, whose neighbours are simulated
_NEIGHBOURS = 600  # outputs of a choice that are tried the other way
_REACH = 3  # outputs on both sides with which one may change places

Choice = tuple[bool, ...]
Key = tuple[float, float]


class Search:
    """All choices that were simulated, for one profile."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.simulated: dict[Choice, Outcome] = {}
        steps, sizes = simulator.profile.steps, simulator.bytes
        # An output whose bytes are nothing is never worth a recipe.
        least = sum(sizes) // 10_000
        self._worth = [size > least and step.stays for size, step in zip(sizes, steps)]
        self._by_density = sorted(
            (number for number, worth in enumerate(self._worth) if worth),
            key=lambda number: steps[number].milliseconds / sizes[number],
        )

    def run(self, report: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Simulates both families."""
        count = len(self._worth)
        starts = [tuple(self._worth), *self._segmented()]
        for done, start in enumerate(starts):
            self._follow(start)
            report(done + 1, len(starts) + 1)
        for taken in _spread(len(self._by_density), 2 * _POINTS):
            chosen = [False] * count
            for number in self._by_density[:taken]:
                chosen[number] = True
            self._simulate(tuple(chosen))
        report(len(starts) + 1, len(starts) + 1)

    def least(self) -> tuple[Choice, Outcome]:
        """The choice of the lowest peak."""
        return min(self.simulated.items(), key=lambda item: (item[1].peak, item[0]))

    def place(self, outcome: Outcome) -> str:
        """The module that runs at the peak."""
        place = self.simulator.place(outcome.moment)
        forward = outcome.moment < self.simulator.first
        return f"the {'forward' if forward else 'backward'} of {place}" if place else ""

    def best(self, budget: int) -> tuple[Choice, Outcome] | None:
        """The fastest choice with a peak of at most the budget; None without one."""
        fitting = (item for item in self.simulated.items() if item[1].peak <= budget)
        return min(
            fitting, key=lambda item: (item[1].milliseconds, item[1].peak, item[0]), default=None
        )

    def refine(self, budget: int) -> None:
        """Simulates neighbours of the fastest choices within the budget."""

        def key(outcome: Outcome) -> Key:
            return max(outcome.peak, budget), outcome.milliseconds

        self._improve(key, list(self.simulated), self._by_density[::-1])

    def deepen(self) -> None:
        """Simulates neighbours of the choices with the lowest peaks, by bytes alone: whatever the
        times are, two runs find the same."""
        sizes = self.simulator.bytes
        order = sorted(self._by_density, key=lambda number: (-sizes[number], number))
        starts = [tuple(self._worth), *self._segmented()]
        self._improve(lambda outcome: (outcome.peak, 0.0), starts, order)

    def _improve(
        self, key: Callable[[Outcome], Key], choices: list[Choice], order: list[int]
    ) -> None:
        """Goes from the best of the choices to better neighbours, while there are some."""
        simulated = [(choice, self._simulate(choice)) for choice in choices]
        simulated.sort(key=lambda item: (key(item[1]), item[0]))
        starts: list[tuple[Choice, Outcome]] = []
        for start, outcome in simulated:
            if all(_differences(start, other) > len(start) // 8 for other, _ in starts):
                starts.append((start, outcome))
            if len(starts) == _STARTS:
                break
        for start, outcome in starts:
            chosen, best, left = start, key(outcome), _NEIGHBOURS
            for number in itertools.cycle(order):
                if left <= 0:
                    break
                left -= 1
                for other in self._neighbours(chosen, number):
                    result = key(self._simulate(other))
                    if result < best:
                        chosen, best = other, result
                        left = max(left, len(self._by_density))
                        break

    def _neighbours(self, chosen: Choice, number: int) -> Iterator[Choice]:
        """One output kept or recomputed instead, and the same with another one nearby in return."""
        other = list(chosen)
        other[number] = not other[number]
        yield tuple(other)
        for nearby in range(max(0, number - _REACH), min(len(chosen), number + _REACH + 1)):
            if chosen[nearby] != chosen[number] and self._worth[nearby]:
                other[nearby] = not other[nearby]
                yield tuple(other)
                other[nearby] = not other[nearby]

    def _simulate(self, chosen: Choice) -> Outcome:
        if chosen not in self.simulated:
            self.simulated[chosen] = self.simulator.run(chosen)
        return self.simulated[chosen]

    def _follow(self, start: Choice) -> None:
        """The path from a choice to one that recomputes nothing."""
        order = [number for number in reversed(self._by_density) if start[number]]
        chosen, done = list(start), 0
        for taken in _spread(len(order), _POINTS):
            for number in order[done:taken]:
                chosen[number] = False
            done = taken
            self._simulate(tuple(chosen))

    def _segmented(self) -> list[Choice]:
        """A choice for each number of segments: all outputs but those that cross the cuts."""
        steps, sizes = self.simulator.profile.steps, self.simulator.bytes
        last_use = list(range(len(steps)))
        for number, step in enumerate(steps):
            for source in step.inputs:
                last_use[source] = max(last_use[source], number)
        # Bytes that cross the cut before each step.
        changes = [0] * (len(steps) + 1)
        for number, until in enumerate(last_use):
            if until > number:
                changes[number + 1] += sizes[number]
                changes[until + 1 if until + 1 <= len(steps) else len(steps)] -= sizes[number]
        crossing = list(itertools.accumulate(changes))
        total = list(itertools.accumulate(sizes))
        choices = []
        for segments in range(2, min(_SEGMENTS, len(steps)) + 1):
            chosen = list(self._worth)
            for cut in range(1, segments):
                middle = bisect_left(total, total[-1] * cut / segments)
                reach = max(1, len(steps) // (2 * segments))
                window = range(max(1, middle - reach), min(len(steps), middle + reach + 1))
                place = min(window, key=lambda at: (crossing[at], abs(at - middle)), default=0)
                for number in range(place):
                    if last_use[number] >= place:
                        chosen[number] = False
            choices.append(tuple(chosen))
        return choices


def _differences(one: Choice, other: Choice) -> int:
    return sum(a != b for a, b in zip(one, other))


def _spread(end: int, points: int) -> Sequence[int]:
    """Numbers from 0 to `end`, evenly spread, both included."""
    if end <= points:
        return range(end + 1)
    return sorted({round(end * point / points) for point in range(points + 1)})
