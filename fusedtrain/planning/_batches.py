"""Plans of one model for batches that need not fit without a plan: profiles of two small batches,
extrapolated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from .._recompute import MemoryPlan
from . import _fitting, _least, _steps
from ._profile import Profile, Running, profile, structure
from ._search import Search
from ._simulate import Outcome, Simulator, peak_lines
from ._timeline import timelines

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
        self._searched: tuple[int, Search] | None = None
        self._small, self._large = (
            profile(model, partial(begin, batch), device) for batch in batches
        )
        if structure(self._small) != structure(self._large):
            raise ValueError("model: forwards of two batches call different functions")

    def largest(self, limit: Callable[[int], int], most: int) -> int:
        """The largest batch up to `most` with a simulated peak of at most `limit(batch)`, or 0."""
        search = Search(Simulator(self.profile(4 * self._batches[1])))
        search.run()
        ordered = sorted(search.simulated, key=lambda choice: search.simulated[choice].peak)

        def fits(batch: int) -> bool:
            simulator = Simulator(self.profile(batch))
            peaks = (simulator.run(choice).peak for choice in ordered[:_LOWEST])
            return min(peaks) <= limit(batch)

        return largest(fits, most, doubling(self._batches[1], most))

    def lowest(self, batch: int) -> int:
        """The lowest simulated peak."""
        search = self._search_of(batch)
        search.deepen()
        return search.least()[1].peak

    def _search_of(self, batch: int) -> Search:
        """The choices that were simulated for a batch: several budgets of one batch share them."""
        if self._searched is None or self._searched[0] != batch:
            search = Search(Simulator(self.profile(batch)))
            search.run()
            self._searched = batch, search
        return self._searched[1]

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
        search = self._search_of(batch)
        scaled = search.simulator.profile

        def made(chosen: tuple[bool, ...], outcome: Outcome, peak: int) -> MemoryPlan:
            return MemoryPlan(
                "", limit, peak, outcome.peak, 0, max(scaled.totals), 0.0, outcome.milliseconds,
                self._device.type, _steps(scaled, chosen),
            )  # fmt: skip

        nothing = Outcome(0.0, 0, 0)
        chosen, outcome, peak = _fitting(
            search, limit, show, lambda chosen: measure(made(chosen, nothing, 0)), above=False
        )
        if peak > limit:
            raise ValueError(f"budget: no plan needs less than {_least(search, peak, 0)}")
        first, second = zip(self._batches, (self._small, self._large))
        return replace(
            made(chosen, outcome, peak),
            batch=batch,
            lines=peak_lines(chosen, first, second),
            **timelines(search.simulator, chosen),
        )

    def profile(self, batch: int) -> Profile:
        """The profile of a batch: bytes and milliseconds are affine functions of the batch."""
        small, large = self._small, self._large
        first, second = self._batches
        share = (batch - first) / (second - first)

        def at(one: float, other: float) -> float:
            return max(one + (other - one) * share, 0)

        return replace(
            large,
            bytes=[round(at(*pair)) for pair in zip(small.bytes, large.bytes)],
            totals=[round(at(*pair)) for pair in zip(small.totals, large.totals)],
            steps=[
                replace(step, milliseconds=at(other.milliseconds, step.milliseconds))
                for other, step in zip(small.steps, large.steps)
            ],
        )
