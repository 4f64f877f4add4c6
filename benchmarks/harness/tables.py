"""Tables and the summary of a family's rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import geometric_mean
from typing import Any, NamedTuple

from benchmarks.harness.chart import Panel
from benchmarks.harness.rows import Row
from fusedtrain._text import time_text

WIDTH = 240  # of what goes to a file
UNCERTAIN = ["", "\\* measured while the machine was busy: the ratios are uncertain"]


class Limits(NamedTuple):
    """Limits to how much slower than its rival a row may be."""

    tolerance: float = 0.05
    overhead_us: float = 5.0  # a call of a small op on the CPU


class Column(NamedTuple):
    """A column of a table."""

    name: str
    cell: Callable[[Row], str]
    left: bool = False  # a text
    optional: bool = False  # not in a table in which all of its cells are empty


def loses_to_strongest(row: Row, limits: Limits) -> str | None:
    """The strongest rival, if it is surely faster."""
    best = row.strongest()
    return best if row.loses_to(best, limits.tolerance) else None


def against_strongest(row: Row) -> dict[str, float]:
    """For the summary: the ratio to the strongest rival."""
    best = row.strongest()
    return {"vs the strongest rival": row.ratio[best]} if best else {}


@dataclass(frozen=True)
class Report:
    """How the rows of a family are shown."""

    name: str
    title: Callable[[Row], str]  # of the table that the row is in, but for the machine
    columns: Sequence[Column]
    key: Callable[[Row], Any]  # the order of the rows of a machine
    label: Callable[[Row], str]  # the row in the summary
    legend: Callable[[Sequence[Row]], str]
    panels: Callable[[Sequence[Row]], list[list[Panel]]]  # the chart of a machine
    loses_to: Callable[[Row, Limits], str | None] = loses_to_strongest
    means: Callable[[Row], Mapping[str, float]] = against_strongest  # numbers to take the mean of
    notes: Callable[[Sequence[Row]], Iterable[str]] = lambda rows: ()  # further lines of a summary
    lines: Callable[[Row], Sequence[Row]] = lambda row: [row]  # of a table, for one row
    markdown: Callable[[Report, Sequence[Row]], str] = lambda report, rows: plain(report, rows)
    marked: str = "ms"  # the column whose Markdown cells tell that the row is noisy
    chosen_by: Collection[str] = ()  # what --dtype and --numel select


def sections(report: Report, rows: Sequence[Row]) -> Iterator[tuple[Row, list[Row]]]:
    """The rows of each table, and the first of them."""
    for _, members in groupby(rows, key=lambda row: (row.machine, report.title(row))):
        section = list(members)
        yield section[0], section


def _table(report: Report, section: Sequence[Row]) -> tuple[list[Column], list[list[str]]]:
    """The columns, and the cells of the lines."""
    lines = [line for row in section for line in report.lines(row)]
    cells = {column: [column.cell(line) for line in lines] for column in report.columns}
    shown = [column for column in cells if any(cells[column]) or not column.optional]
    return shown, [[cells[column][i] for column in shown] for i in range(len(lines))]


def show(report: Report, rows: Sequence[Row], limits: Limits) -> None:
    """The full tables, with rich: slower rows are red."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for first, section in sections(report, rows):
        table = Table(title=f"{report.title(first)} ({first.machine})", title_justify="left")
        columns, cells = _table(report, section)
        for column in columns:
            table.add_column(column.name, justify="left" if column.left else "right")
        table.add_column("")
        of_lines = [row for row in section for _ in report.lines(row)]
        for row, line in zip(of_lines, cells, strict=True):
            slower = report.loses_to(row, limits) is not None
            flags = " ".join(["SLOWER"] * slower + ["noisy"] * row.noisy)
            table.add_row(*line, flags, style="red" if slower else None)
        console.print(table)
    console.print(report.legend(rows), style="dim")


