"""The choice of what backward recomputes: the least time whose simulated peak fits a budget.

Paths to "keep everything" are simulated, from these choices:

- recompute everything;
- the forward cut into K segments, in which all but the tensors that cross a cut is recomputed
  (Chen et al., arXiv:1604.06174, with cuts where few bytes cross).

A path takes outputs out of recomputation one by one, the dearest bytes first. All that was
simulated is remembered, so that a smaller budget never gets a larger peak.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import ne

from .._text import memory_text
from .plan import MemoryPlan
from .record import Record
from .simulate import Outcome, Simulator, timelines

_TRIES = 5  # of plans that are measured
_MUCH = 0.2  # of the peak
_POINTS = 48  # of a path that are simulated
_SEGMENTS = 40  # most of them
_STARTS = 4  # choices, unlike each other, whose neighbours are simulated
_NEIGHBOURS = 600  # outputs of a choice that are tried the other way
_REACH = 3  # outputs on both sides with which one may change places

Choice = tuple[bool, ...]
Key = tuple[float, float]


class Search:
    """All choices that were simulated, for one record."""

    def __init__(self, record: Record) -> None:
        self.record, self.simulator = record, Simulator(record)
        self.simulated: dict[Choice, Outcome] = {}
        outputs, sizes = record.outputs, self.simulator.bytes
        # An output whose bytes are nothing is never worth a recipe.
        least = sum(sizes) // 10_000
        self._worth = [size > least and output.stays for size, output in zip(sizes, outputs)]
        self._by_density = sorted(
            (number for number, worth in enumerate(self._worth) if worth),
            key=lambda number: outputs[number].milliseconds / sizes[number],
        )
        self._starts = [tuple(self._worth), *self._segmented()]

    def run(self, report: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Simulates all paths."""
        for done, start in enumerate(self._starts):
            self._follow(start, _POINTS if done else 2 * _POINTS)
            report(done + 1, len(self._starts))

    def plan(
        self,
        limit: int,
        device: str,
        measure: Callable[[MemoryPlan], int],
        show: Callable[[str], None],
        above: bool = True,
    ) -> MemoryPlan:
        """The fastest plan with a measured peak within the limit. Without one the plan of the
        lowest peak of all that were measured, the lowest simulated one among them. The plan lacks
        all that is not known of the record alone: fingerprint, eager's peak, the time of a step.

        Args:
            measure: the peak of a step under a plan.
            above: whether a step may run that is simulated above the limit; else the simulated
                peak counts.
        """
        target, tried = limit, list[MemoryPlan]()

        def attempt(choice: Choice, outcome: Outcome, peak: int | None = None) -> MemoryPlan:
            plan = MemoryPlan(
                "", limit, 0, outcome.peak, 0, max(self.record.totals), 0.0, outcome.milliseconds,
                device, self.record.steps(choice), **timelines(self.simulator, choice),
            )  # fmt: skip
            plan.peak = measure(plan) if peak is None else peak
            tried.append(plan)
            return plan

        for number in range(_TRIES):
            if self.best(target) is None:
                show("lower peaks")
                self.deepen()
            if self.best(target) is None:
                break
            self.refine(target)
            chosen = self.best(target)
            assert chosen is not None
            show(f"the plan, measured ({number + 1})")
            plan = attempt(*chosen)
            if plan.peak <= limit:
                return plan
            target = min(target, plan.predicted) - (plan.peak - limit)
        self.deepen()
        nothing = (False,) * len(self._worth)
        for choice, outcome in (self.least(), (nothing, self._simulate(nothing))):
            attempt(choice, outcome, None if above or outcome.peak <= limit else outcome.peak)
        return min(tried, key=lambda plan: plan.peak)

    def lowest_text(self, peak: int, fixed: int = 0) -> str:
        """The lowest peak and the tensors that live then, for an error. `fixed`: bytes beside."""
        place, inside = self.simulator.place(self.least()[1].moment), Counter[str]()
        for output in self.record.outputs:
            inside[output.op] += output.inside
        (op, size), *_ = [*inside.most_common(1), ("", 0)]
        pieces = f". {op} keeps {memory_text(size)} inside, which no plan recomputes"
        among = f", {memory_text(fixed)} of these parameters, buffers, inputs, states"
        return (
            f"{memory_text(peak + fixed)}{among if fixed else ''}; that much lives at once in "
            f"{place or 'the model itself'}{pieces if size > _MUCH * peak else ''}. A smaller "
            "batch needs less"
        )

    def least(self) -> tuple[Choice, Outcome]:
        """The choice of the lowest peak."""
        return min(self.simulated.items(), key=lambda item: (item[1].peak, item[0]))

    def best(self, budget: int) -> tuple[Choice, Outcome] | None:
        """The fastest choice with a peak of at most the budget; None without one."""
        fitting = (item for item in self.simulated.items() if item[1].peak <= budget)
        return min(
            fitting, key=lambda item: (item[1].milliseconds, item[1].peak, item[0]), default=None
        )

    def refine(self, budget: int) -> None:
        """Simulates neighbours of the fastest choices within the budget."""
        choices, order = list(self.simulated), self._by_density[::-1]
        self._improve(lambda one: (max(one.peak, budget), one.milliseconds), choices, order)

    def deepen(self) -> None:
        """Simulates neighbours of the choices with the lowest peaks, by bytes alone: whatever the
        times are, two runs find the same."""
        sizes = self.simulator.bytes
        order = sorted(self._by_density, key=lambda number: (-sizes[number], number))
        self._improve(lambda outcome: (outcome.peak, 0.0), self._starts, order)

    def _improve(
        self, key: Callable[[Outcome], Key], choices: list[Choice], order: list[int]
    ) -> None:
        """Goes from the best of the choices to better neighbours, while there are some."""
        simulated = [(choice, self._simulate(choice)) for choice in choices]
        simulated.sort(key=lambda item: (key(item[1]), item[0]))
        starts: list[tuple[Choice, Outcome]] = []
        for start, outcome in simulated:
            if all(sum(map(ne, start, other)) > len(start) // 8 for other, _ in starts):
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

    def _follow(self, start: Choice, points: int) -> None:
        """Simulates points of the path from a choice to one that recomputes nothing."""
        order = [number for number in reversed(self._by_density) if start[number]]
        chosen, done = list(start), 0
        for taken in _spread(len(order), points):
            for number in order[done:taken]:
                chosen[number] = False
            done = taken
            self._simulate(tuple(chosen))

    def _segmented(self) -> list[Choice]:
        """A choice for each number of segments: all outputs but those that cross the cuts."""
        sizes, count = self.simulator.bytes, len(self._worth)
        last_use = list(range(count))
        for number, output in enumerate(self.record.outputs):
            for source in output.inputs:
                last_use[source] = max(last_use[source], number)
        # Bytes that cross the cut before each output.
        changes = [0] * (count + 1)
        for number, until in enumerate(last_use):
            changes[number + 1] += sizes[number]
            changes[until + 1] -= sizes[number]
        crossing = list(itertools.accumulate(changes))
        total = list(itertools.accumulate(sizes))
        choices = []
        for segments in range(2, min(_SEGMENTS, count) + 1):
            chosen = list(self._worth)
            for cut in range(1, segments):
                middle = bisect_left(total, total[-1] * cut / segments)
                reach = max(1, count // (2 * segments))
                window = range(max(1, middle - reach), min(count, middle + reach + 1))
                place = min(window, key=lambda at: (crossing[at], abs(at - middle)), default=0)
                for number in range(place):
                    if last_use[number] >= place:
                        chosen[number] = False
            choices.append(tuple(chosen))
        return choices


def _spread(end: int, points: int) -> Sequence[int]:
    """Numbers from 0 to `end`, evenly spread, both included."""
    if end <= points:
        return range(end + 1)
    return sorted({round(end * point / points) for point in range(points + 1)})
