"""Show benchmark results: a table, a Markdown table, a bar chart, and what is slower than eager.

python -m benchmarks.report RESULTS.json [...] [--png CHART.png] [--markdown] [--fail-slower]

Each family of benchmarks has a chart of its own beside that of the activations:
CHART-amp-step.png, CHART-batch-norm.png, CHART-conv-bn.png.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import (
    _memory_report,
    _memory_rows,
    _net_report,
    _net_rows,
    _step_report,
    _step_rows,
)
from benchmarks._chart import draw
from benchmarks._rows import BUSY, FAMILIES, LARGE, RIVALS, Row, load, section_key, size_text


def time_text(ns: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns / 1e3:.3g} us"


def _ratio_text(row: Row, rival: str) -> str:
    return f"{row.ratio[rival]:.2f}x" if rival in row.ratio else ""


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def print_tables(rows: Sequence[Row], tolerance: float, overhead_us: float) -> None:
    """The full tables, one per machine, dtype and size, with rich."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120 if not any(row.shape for row in rows) else 140)
    for _, members in groupby(rows, key=section_key):
        section = list(members)
        title = f"{section[0].title} ({section[0].machine})"
        table = Table(title=title, title_justify="left")
        table.add_column("op")
        table.add_column("pass")
        for name in ("time", "GB/s", "% copy", "% prealloc", "vs eager", "99 %", "vs compile"):
            table.add_column(name, justify="right")
        table.add_column("")
        for row in section:
            slower = row.is_slower(tolerance, overhead_us)
            interval = row.ratio_interval.get("eager")
            table.add_row(
                row.name,
                row.pass_name,
                time_text(row.ns["fusedtrain"]),
                f"{row.gb_per_s['fusedtrain']:.1f}",
                f"{row.percent_of_copy:.0f}",
                f"{row.percent_of_preallocated_copy:.0f}",
                _ratio_text(row, "eager"),
                f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else "",
                _ratio_text(row, "compile"),
                " ".join(["SLOWER"] * slower + ["noisy"] * row.noisy),
                style="red" if slower else None,
            )
        console.print(table)
    console.print(
        "vs X: X's time / fusedtrain's, the median over rounds that time both; above 1 is faster. "
        "% copy: of x.clone() of the same size; % prealloc: of out.copy_(x). noisy: the copy took "
        f"over {BUSY:g} times the best of this size, or fusedtrain over its own: do not quote.",
        style="dim",
    )


def markdown(rows: Sequence[Row], dtypes: Sequence[str], sizes: Sequence[int]) -> str:
    """One Markdown table per machine, dtype and size: a line per op, its passes side by side.

    Of batch norms all sizes; the layers of a network are one line of a table of their own.
    """
    parts = []
    shown = [row for row in rows if row.dtype in dtypes and (row.shape or row.numel in sizes)]
    for _, members in groupby([row for row in shown if not row.model], key=section_key):
        section = list(members)
        passes = sorted({row.pass_name for row in section})
        rivals = [r for r in RIVALS if any(r in row.ratio for row in section)]
        columns = [
            f"{name} {what}"
            for name in passes
            for what in ("GB/s (% of copy)", *(f"vs {rival}" for rival in rivals))
        ]
        lines = [
            f"{section[0].title}, {section[0].machine}",
            "",
            f"| op | {' | '.join(columns)} |",
            f"| --- |{' ---: |' * len(columns)}",
        ]
        for op, of_op in groupby(section, key=lambda row: row.name):
            by_pass = {row.pass_name: row for row in of_op}
            cells = []
            for name in passes:
                row = by_pass.get(name)
                if row is None:
                    cells += [""] * (1 + len(rivals))
                    continue
                mark = " \\*" if row.noisy else ""
                cells.append(
                    f"{row.gb_per_s['fusedtrain']:.1f} ({row.percent_of_copy:.0f} %){mark}"
                )
                cells += [_ratio_text(row, rival) for rival in rivals]
            lines.append(f"| {op} | {' | '.join(cells)} |")
        if any(row.noisy for row in section):
            lines += ["", "\\* measured while the machine was busy: the ratios are uncertain"]
        parts.append("\n".join(lines) + "\n")
    parts += _networks([row for row in shown if row.model and "eager" in row.ratio])
    return "\n".join(parts)


