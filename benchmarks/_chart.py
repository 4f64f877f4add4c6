"""The bar chart of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks._rows import Row, section_key

_Half = tuple[Callable[[Any, Sequence[Row]], None], list[Row]]
_Pair = tuple[_Half | None, _Half | None]
COLORS = {"fusedtrain": "#1b6ca8", "eager": "#c9c9c9", "compile": "#e8a33d"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """The bar chart: speed-up of every op, and bandwidths where torch.compile was a rival.

    Below these, speed-ups of the layers of networks.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pairs: list[_Pair] = []
    for _, members in groupby(rows, key=lambda row: row.machine):
        of_machine = list(members)
        single = [row for row in of_machine if not row.model]
        if single:
            pairs.append(
                (
                    (_draw_ratios, _widest(single)),
                    (_draw_bandwidths, _largest_compiled(single)),
                )
            )
        layers = _sections([row for row in of_machine if row.model])
        halves: list[_Half | None] = [(_draw_ratios, section) for section in layers]
        halves += [None] * (len(halves) % 2)
        pairs += zip(halves[::2], halves[1::2], strict=True)
    heights = [2.2 + 0.34 * max(len({r.name for r in half[1]}) for half in pair if half)
               for pair in pairs]  # fmt: skip
    figure, axes = plt.subplots(
        len(pairs),
        2,
        figsize=(14, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for places, pair in zip(axes, pairs, strict=True):
        for place, half in zip(places, pair, strict=True):
            if half is None:
                place.axis("off")
            else:
                half[0](place, half[1])
        assert pair[0]
        places[0].set_ylabel(pair[0][1][0].machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _sections(rows: Sequence[Row]) -> list[list[Row]]:
    return [list(members) for _, members in groupby(rows, key=section_key)]


def _widest(rows: Sequence[Row]) -> list[Row]:
    """The dtype and size with the most ops; float32 and the larger size where equal."""
    return max(_sections(rows), key=lambda s: (len(s), s[0].dtype == "float32", s[0].numel))


def _largest_compiled(rows: Sequence[Row]) -> list[Row]:
    """The largest size that has all rivals, float32 if there."""
    return max(
        _sections(rows),
        key=lambda s: ("compile" in s[0].ratio, s[0].dtype == "float32", s[0].numel),
    )


def _draw_ratios(axes: Any, rows: Sequence[Row]) -> None:
    passes = sorted({row.pass_name for row in rows})
    last = {row.name: row.ratio.get("eager", 0.0) for row in rows if row.pass_name == passes[-1]}
    ops = sorted({row.name for row in rows}, key=lambda name: last.get(name, 0.0))
    height = 0.8 / len(passes)
    colors = ("#cfe3f4", "#8ec1e8", "#1b6ca8")[-len(passes) :]
    for index, (name, color) in enumerate(zip(passes, colors, strict=False)):
        bars = {row.name: row.ratio.get("eager", 0.0) for row in rows if row.pass_name == name}
        drawn = axes.barh(
            [y + height * (len(passes) / 2 - index - 0.5) for y in range(len(ops))],
            [bars.get(op, 0.0) for op in ops],
            height,
            label=name,
            color=color,
        )
        axes.bar_label(drawn, fmt=lambda x: f"{x:.2f}" if x else "", fontsize=7, padding=2)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(ops)), ops)
    axes.set_xlabel("eager time / fusedtrain time (above 1: fusedtrain is faster)")
    axes.set_title(f"against eager: {rows[0].title}", fontsize=9 if rows[0].model else None)
    axes.legend(loc="lower right")
    axes.margins(x=0.1, y=0.01)


def _percent_of_copy(row: Row, which: str) -> float:
    return 100 * row.gb_per_s.get(which, 0.0) / row.gb_per_s["copy_fresh"]


def _draw_bandwidths(axes: Any, rows: Sequence[Row]) -> None:
    name = sorted({row.pass_name for row in rows})[-1]
    shown = [row for row in rows if row.pass_name == name]
    shown.sort(key=lambda row: row.percent_of_copy)
    series = [s for s in COLORS if any(s in row.gb_per_s for row in shown)]
    height = 0.8 / len(series)
    for index, which in enumerate(series):
        drawn = axes.barh(
            [y + height * (len(series) / 2 - index - 0.5) for y in range(len(shown))],
            [_percent_of_copy(row, which) for row in shown],
            height,
            label=which,
            color=COLORS[which],
        )
        axes.bar_label(drawn, fmt=lambda x: f"{x:.0f}" if x else "", fontsize=7, padding=2)
    axes.axvline(100, color="black", linewidth=1)
    axes.set_yticks(range(len(shown)), [row.name for row in shown])
    axes.set_xlabel("percent of the bandwidth of x.clone() in the same rounds")
    axes.set_title(f"{name}: {rows[0].title}")
    axes.legend(loc="lower right")
    axes.margins(x=0.1, y=0.01)
