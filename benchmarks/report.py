"""Show benchmark results: a table, a Markdown table, a bar chart, and what is slower than eager.

python -m benchmarks.report RESULTS.json [...] [--png CHART.png] [--markdown] [--fail-slower]

Rows of the AMP step have tables of their own, and a chart beside the other: CHART-amp-step.png.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks import _step_report, _step_rows
from benchmarks._chart import draw
from benchmarks._rows import BUSY, LARGE, RIVALS, Row, load, section_key, size_text


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
        console = Console(width=120)
    for (machine, dtype, numel), section in groupby(rows, key=section_key):
        table = Table(
            title=f"{dtype}, {size_text(numel)} elements ({machine})", title_justify="left"
        )
        table.add_column("op")
        table.add_column("pass")
        for name in ("time", "GB/s", "% copy", "% prealloc", "vs eager", "99 %", "vs compile"):
            table.add_column(name, justify="right")
        table.add_column("")
        for row in section:
            slower = row.is_slower(tolerance, overhead_us)
            interval = row.ratio_interval.get("eager")
            table.add_row(
                row.op,
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
    """One Markdown table per machine, dtype and size: a line per op, its passes side by side."""
    parts = []
    for (machine, dtype, numel), members in groupby(rows, key=section_key):
        if dtype not in dtypes or numel not in sizes:
            continue
        section = list(members)
        passes = sorted({row.pass_name for row in section})
        rivals = [r for r in RIVALS if any(r in row.ratio for row in section)]
        columns = [
            f"{name} {what}"
            for name in passes
            for what in ("GB/s (% of copy)", *(f"vs {rival}" for rival in rivals))
        ]
        lines = [
            f"{dtype}, {size_text(numel)} elements, {machine}",
            "",
            f"| op | {' | '.join(columns)} |",
            f"| --- |{' ---: |' * len(columns)}",
        ]
        for op, of_op in groupby(section, key=lambda row: row.op):
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
    return "\n".join(parts)


def summary(rows: Sequence[Row], tolerance: float, overhead_us: float) -> str:
    """Counts, geometric means and the rows that are slower than eager."""
    lines = []
    for machine, members in groupby(rows, key=lambda row: row.machine):
        of_machine = list(members)
        noisy = sum(row.noisy for row in of_machine)
        lines.append(f"{machine}: {len(of_machine)} rows, {noisy} noisy")
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
                f"({worst.op} {worst.pass_name} {worst.dtype} {size_text(worst.numel)})"
            )
    slower = [row for row in rows if row.is_slower(tolerance, overhead_us)]
    lines.append(f"Slower than eager beyond noise (> {tolerance:.0%}): {len(slower)} rows")
    lines += [
        f"  {row.op} {row.pass_name} {row.dtype} {size_text(row.numel)}: "
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
    parser.add_argument("--png", type=Path, help="draw the bar chart into this file")
    parser.add_argument("--markdown", action="store_true", help="print the README's table only")
    parser.add_argument("--dtype", action="append", help="--markdown: default float32")
    parser.add_argument("--numel", action="append", type=int, help="--markdown: default 2^20, 2^23")
    parser.add_argument("--tolerance", type=float, default=0.05, help="slower than this is flagged")
    parser.add_argument("--overhead-us", type=float, default=5.0, help="CPU, below 2^20: let pass")
    parser.add_argument("--fail-slower", action="store_true", help="exit 1 if a row is flagged")
    options = parser.parse_args(arguments)

    rows, steps = load(options.results), _step_rows.load(options.results)
    if not rows and not steps:
        print(f"no benchmark rows in {', '.join(map(str, options.results))}", file=sys.stderr)
        return 2
    if options.markdown:
        dtypes = options.dtype or ["float32"]
        print(markdown(rows, dtypes, options.numel or [2**20, 2**23]), end="")
        print(_step_report.markdown(steps, dtypes), end="")
    else:
        _show(rows, steps, options.tolerance, options.overhead_us)
    if options.png:
        _draw(rows, steps, options.png)
    slower = any(row.is_slower(options.tolerance, options.overhead_us) for row in rows)
    slower |= any(row.is_slower(options.tolerance) for row in steps)
    return int(options.fail_slower and slower)


def _show(
    rows: Sequence[Row], steps: Sequence[_step_rows.StepRow], tolerance: float, overhead_us: float
) -> None:
    try:
        if rows:
            print_tables(rows, tolerance, overhead_us)
        if steps:
            _step_report.print_tables(steps, tolerance)
    except ImportError:
        print("rich is not installed: the table as Markdown\n")
        dtypes = {row.dtype for row in rows} | {row.dtype for row in steps}
        print(markdown(rows, sorted(dtypes), sorted({row.numel for row in rows})))
        print(_step_report.markdown(steps, sorted(dtypes)))
    if rows:
        print(summary(rows, tolerance, overhead_us))
    if steps:
        print(_step_report.summary(steps, tolerance))


def _draw(rows: Sequence[Row], steps: Sequence[_step_rows.StepRow], png: Path) -> None:
    beside = png.with_name(f"{png.stem}-amp-step{png.suffix}")
    try:
        if rows:
            draw(rows, png)
            print(f"chart: {png}", file=sys.stderr)
        if steps:
            _step_report.draw(steps, beside)
            print(f"chart: {beside}", file=sys.stderr)
    except ImportError:
        print("matplotlib is not installed: no chart", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