def _networks(rows: Sequence[Row]) -> list[str]:
    """The layers of networks, a line each: a Markdown table per machine."""
    parts = []
    for machine, of_machine in groupby(rows, key=lambda row: row.machine):
        lines = [
            f"every distinct batch norm, {machine}",
            "",
            "| network | dtype | layout | pass | layers | vs eager (geometric mean) | least |",
            "| --- | --- | --- | --- | ---: | ---: | --- |",
        ]
        kinds: dict[tuple[str, str, str, str], list[Row]] = {}
        for row in of_machine:
            kind = (f"{row.model}, batch {row.shape[0]}", row.dtype, row.layout, row.pass_name)
            kinds.setdefault(kind, []).append(row)
        for kind, members in sorted(kinds.items()):
            least = min(members, key=lambda row: row.ratio["eager"])
            mean = _geometric_mean([row.ratio["eager"] for row in members])
            lines.append(
                f"| {' | '.join(kind)} | {len(members)} | {mean:.2f}x | "
                f"{least.ratio['eager']:.2f}x ({least.op} {'x'.join(map(str, least.shape[1:]))}) |"
            )
        parts.append("\n".join(lines) + "\n")
    return parts


def summary(rows: Sequence[Row], tolerance: float, overhead_us: float) -> str:
    """Counts, geometric means and the rows that are slower than eager."""
    lines = []
    for (machine, family), members in groupby(rows, key=lambda row: (row.machine, row.family)):
        of_machine = list(members)
        noisy = sum(row.noisy for row in of_machine)
        lines.append(
            f"{family.replace('_', ' ')}, {machine}: {len(of_machine)} rows, {noisy} noisy"
        )
        for rival in RIVALS:
            ratios = [r.ratio[rival] for r in of_machine if rival in r.ratio and r.numel >= LARGE]
            if ratios:
                mean = _geometric_mean(ratios)
                lines.append(
                    f"  vs {rival} at {size_text(LARGE)} and above: {mean:.2f}x (geometric mean of "
                    f"{len(ratios)}), from {min(ratios):.2f}x to {max(ratios):.2f}x"
                )
        small = [r for r in of_machine if "eager" in r.ratio and r.numel < LARGE]
        if small:
            worst = max(small, key=lambda r: r.ns["fusedtrain"] - r.ns["eager"])
            lines.append(
                f"  below {size_text(LARGE)}, most time over eager: "
                f"{(worst.ns['fusedtrain'] - worst.ns['eager']) / 1e3:+.1f} us per call "
                f"({worst.name} {worst.pass_name} {worst.dtype} {size_text(worst.numel)})"
            )
    slower = [row for row in rows if row.is_slower(tolerance, overhead_us)]
    lines.append(f"Slower than eager beyond noise (> {tolerance:.0%}): {len(slower)} rows")
    lines += [
        f"  {row.name} {row.pass_name} {row.dtype} {size_text(row.numel)}: "
        f"{row.ratio['eager']:.2f}x, {time_text(row.ns['fusedtrain'])} against "
        f"{time_text(row.ns['eager'])}{' (noisy)' if row.noisy else ''}"
        for row in slower
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("results", nargs="+", type=Path, help="pytest-benchmark JSON files")
    parser.add_argument("--family", action="append", help="only this one (repeatable)")
    parser.add_argument("--png", type=Path, help="draw the bar chart into this file")
    parser.add_argument("--markdown", action="store_true", help="print the README's table only")
    parser.add_argument("--dtype", action="append", help="--markdown: default float32")
    parser.add_argument("--numel", action="append", type=int, help="--markdown: default 2^20, 2^23")
    parser.add_argument("--tolerance", type=float, default=0.05, help="slower than this is flagged")
    parser.add_argument("--overhead-us", type=float, default=5.0, help="CPU, below 2^20: let pass")
    parser.add_argument("--fail-slower", action="store_true", help="exit 1 if a row is flagged")
    options = parser.parse_args(arguments)

    parts = _parts(options.results)
    if options.family:
        parts = [part for part in parts if part.family in options.family]
    parts = [part for part in parts if part.rows]
    if not parts:
        print(f"no benchmark rows in {', '.join(map(str, options.results))}", file=sys.stderr)
        return 2
    limits = (options.tolerance, options.overhead_us)
    if options.markdown:
        sizes = options.numel or [2**20, 2**23]
        print(
            "\n".join(part.markdown(options.dtype or ["float32"], sizes) for part in parts), end=""
        )
    else:
        _show(parts, *limits)
    if options.png:
        _draw(parts, options.png)
    slower = any(part.slower(*limits) for part in parts)
    return int(options.fail_slower and slower)


@dataclass(frozen=True)
class _Part:
    """The rows of one family."""

    family: str
    rows: Sequence[Any]

    def print_tables(self, tolerance: float, overhead_us: float) -> None:
        print_tables(self.rows, tolerance, overhead_us)

    def markdown(self, dtypes: Sequence[str], sizes: Sequence[int]) -> str:
        return markdown(self.rows, dtypes, sizes)

    def summary(self, tolerance: float, overhead_us: float) -> str:
        return summary(self.rows, tolerance, overhead_us)

    def draw(self, path: Path) -> None:
        draw(self.rows, path)

    def slower(self, tolerance: float, overhead_us: float) -> bool:
        return any(row.is_slower(tolerance, overhead_us) for row in self.rows)

    def everything(self) -> str:
        """Markdown of all rows."""
        dtypes = sorted({row.dtype for row in self.rows})
        return self.markdown(dtypes, sorted({row.numel for row in self.rows}))


@dataclass(frozen=True)
class _OwnPart(_Part):
    """The rows of a family with tables of its own."""

    report: Any

    def print_tables(self, tolerance: float, overhead_us: float) -> None:
        self.report.print_tables(self.rows, tolerance)

    def markdown(self, dtypes: Sequence[str], sizes: Sequence[int]) -> str:
        return self.report.markdown(self.rows, dtypes)

    def summary(self, tolerance: float, overhead_us: float) -> str:
        return self.report.summary(self.rows, tolerance)

    def draw(self, path: Path) -> None:
        self.report.draw(self.rows, path)

    def slower(self, tolerance: float, overhead_us: float) -> bool:
        return any(row.is_slower(tolerance) for row in self.rows)


def _parts(results: Sequence[Path]) -> list[_Part]:
    rows = load(results)
    parts = [_Part(family, [r for r in rows if r.family == family]) for family in FAMILIES]
    return [
        *parts,
        _OwnPart(_step_rows.FAMILY, _step_rows.load(results), _step_report),
        _OwnPart(_net_rows.FAMILY, _net_rows.load(results), _net_report),
        _OwnPart(_memory_rows.FAMILY, _memory_rows.load(results), _memory_report),
    ]


def _show(parts: Sequence[_Part], tolerance: float, overhead_us: float) -> None:
    try:
        for part in parts:
            part.print_tables(tolerance, overhead_us)
    except ImportError:
        print("rich is not installed: the table as Markdown\n")
        for part in parts:
            print(part.everything())
    for part in parts:
        print(part.summary(tolerance, overhead_us))


def _draw(parts: Sequence[_Part], png: Path) -> None:
    try:
        for part in parts:
            beside = png
            if part.family != FAMILIES[0]:
                beside = png.with_name(f"{png.stem}-{part.family.replace('_', '-')}{png.suffix}")
            part.draw(beside)
            print(f"chart: {beside}", file=sys.stderr)
    except ImportError:
        print("matplotlib is not installed: no chart", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
