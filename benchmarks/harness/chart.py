"""The bar chart of a family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import Row

BLUE, LIGHT, PALE, GREY, DARK, ORANGE = (
    "#1b6ca8", "#8ec1e8", "#cfe3f4", "#c9c9c9", "#8a8a8a", "#e8a33d",
)  # fmt: skip
COLORS = {
    "fusedtrain": BLUE, "Apex's calls": BLUE, "forward+backward": BLUE, "store": LIGHT,
    "own step": LIGHT, "backward": PALE, "forward": LIGHT, "own, max_grad_norm": PALE,
    "eager": GREY, "strongest": GREY, "fused": GREY, "foreach": DARK, "compile": ORANGE,
    "masters": ORANGE,
}  # fmt: skip
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

    @property
    def height(self) -> float:
        """In inches."""
        return 1.7 + len(self.groups) * (0.12 + 0.13 * max(2, len(self.series)))


def draw(figure_rows: Sequence[tuple[str, Sequence[Panel]]], path: Path) -> None:
    """Each machine's panels side by side, in rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [max(panel.height for panel in panels) for _, panels in figure_rows]
    figure, axes = plt.subplots(
        len(figure_rows), max(len(panels) for _, panels in figure_rows),
        figsize=(14, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained",
    )  # fmt: skip
    before = ""
    for places, (machine, panels) in zip(axes, figure_rows, strict=True):
        for number, place in enumerate(places):
            if number >= len(panels):
                place.axis("off")
                continue
            panel, left = panels[number], panels[number - 1] if number else None
            heading = machine if left is None and machine != before else ""
            _draw(place, panel, left, "\n".join(filter(None, (heading, panel.title))))
        before = machine
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axes: Any, panel: Panel, left: Panel | None, title: str) -> None:
    """Names and legend are not repeated where the panel to the left has the same."""
    height = 0.84 / len(panel.series)
    bars: dict[str, list[tuple[float, float, str]]] = {who: [] for who in panel.series}
    for group in range(len(panel.groups)):
        there = [who for who, values in panel.series.items() if values[group] is not None]
        for number, who in enumerate(there):
            value = panel.series[who][group] or 0.0
            place = height * ((len(there) - 1) / 2 - number) - group
            bars[who].append((place, value, panel.text(who, group, value)))
    for who, of_who in bars.items():
        places, values, texts = zip(*of_who, strict=True) if of_who else ((), (), ())
        drawn = axes.barh(places, values, height, color=COLORS.get(who, DARK), label=who)
        axes.bar_label(drawn, texts, fontsize=7, padding=2)
    if panel.line is not None:
        axes.axvline(panel.line, color="black", linewidth=1)
    if left is None or panel.groups != left.groups:
        axes.set_yticks([-group for group in range(len(panel.groups))], panel.groups, fontsize=8)
    else:
        axes.set_yticks([])
    axes.set_xlabel(panel.label)
    several = len(panel.series) > 1 and (left is None or [*panel.series] != [*left.series])
    axes.set_title(title, loc="left", fontsize=9, pad=20 if several else 6)
    if several:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=len(panel.series), frameon=False,
            fontsize=8, borderaxespad=0.1, columnspacing=1, handlelength=1.5,
        )  # fmt: skip
    axes.margins(x=_room([bar for of_who in bars.values() for bar in of_who]), y=0.01)


def _room(bars: Sequence[tuple[float, float, str]]) -> float:
    """To the right of the longest bar, as a share of it, so that all texts end within the panel; a
    character takes 1.1 % of its width."""
    longest = max((value for _, value, _ in bars), default=0.0) or 1.0
    ends = [value / longest / (1 - min(0.011 * len(text), 0.6)) for _, value, text in bars]
    return max([1.18, *ends]) - 1
