"""Findings of a run of `fit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._recompute import MemoryPlan
from ..._text import column_lines, memory_text, time_text

HEADINGS = ("way", "batch", "a step", "an image", "peak", "fits", "")


@dataclass(frozen=True)
class FitRow:
    """One way to train a batch.

    Args:
        way: "eager", "convert", "recompute" or "plan"; of a curve also "checkpoint",
            torch.utils.checkpoint around each block.
        batch: samples in a step.
        peak: the most bytes at a moment of a step: parameters, buffers, inputs, gradients, the
            optimizer's states, everything kept for backward or made meanwhile.
        fits: whether the peak is within the memory that was asked for.
        seconds: the median time of a step; None where no step was timed.
        measured: whether a step had this peak; otherwise smaller batches predict it.
        remark: details, in words.
    """

    way: str
    batch: int
    peak: int
    fits: bool
    seconds: float | None = None
    measured: bool = True
    remark: str = ""

    @property
    def image(self) -> float:
        """Seconds for a sample."""
        return (self.seconds or 0.0) / self.batch


@dataclass
class FitReport:
    """The result of :func:`fusedtrain.fit`. ``str()`` is a table and a summary.

    Args:
        model: as it was named.
        device: its name.
        memory: bytes that were asked for.
        precision: "fp32", or that of autocast: "bf16", "fp16".
        rows: a way to train each, as it was measured.
        plan: of the row "plan", for `convert(model, memory=plan)`; None without one.
        summary: what was won, in sentences.
        partial: why rows are missing; empty where all are there.
        curve: where it was asked for, the ways to train one batch, with plans of several budgets.
    """

    model: str
    device: str
    memory: int
    precision: str = "fp32"
    rows: list[FitRow] = field(default_factory=list)
    plan: MemoryPlan | None = None
    summary: list[str] = field(default_factory=list)
    partial: str = ""
    curve: list[FitRow] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as values of JSON's types, without the plan."""
        rows, curve = (
            [{**vars(row), "image": row.image if row.seconds else None} for row in some]
            for some in (self.rows, self.curve)
        )
        names = ("model", "device", "memory", "precision", "summary", "partial")
        return {**{name: getattr(self, name) for name in names}, "rows": rows, "curve": curve}

    def table(self) -> list[list[str]]:
        """The rows as text; `HEADINGS` are the names of the columns."""
        return [_cells(row) for row in self.rows]

    def __str__(self) -> str:
        lines = column_lines([list(HEADINGS), *self.table()], (0, 6)) if self.rows else []
        if self.partial:
            lines.insert(0, f"PARTIAL: {self.partial}")
        return "\n".join([*lines, "", *self.summary])


def _cells(row: FitRow) -> list[str]:
    return [
        row.way,
        str(row.batch),
        time_text(row.seconds) if row.seconds else "",
        time_text(row.image) if row.seconds else "",
        memory_text(row.peak),
        "yes" if row.fits else "no",
        row.remark if row.measured else "; ".join(filter(None, ["predicted", row.remark])),
    ]


def sentences(rows: Sequence[FitRow], memory: int, batch: int | None) -> list[str]:
    """The summary: batches and times against eager's, or that nothing fits."""
    size = memory_text(memory)
    fitting = [row for row in rows if row.fits and row.seconds]
    if not fitting:
        lowest = min(rows, key=lambda row: row.peak, default=None)
        least = (
            f": the lowest peak is {memory_text(lowest.peak)}, by {lowest.way}" if lowest else ""
        )
        number = f"batch {batch}" if batch else "a batch of 2"
        return [f"No way trains {number} in {size}{least}. Take a smaller batch, or more memory."]
    eager = next((row for row in fitting if row.way == "eager"), None)
    return _at_batch(rows, fitting, size) if batch else _largest(fitting, eager, size)


def _at_batch(rows: Sequence[FitRow], fitting: Sequence[FitRow], size: str) -> list[str]:
    best = min(fitting, key=lambda row: row.image)
    text = f"The fastest way to train batch {best.batch} in {size}: {best.way}"
    eager = rows[0]
    if best is eager:
        return [f"{text}."]
    if eager.seconds:
        text += f", {best.image / eager.image:.2f}x of eager's time"
    text += f", {best.peak / eager.peak:.2f}x of its peak"
    return [f"{text}{'' if eager.fits else '; eager does not fit'}."]


def _largest(fitting: Sequence[FitRow], eager: FitRow | None, size: str) -> list[str]:
    best = max(fitting, key=lambda row: (row.batch, -row.image))
    if eager is None:
        return [f"{best.way}: batch {best.batch} in {size}, where eager fits none."]
    if best.batch == eager.batch:
        return [f"eager: batch {best.batch} in {size}; no other way fits a larger one."]
    lines = [
        f"{row.way}: batch {row.batch} instead of {eager.batch} in {size}, "
        f"{row.image / eager.image:.2f}x of the time an image."
        for row in sorted(fitting, key=lambda row: row.batch)
        if row.batch > eager.batch
    ]
    fastest = min(fitting, key=lambda row: row.image)
    return [*lines, f"Least time an image: {fastest.way}, batch {fastest.batch}."]
