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

    def breaks_promise(self, tolerance: float) -> bool:
        """Slower than fusedtrain's own step by more than ``tolerance``, and surely so."""
        return self.ratio_interval[OWN][1] < 1 and self.ratio[OWN] < 1 / (1 + tolerance)

    def is_slower(self, tolerance: float) -> bool:
        """Than one of torch's ways, or than it promises."""
        return super().is_slower(tolerance) or self.breaks_promise(PROMISE)


def load(paths: Iterable[Path]) -> list[ApexRow]:
    """The rows in pytest-benchmark's JSON files, in a readable order."""
    rows = read(paths, FAMILY, ApexRow)
    jobs = list(JOBS)
    rows.sort(key=lambda r: (r.machine, MODELS.index(r.model), r.op, jobs.index(r.job)))
    return rows
