"""Plans of one model for batches that need not fit without a plan: records of two small batches,
extrapolated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from .._recompute.plan import MemoryPlan
from .._recompute.record import Record
from .._recompute.search import Search
from .._recompute.simulate import Simulator, peak_lines
from ._meter import Running, recorded

_LOWEST = 16  # choices by which the largest batch is predicted


def largest(
    fits: Callable[[int], bool],
    most: int,
    propose: Callable[[int, int], int],
    low: int = 0,
    tries: int = sys.maxsize,
    close: float = 0.0,
) -> int:
    """The largest number up to `most` that is known to fit, in at most so many tries.

    Args:
        propose: returns the next number; called with the largest number that fits and the least
            that does not.
        low: fits already; 0: none does.
        close: share of a number by which a larger one must exceed it to be worth a try.
    """
    high = most + 1
    for _ in range(tries):
        number = min(propose(low, high), high - 1)
        if number - low <= close * low:
            break
        low, high = (number, high) if fits(number) else (low, number)
    return low


def doubling(first: int, most: int) -> Callable[[int, int], int]:
    """Proposes `first`, then twice as much while all fit, then the middle."""
    return lambda low, high: max(first, 2 * low) if high > most else (low + high) // 2


class BatchPlanner:
    """`model`: converted with `memory="recompute"`, and set not to recompute. `begin(batch)`: the
    forward of that batch. `batches`: a small and a larger one, which are run.

    Raises:
        ValueError: the two batches call different functions.
    """

    def __init__(
        self,
        model: nn.Module,
        begin: Callable[[int], Running],
        device: torch.device,
        batches: tuple[int, int],
    ) -> None:
        self._batches, self._device = batches, device
        self._search: tuple[int, Search] | None = None  # several budgets of one batch share it
        self._small, self._large = (
            recorded(model, partial(begin, batch), device) for batch in batches
        )
        if not self._small.is_like(self._large):
            raise ValueError("model: forwards of two batches call different functions")

    def largest(self, limit: Callable[[int], int], most: int) -> int:
        """The largest batch up to `most` with a simulated peak of at most `limit(batch)`, or 0."""
        search = self._searched(4 * self._batches[1])
        ordered = sorted(search.simulated, key=lambda choice: search.simulated[choice].peak)

        def fits(batch: int) -> bool:
            simulator = Simulator(self._record(batch))
            peaks = (simulator.run(choice).peak for choice in ordered[:_LOWEST])
            return min(peaks) <= limit(batch)

        return largest(fits, most, doubling(self._batches[1], most))

    def lowest(self, batch: int) -> int:
        """The lowest simulated peak."""
        search = self._searched(batch)
        search.deepen()
        return search.least()[1].peak

    def plan(
        self,
        batch: int,
        limit: int,
        measure: Callable[[MemoryPlan], int],
        show: Callable[[str], None],
    ) -> MemoryPlan:
        """The fastest plan with a peak of at most `limit`; `measure` runs a step under it. The plan
        lacks the model's fingerprint, eager's peak and the time of a step.

        Raises:
            ValueError: no plan has so low a peak.
        """
        show("choices")
        search = self._searched(batch)
        plan = search.plan(limit, self._device.type, measure, show, above=False)
        if plan.peak > limit:
            raise ValueError(f"budget: no plan needs less than {search.lowest_text(plan.peak)}")
        choice = [step.recompute for step in plan.steps]
        first, second = zip(self._batches, (self._small, self._large))
        return replace(plan, batch=batch, lines=peak_lines(choice, first, second))

    def _searched(self, batch: int) -> Search:
        """The choices that were simulated for a batch."""
        if self._search is None or self._search[0] != batch:
            self._search = batch, Search(self._record(batch))
            self._search[1].run()
        return self._search[1]

    def _record(self, batch: int) -> Record:
        first, second = self._batches
        return self._small.between(self._large, (batch - first) / (second - first))
