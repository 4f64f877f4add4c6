"""The time that a run may take."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from ..._text import time_text


class BudgetSpent(Exception):
    """The next trial would not fit, or the running one was cut."""


class Budget:
    """Seconds that are left, and what a trial costs: what the last one did."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._begun = clock()
        self.last_trial = 0.0

    @property
    def left(self) -> float:
        return self.seconds - self.used

    @property
    def used(self) -> float:
        return self._clock() - self._begun

    def require(self, extra: float = 0.0) -> None:
        """Raises BudgetSpent unless a trial fits: the cost of the last one, and ``extra``."""
        cost = self.last_trial + extra
        if cost >= self.left:
            raise BudgetSpent(
                f"the budget of {time_text(self.seconds)} has {max(self.left, 0):.0f} s left, and "
                f"the next trial would take about {cost:.0f} s"
            )


def parse_budget(text: str) -> float:
    """Seconds of ``90s``, ``5m``, ``1.5h``; a number alone is of minutes.

    Raises:
        ValueError: another text, or no time at all.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(match[1]) * {"s": 1, "": 60, "m": 60, "h": 3600}[match[2]] if match else 0
    if seconds <= 0:
        raise ValueError(f"budget: expected a time like 90s, 5m or 1h, got {text!r}")
    return seconds