def plain(report: Report, rows: Sequence[Row]) -> str:
    """The same tables in Markdown; noisy rows have a mark."""
    parts = []
    for first, section in sections(report, rows):
        columns, cells = _table(report, section)
        place = [column.name for column in columns].index(report.marked)
        lines = [
            f"{report.title(first)} ({first.machine})",
            "",
            f"| {' | '.join(column.name for column in columns)} |",
            f"| {' | '.join('---' if column.left else '---:' for column in columns)} |",
        ]
        of_lines = [row for row in section for _ in report.lines(row)]
        for row, line in zip(of_lines, cells, strict=True):
            line[place] += " \\*" if row.noisy else ""
            lines.append(f"| {' | '.join(line)} |")
        lines += UNCERTAIN * any(row.noisy for row in section)
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def summary(report: Report, rows: Sequence[Row], limits: Limits) -> str:
    """Counts, geometric means, and the rows that are slower than they may be."""
    lines = []
    for machine, members in groupby(rows, key=lambda row: row.machine):
        of_machine = list(members)
        noisy = sum(row.noisy for row in of_machine)
        lines.append(f"{report.name}, {machine}: {len(of_machine)} rows, {noisy} noisy")
        means: dict[str, list[float]] = {}
        for row in of_machine:
            for name, value in report.means(row).items():
                means.setdefault(name, []).append(value)
        lines += [
            f"  {name}: {geometric_mean(values):.2f}x (geometric mean of {len(values)}), from "
            f"{min(values):.2f}x to {max(values):.2f}x"
            for name, values in means.items()
        ]
        lines += report.notes(of_machine)
    slower = [(row, rival) for row in rows if (rival := report.loses_to(row, limits))]
    lines.append(f"Slower than a rival beyond noise (> {limits.tolerance:.0%}): {len(slower)} rows")
    lines += [
        f"  {report.label(row)}: {row.ratio[rival]:.2f}x {rival}, "
        f"{time_text(row.ns['fusedtrain'] / 1e9)} against {time_text(row.ns[rival] / 1e9)}"
        f"{' (noisy)' if row.noisy else ''}"
        for row, rival in slower
    ]
    return "\n".join(lines)


# --- cells ---


def ratio_text(rival: str) -> Callable[[Row], str]:
    """The cell of a rival's ratio."""
    return lambda row: f"{row.ratio[rival]:.2f}x" if rival in row.ratio else ""


def interval_text(rival: str) -> Callable[[Row], str]:
    """The cell of that ratio's interval."""
    return lambda row: "-".join(f"{bound:.2f}" for bound in row.ratio_interval.get(rival, ()))


def pair(values: Mapping[str, Any], row: Row, form: str, unit: float = 1) -> str:
    """fusedtrain's value and that of the strongest rival, which may lack."""
    names = ["fusedtrain", *([best] if (best := row.strongest()) else [])]
    scaled = {name: value / unit if unit != 1 else value for name, value in values.items()}
    return " / ".join(format(scaled[name], form) if name in scaled else "-" for name in names)


def size_text(row: Row) -> str:
    """Size of a network, for an optimizer."""
    return f"{row.numel / 1e6:.1f} M parameters in {row['tensors']} tensors"


def counted(row: Row) -> str:
    """Unit of the counts on the CPU, where ops stand for launches."""
    return " ops" if row.device_type == "cpu" else ""


def _of_strongest(text: Callable[[str], Callable[[Row], str]]) -> Callable[[Row], str]:
    return lambda row: text(best)(row) if (best := row.strongest()) else ""


def _ranked(row: Row) -> str:
    names = sorted(row.ratio, key=row.ratio.__getitem__)
    return ", ".join(f"{name} {ratio_text(name)(row)}" for name in names)


# The ratio to the strongest rival, its interval, and the ratios to all.
STRONGEST = (
    Column("vs strongest", _of_strongest(lambda who: lambda row: f"{row.ratio[who]:.2f}x {who}")),
    Column("99 %", _of_strongest(interval_text)),
    Column("all rivals", _ranked, left=True),
)
