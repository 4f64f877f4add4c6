"""The bars of a family's chart: numbers in groups. `svg.py` draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.rows import Row

FASTER = "time / fusedtrain's (above 1: fusedtrain is faster)"


Series = Mapping[str, Sequence[float | None]]


def bars(
    rows: Sequence[Row], names: Iterable[str], value: Callable[[Row, str], float | None]
) -> Series:
    """A bar of each name for each row; names without any bar are left out."""
    series = {who: [value(row, who) for row in rows] for who in names}
    return {who: values for who, values in series.items() if any(v is not None for v in values)}


@dataclass(frozen=True)
class Panel:
    """Bars in groups, the first on top.

    Args:
        label: of the axis.
        groups: their names.
        series: who -> a number for each group; None where there is no bar.
        title: above the panel.
        text: at the end of a bar, from who, group and number.
        line: where no difference is.
        intervals: who -> the ends of a bar's interval, for each group.
        missing: who has no bar in any group -> why.
        most: longer bars are cut here.
    """

    label: str
    groups: Sequence[str]
    series: Series
    title: str = ""
    text: Callable[[str, int, float], str] = lambda who, group, value: f"{value:.2f}"
    line: float | None = None
    intervals: Mapping[str, Sequence[tuple[float, float] | None]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    most: float = math.inf
