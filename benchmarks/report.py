"""Show benchmark results: a table, a Markdown table, a bar chart, and what is slower than eager.

python -m benchmarks.report RESULTS.json [...] [--png CHART.png] [--markdown] [--fail-slower]

Each family of benchmarks has a chart of its own beside that of the activations:
CHART-amp-step.png, CHART-batch-norm.png and so on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import (
    _apex_report,
    _apex_rows,
    _memory_report,
    _memory_rows,
    _net_report,
    _net_rows,
    _step_report,
    _step_rows,
)
from benchmarks._chart import draw
from benchmarks._row_report import markdown, print_tables, summary
from benchmarks._rows import FAMILIES, load


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
        _OwnPart(_apex_rows.FAMILY, _apex_rows.load(results), _apex_report),
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
