"""The rows of Apex's calls: how they are read back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks._apex_contestants import INSIDE, JOBS, OWN, RIVALS
from benchmarks._parameter_lists import MODELS
from benchmarks._step_rows import StepRow, read

FAMILY = "apex"
PROMISE = 0.05  # by Apex's calls a step takes at most so much longer than fusedtrain's own


class ApexRow(StepRow):
    """One benchmark: a script's step on the parameters of a network (see README.md)."""

    @property
    def who(self) -> list[str]:
        """The contestants, in their order."""
        return [name for name in ("fusedtrain", OWN, INSIDE, *RIVALS) if name in self.host_ns]

    @property
    def strongest(self) -> str | None:
        """The fastest of torch's ways; None where all were left out."""
        return min(self.ratio.keys() & set(RIVALS), key=self.ratio.__getitem__, default=None)

    def slower_than(self, tolerance: float) -> str | None:
        """The fastest of torch's ways if it is faster, or the own step beyond the promise."""
        own = OWN if self._loses_to(OWN, PROMISE) else None
        return super().slower_than(tolerance) or own


def load(paths: Iterable[Path]) -> list[ApexRow]:
    """The rows in pytest-benchmark's JSON files, in a readable order."""
    rows = read(paths, FAMILY, ApexRow)
    jobs = list(JOBS)
    rows.sort(key=lambda r: (r.machine, MODELS.index(r.model), r.op, jobs.index(r.job)))
    return rows
