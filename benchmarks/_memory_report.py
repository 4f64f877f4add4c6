"""Tables, summary and bar chart of memory in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks._memory_rows import MemoryRow
from benchmarks._tables import Table, show
from benchmarks._tables import markdown as markdown_of

CONTESTANTS = ("eager", "compile", "store", "fusedtrain")
COLUMNS = (
    "network", "who", "kept MB", "of eager", "peak MB", "of eager", "largest batch", "of eager",
    "time, of eager", "of store",
)  # fmt: skip
LEGEND = (
    "A training step without the optimizer. kept: allocated after forward; peak: at most in "
    "forward and backward, gradients included. largest batch: that needs no more than eager's. "
    "store, fusedtrain (recompute): fusedtrain.convert with that memory."
)
COLORS = {"eager": "#c9c9c9", "compile": "#e8a33d", "store": "#7fb2d9", "fusedtrain": "#1b6ca8"}


def _cells(row: MemoryRow, who: str) -> list[str]:
    def ratio(values: dict[str, int]) -> str:
        return f"{values[who] / values['eager']:.2f}x" if who in values else ""

    fits = str(row.fits[who]) if who in row.fits else ""
    times = [
        f"{row.ns[who] / row.ns[other]:.2f}x" if who in row.ns else ""
        for other in ("eager", "store")
    ]
    return [
        row.name if who == "eager" else "",
        who,
        f"{row.kept[who] / 1e6:.1f}",
        ratio(row.kept),
        f"{row.peak[who] / 1e6:.1f}",
        ratio(row.peak),
        fits,
        ratio(row.fits),
        *times,
    ]


def _tables(rows: Sequence[MemoryRow]) -> Iterator[Table]:
    for machine, members in groupby(rows, key=lambda row: row.machine):
        table = Table(f"memory in training ({machine})", COLUMNS, frozenset({0, 1}))
        table.rows = [
            (row, _cells(row, who)) for row in members for who in CONTESTANTS if who in row.kept
        ]
        yield table


def print_tables(rows: Sequence[MemoryRow], tolerance: float) -> None:
    """The full tables, one per machine, with rich."""
    show(_tables(rows), LEGEND, tolerance, width=150)


def markdown(rows: Sequence[MemoryRow], dtypes: Sequence[str]) -> str:
    """The tables in Markdown, of all dtypes: a network has but one."""
    del dtypes
    return markdown_of(_tables(rows), 8)


def summary(rows: Sequence[MemoryRow], tolerance: float) -> str:
    """A line for each network."""
    del tolerance
    lines = []
    for row in rows:
        kept, fits = (v["fusedtrain"] / v["eager"] for v in (row.kept, row.fits))
        lines.append(
            f"memory, {row.name}: keeps {kept:.2f}x of eager's bytes, largest batch {fits:.2f}x, "
            f"time {1 / row.ratio['store']:.2f}x of store's{' SLOWER' * row.is_slower(0)}"
        )
    return "\n".join(lines)


def draw(rows: Sequence[MemoryRow], path: Path) -> None:
    """The bar chart: the peak, what is kept, and the largest batch, next to eager's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, 3, figsize=(14, 2.0 + 0.9 * len(rows)), squeeze=False, layout="constrained"
    )
    titles = {
        "kept": "kept by forward, of eager",
        "peak": "peak, of eager",
        "fits": "largest batch, of eager",
    }
    for axis, (field, title) in zip(axes[0], titles.items(), strict=True):
        for i, row in enumerate(rows):
            values = getattr(row, field)
            there = [who for who in CONTESTANTS if who in values]
            for number, who in enumerate(there):
                height = 0.8 / len(there)
                place = height * (len(there) / 2 - number - 0.5) - i
                bar = axis.barh(
                    place, values[who] / values["eager"], height, color=COLORS[who],
                    label=who if i == 0 else None,
                )  # fmt: skip
                axis.bar_label(bar, [f"{values[who] / values['eager']:.2f}"], fontsize=8, padding=2)
        names = [row.name if axis is axes[0][0] else "" for row in rows]
        axis.set_yticks([-i for i in range(len(rows))], names, fontsize=8)
        axis.set_title(title, loc="left", fontsize=9)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(loc="upper left", bbox_to_anchor=(0, -0.08), ncols=4, frameon=False)
    figure.suptitle(rows[0].machine, fontsize=9, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
