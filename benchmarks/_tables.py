"""Tables and the summary of rows that are compared with their strongest rival."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from benchmarks._rows import Contest


@dataclass
class Table:
    """Cells of equal rows; the columns in ``left`` are texts."""

    title: str
    columns: Sequence[str]
    left: frozenset[int]
    rows: list[tuple[Contest, list[str]]] = field(default_factory=list)


def show(tables: Iterable[Table], legend: str, tolerance: float, width: int = 150) -> None:
    """With rich: slower rows are red."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    if not console.is_terminal:
        console = Console(width=width)
    for table in tables:
        shown = RichTable(title=table.title, title_justify="left")
        for number, name in enumerate((*table.columns, "")):
            shown.add_column(name, justify="left" if number in table.left else "right")
        for row, cells in table.rows:
            slower = row.is_slower(tolerance)
            flags = " ".join(["SLOWER"] * slower + ["noisy"] * row.noisy)
            shown.add_row(*cells, flags, style="red" if slower else None)
        console.print(shown)
    console.print(legend, style="dim")


def markdown(tables: Iterable[Table], time: int) -> str:
    """For the README; noisy rows have a mark at the column of their time."""
    parts = []
    for table in tables:
        rules = ["---" if i in table.left else "---:" for i in range(len(table.columns))]
        lines = [
            table.title,
            "",
            f"| {' | '.join(table.columns)} |",
            f"| {' | '.join(rules)} |",
        ]
        for row, cells in table.rows:
            marked = [*cells]
            marked[time] += " \\*" if row.noisy else ""
            lines.append(f"| {' | '.join(marked)} |")
        if any(row.noisy for row, _ in table.rows):
            lines += ["", "\\* measured while the machine was busy: the ratios are uncertain"]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def strongest_text(row: Contest) -> list[str]:
    """The ratio to the strongest rival, its interval, and the ratios to all."""
    best = row.strongest
    if best is None:
        return ["", "", ""]
    low, high = row.ratio_interval[best]
    ranked = sorted(row.ratio, key=row.ratio.__getitem__)
    return [
        f"{row.ratio[best]:.2f}x {best}",
        f"{low:.2f}-{high:.2f}",
        ", ".join(f"{name} {row.ratio[name]:.2f}x" for name in ranked),
    ]


def summary(title: str, rows: Sequence[Any], label: Callable[[Any], str], tolerance: float) -> str:
    """Counts, geometric means and the rows that are slower than the strongest rival."""
    lines = []
    for machine, members in groupby(rows, key=lambda row: row.machine):
        of_machine = list(members)
        noisy = sum(row.noisy for row in of_machine)
        lines.append(f"{title}, {machine}: {len(of_machine)} rows, {noisy} noisy")
        ratios = [row.ratio[name] for row in of_machine if (name := row.strongest)]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(
                f"  vs the strongest rival: {mean:.2f}x (geometric mean of {len(ratios)}), from "
                f"{min(ratios):.2f}x to {max(ratios):.2f}x"
            )
    slower = [(row, name) for row in rows if (name := row.slower_than(tolerance))]
    lines.append(f"Slower than a rival beyond noise (> {tolerance:.0%}): {len(slower)} rows")
    lines += [
        f"  {label(row)}: {row.ratio[name]:.2f}x {name}{' (noisy)' if row.noisy else ''}"
        for row, name in slower
    ]
    return "\n".join(lines)
