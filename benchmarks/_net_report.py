"""Tables, summary and bar chart of whole networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks._net_rows import NetRow
from benchmarks._networks import JOBS
from benchmarks._tables import Table, show, strongest_text
from benchmarks._tables import markdown as markdown_of
from benchmarks._tables import summary as summary_of

COLUMNS = (
    "job", "network", "ms", "images/s", "saved MB", "vs strongest", "99 %", "all rivals",
    "fusedtrain",
)  # fmt: skip
LEGEND = (
    "Training steps are forward, backward and the optimizer (torch's own for all). inference: "
    "no_grad; compile: with freezing. saved MB: kept for backward, eager -> fusedtrain. vs: the "
    "rival's time / fusedtrain's, above 1 fusedtrain is faster. fusedtrain: what it changed."
)
COLORS = {"eager": "#c9c9c9", "compile": "#e8a33d", "fusedtrain": "#1b6ca8"}


def _cells(row: NetRow) -> list[str]:
    saved = [row.saved.get(who, 0) / 1e6 for who in ("eager", "fusedtrain")]
    milliseconds = row.ns["fusedtrain"] / 1e6
    return [
        JOBS[row.job],
        row.name,
        f"{milliseconds:.4g}",
        f"{1e3 * row.batch / milliseconds:.4g}",
        " -> ".join(f"{megabytes:.1f}" for megabytes in saved) if all(saved) else "",
        *strongest_text(row),
        row.note,
    ]


def _tables(rows: Sequence[NetRow]) -> Iterator[Table]:
    for machine, members in groupby(rows, key=lambda row: row.machine):
        table = Table(f"networks ({machine})", COLUMNS, frozenset({0, 1, 7, 8}))
        table.rows = [(row, _cells(row)) for row in members]
        yield table


def print_tables(rows: Sequence[NetRow], tolerance: float) -> None:
    """The full tables, one per machine, with rich."""
    show(_tables(rows), LEGEND, tolerance, width=190)


def markdown(rows: Sequence[NetRow], dtypes: Sequence[str]) -> str:
    """The tables in Markdown, of all dtypes: a network has but one."""
    del dtypes
    return markdown_of(_tables(rows), 2)


def summary(rows: Sequence[NetRow], tolerance: float) -> str:
    """Counts, geometric means and the rows that are slower than the strongest rival."""
    return summary_of("networks", rows, lambda row: f"{row.job} {row.name}", tolerance)


def draw(rows: Sequence[NetRow], path: Path) -> None:
    """The bar chart: each rival's time next to fusedtrain's, and the bytes saved for backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    machines = [list(members) for _, members in groupby(rows, key=lambda row: row.machine)]
    figure, axes = plt.subplots(
        len(machines),
        2,
        figsize=(14, sum(2.2 + 0.7 * len(members) for members in machines)),
        squeeze=False,
        layout="constrained",
        width_ratios=(3, 2),
    )
    for (left, right), members in zip(axes, machines, strict=True):
        labels = [f"{JOBS[row.job]}\n{row.name}" for row in members]
        rivals = [who for who in COLORS if any(who in row.ratio for row in members)]
        for number, who in enumerate(rivals):
            height = 0.8 / len(rivals)
            places = [height * (len(rivals) / 2 - number - 0.5) - i for i in range(len(members))]
            ratios = [row.ratio.get(who, 0.0) for row in members]
            bars = left.barh(places, ratios, height, color=COLORS[who], label=who)
            left.bar_label(bars, [f"{x:.2f}" if x else "" for x in ratios], fontsize=7, padding=2)
        left.axvline(1, color="black", linewidth=1)
        left.set_yticks([-i for i in range(len(members))], labels, fontsize=8)
        left.set_xlabel("rival's time / fusedtrain's (above 1: fusedtrain is faster)")
        left.set_title(members[0].machine, loc="left", fontsize=9, pad=24)
        left.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
        left.margins(x=0.1)
        for shift, who in ((0.2, "eager"), (-0.2, "fusedtrain")):
            places = [shift - i for i in range(len(members))]
            megabytes = [row.saved.get(who, 0) / 1e6 for row in members]
            bars = right.barh(places, megabytes, 0.4, color=COLORS[who], label=who)
            texts = [f"{x:.0f}" if x else "" for x in megabytes]
            right.bar_label(bars, texts, fontsize=7, padding=2)
        right.set_yticks([])
        right.set_xlabel("saved for backward, MB")
        right.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
        right.margins(x=0.1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
