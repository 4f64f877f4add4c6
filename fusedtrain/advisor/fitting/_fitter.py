"""The order of a run of `fit`: memory of small batches, the largest ones, a plan, the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ..._recompute import MemoryPlan
from ..._text import memory_text
from ...planning._batches import BatchPlanner
from ._affine import MOST, PROBES, largest_fitting, predicted
from ._checkpoint import blocks_of
from ._report import FitReport, FitRow, sentences
from ._trainer import CHECKPOINTS, COMPILED, WAYS, Trainer, Way

_PROFILED = 32  # samples in the larger batch that is profiled, at most
_ROUNDS = 5  # in which each way is timed once, at most
_SECONDS = 60.0  # for these rounds, more or less
_LESS = 0.95  # of a batch for which no plan was found is tried next
_TRIES = 4  # of plans
_ABOVE = 1.01  # times the lowest simulated peak: the last budget of a curve
_BUDGETS = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of a curve: of eager's peak beside `fixed`


@dataclass
class _Candidate:
    """A row in the making."""

    row: FitRow
    way: Way
    times: list[float] = field(default_factory=list)


class Fitter:
    """Fills in the report. `batch`: None for the largest one."""

    def __init__(
        self, trainer: Trainer, report: FitReport, batch: int | None, begin: Callable[[str], None]
    ) -> None:
        self._trainer, self._report, self._batch, self._begin = trainer, report, batch, begin
        self._limit = report.memory
        # A step that is predicted above this number of bytes is never tried.
        self._safe = self._limit if trainer.available is None else trainer.available
        self._peaks: dict[str, dict[int, int]] = {}
        self._candidates: list[_Candidate] = []
        self._notes: list[str] = []
        self._planner: BatchPlanner | None = None
        self._curve: list[_Candidate] = []

    def run(self, curve: bool, compiled: bool) -> None:
        trainer = self._trainer
        for way in WAYS:
            self._begin(f"{way}: the memory of {PROBES[0]} and {PROBES[1]} samples")
            trainer.switch(way)
            self._peaks[way] = {number: trainer.peak(number) for number in PROBES}
            if self._batch is None:
                self._add_largest(way)
            else:
                self._add(way, self._batch)
        self._add_plan()
        self._time(self._candidates)
        if curve and self._planner is not None:
            self._add_curve(self._planner, compiled)
        if self._safe < self._limit:
            self._notes.append(
                f"A step may take {memory_text(self._safe)} here, less than "
                f"{memory_text(self._limit)}: larger ones are predicted, not tried."
            )

    def finish(self) -> None:
        """Writes rows and summary, of whatever was measured."""
        self._report.rows = [_timed(one) for one in self._candidates]
        self._report.curve = [row for row in map(_timed, self._curve) if row.seconds]
        self._report.summary = sentences(self._report.rows, self._limit, self._batch) + self._notes
        for one in self._candidates:
            if isinstance(one.way, MemoryPlan) and one.row.measured:
                self._report.plan = self._completed(one)

    def _add(self, way: str, batch: int) -> None:
        """The row of a batch, run if there is memory for it."""
        peaks = self._peaks[way]
        expected = round(predicted(peaks, batch))
        if batch not in peaks and expected <= self._safe:
            peaks |= {batch: peak} if (peak := self._peak(batch, way)) is not None else {}
        peak = peaks.get(batch, expected)
        row = FitRow(way, batch, peak, peak <= self._limit, measured=batch in peaks)
        self._candidates.append(_Candidate(row, way))

    def _add_largest(self, way: str) -> None:
        limit = min(self._limit, self._safe)
        batch = largest_fitting(lambda number: self._peak(number, way), self._peaks[way], limit)
        self._add(way, batch or PROBES[0])

    def _add_plan(self) -> None:
        trainer, batch = self._trainer, self._batch
        limit = min(self._limit, self._safe)
        if limit <= trainer.fixed(batch or PROBES[0]):
            return  # parameters, buffers, inputs and the optimizer's states do not fit
        trainer.switch("convert")
        profiled = self._profiled()
        self._begin(f"plan: the functions of {profiled // 2} and {profiled} samples")
        try:
            planner = BatchPlanner(
                trainer.model, trainer.begin, trainer.device, (profiled // 2, profiled)
            )
        except (RuntimeError, ValueError) as error:
            self._notes.append(f"No plan was made: {error}.")
            return
        self._planner = planner
        if batch is None:
            self._begin("plan: the largest batch")
            largest = planner.largest(lambda number: limit - trainer.fixed(number), MOST)
            batch = max(largest, *(one.row.batch for one in self._candidates if one.row.fits), 2)
        for _ in range(_TRIES):
            try:
                plan = self._planned(planner, batch, limit - trainer.fixed(batch))
            except ValueError as error:
                if self._batch is None and batch > 2:
                    batch = max(2, int(_LESS * batch))
                    continue
                self._notes.append(f"No plan trains batch {batch}: {error}.")
                return
            peak = plan.peak + trainer.fixed(batch)
            remark = f"backward recomputes {plan.recomputed} of {len(plan.steps)} outputs"
            self._candidates.append(
                _Candidate(FitRow("plan", batch, peak, True, remark=remark), plan)
            )
            return

    def _planned(self, planner: BatchPlanner, batch: int, limit: int) -> MemoryPlan:
        def measure(plan: MemoryPlan) -> int:
            self._trainer.switch(plan)
            peak = self._peak(batch)
            return 2 * limit if peak is None else peak - self._trainer.fixed(batch)

        return planner.plan(
            batch, limit, measure, lambda stage: self._begin(f"plan for {batch} samples: {stage}")
        )

    def _profiled(self) -> int:
        """The larger batch of the two that are profiled; nothing is recomputed meanwhile."""
        peaks = self._peaks["convert"]
        batch = min(_PROFILED, self._batch or max(peaks))
        while batch > PROBES[1] and predicted(peaks, batch) > self._safe:
            batch //= 2
        return max(batch, PROBES[1])

    def _peak(self, batch: int, way: str = "") -> int | None:
        if way:
            self._begin(f"{way}: the memory of {batch} samples")
        try:
            return self._trainer.peak(batch)
        except torch.OutOfMemoryError:
            self._trainer.forget()
            return None

    def _add_curve(self, planner: BatchPlanner, compiled: bool) -> None:
        """Ways to train the batch of the first row, and plans of falling budgets."""
        trainer, batch = self._trainer, self._candidates[0].row.batch
        fixed = trainer.fixed(batch)
        blocks = len(blocks_of(trainer.model))
        ways = [*WAYS, *(way for way, every in CHECKPOINTS.items() if blocks > every - 1)]
        if predicted(self._peaks["eager"], batch) > self._safe:
            ways = ways[2:]  # these need less memory
        for way in [*ways, *(COMPILED if compiled else ())]:
            self._begin(f"curve: {way}")
            trainer.switch(way)
            if way in COMPILED:
                trainer.seconds(batch)  # is compiled, and takes memory for that
            if (peak := self._peak(batch)) is not None:
                row = FitRow(way, batch, peak, peak <= self._limit)
                self._curve.append(_Candidate(row, way))
        trainer.switch("convert")
        eager = predicted(self._peaks["eager"], batch) - fixed
        lowest = _ABOVE * planner.lowest(batch) / max(eager, 1)
        for share in [*(share for share in _BUDGETS if share > lowest), lowest]:
            try:
                plan = self._planned(planner, batch, int(share * eager))
            except ValueError:
                break
            peak = plan.peak + fixed
            row = FitRow("plan", batch, peak, peak <= self._limit, remark=f"budget {share:.2g}")
            self._curve.append(_Candidate(row, plan))
        self._time(self._curve)

    def _time(self, candidates: list[_Candidate]) -> None:
        """Each way takes a step in turn, so that a busy machine slows all of them."""
        candidates = [one for one in candidates if one.row.measured]
        begun = time.monotonic()
        for number in range(_ROUNDS):
            if number and (time.monotonic() - begun) * (number + 1) / number > _SECONDS:
                break
            self._begin(f"the time of a step, round {number + 1}")
            for one in candidates:
                self._trainer.switch(one.way)
                self._trainer.seconds(one.row.batch)  # memory is new to this step
                one.times.append(self._trainer.seconds(one.row.batch))

    def _completed(self, one: _Candidate) -> MemoryPlan:
        assert isinstance(one.way, MemoryPlan)
        batch = one.row.batch
        fixed, plan = self._trainer.fixed(batch), one.way
        milliseconds = 1e3 * (one.row.seconds or 0.0) - plan.extra_milliseconds
        return replace(
            plan,
            model=self._trainer.fingerprint,
            eager_peak=round(predicted(self._peaks["eager"], batch)) - fixed,
            milliseconds=max(milliseconds, 0.0),
        )


def _timed(one: _Candidate) -> FitRow:
    one.row = replace(one.row, seconds=statistics.median(one.times) if one.times else None)
    return one.row
