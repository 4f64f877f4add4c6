"""Two configurations take turns; what their times and memory say."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..bench.clock import median_interval

Turn = Callable[[], float]  # seconds for a sample

LEAST, MOST = 6, 20  # rounds
TURN = 0.05  # seconds that a turn takes at least: a few steps of a small model
HOPELESS = 0.7  # a trial below this gain in all of the first 3 rounds is not timed further
LESS_MEMORY = 0.95  # memory counts as saved below this share
NO_LOSS = 0.98  # ... where the median of the gain is not below this, nor its interval below 1


@dataclass(frozen=True)
class Race:
    """Seconds for a sample of both, and gains: best's / trial's, above 1 the trial is faster."""

    best: float
    trial: float
    gain: float
    interval: tuple[float, float]
    rounds: int


class Verdict(NamedTuple):
    """Whether a trial becomes the best, and why."""

    accepted: bool
    reason: str


def race(best: Turn, trial: Turn, rounds: int) -> Race:
    """Alternates: best, trial, then trial, best; neither is always the one that comes second."""
    times: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2:
            after, before = trial(), best()
        else:
            before, after = best(), trial()
        times.append((before, after))
        if number == 2 and all(a / b < HOPELESS for a, b in times):
            break
    gains = [a / b for a, b in times]
    first, second = (statistics.median(column) for column in zip(*times, strict=True))
    return Race(first, second, statistics.median(gains), median_interval(gains), len(times))


def rounds_in(seconds: float, best: float, trial: float) -> int:
    """Rounds that fit; ``best`` and ``trial`` are the seconds of a turn."""
    return max(LEAST, min(MOST, int(seconds / (best + trial))))


def verdict(result: Race, best_memory: float, trial_memory: float) -> Verdict:
    """A trial is accepted where it is surely faster, or keeps less memory and is not slower."""
    low, high = result.interval
    if low > 1:
        return Verdict(True, "faster")
    saves = trial_memory < LESS_MEMORY * best_memory
    if saves and high >= 1 and result.gain >= NO_LOSS:
        return Verdict(True, "less memory, no loss of time")
    if high < 1:
        return Verdict(False, "slower, with less memory" if saves else "slower")
    return Verdict(False, "no sure gain")
