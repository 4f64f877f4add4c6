"""Show benchmark results: a table, a Markdown table, a bar chart, and what is slower than eager.

python -m benchmarks.report RESULTS.json [...] [--svg CHART.svg] [--markdown] [--fail-slower]
python -m benchmarks.report --docs    # writes docs/benchmarks*, docs/charts, README's table

Each family of benchmarks has a chart of its own beside that of the activations:
CHART-amp-step.svg, CHART-batch-norm.svg and so on.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from benchmarks.harness import svg
from benchmarks.harness.page import Part, choose, headlines, render, replace_generated
from benchmarks.harness.rows import Row, load
from benchmarks.harness.store import FAMILIES
from benchmarks.harness.summary_charts import charts, with_gpus
from benchmarks.harness.tables import Limits, Report, show, summary

MAIN = "activations"  # whose chart has the device's name alone
ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "benchmarks" / "results"
TEMPLATES = ROOT / "benchmarks" / "pages"  # of docs/benchmarks.md and docs/benchmarks/
SUMMARY = "summary"  # the template of docs/benchmarks.md
NOT_STORED = ("-quick", "-some", "-user")  # results of runs that the docs do not show


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("results", nargs="*", type=Path, help="JSON files of rows")
    parser.add_argument(
        "--docs", action="store_true", help="write docs/benchmarks*, docs/charts, README's table"
    )
    parser.add_argument("--family", action="append", help="only this one (repeatable)")
    parser.add_argument("--svg", type=Path, help="draw the bar chart into this file")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables only")
    parser.add_argument("--dtype", action="append", help="--markdown: default float32")
    parser.add_argument("--numel", action="append", type=int, help="--markdown: default 2^20, 2^23")
    parser.add_argument("--tolerance", type=float, default=0.05, help="slower than this is flagged")
    parser.add_argument("--overhead-us", type=float, default=5.0, help="CPU, below 2^20: let pass")
    parser.add_argument("--fail-slower", action="store_true", help="exit 1 if a row is flagged")
    options = parser.parse_args(arguments)
    if options.docs == bool(options.results):
        parser.error("either --docs, which takes the stored results, or files of results")
    if options.docs:
        for path, text in docs().items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
        return 0

    parts = {
        family: rows
        for family, rows in read(options.results).items()
        if rows and family in (options.family or FAMILIES)
    }
    if not parts:
        print(f"no benchmark rows in {', '.join(map(str, options.results))}", file=sys.stderr)
        return 2
    limits = Limits(options.tolerance, options.overhead_us)
    if options.markdown:
        dtypes, sizes = options.dtype or ["float32"], options.numel or [2**20, 2**23]
        texts = []
        for family, rows in parts.items():
            part = Part(report_of(family), rows)
            texts.append(part.report.markdown(part.report, choose(part, dtypes, sizes)))
        print("\n".join(texts), end="")
    else:
        _show(parts, limits)
    if options.svg:
        _draw(parts, options.svg)
    slower = any(report_of(f).loses_to(row, limits) for f, rows in parts.items() for row in rows)
    return int(options.fail_slower and slower)


def report_of(family: str) -> Report:
    """How the family's file says that its rows are shown."""
    report: Report = importlib.import_module(f"benchmarks.bench_{family}").REPORT
    return report


def read(results: Sequence[Path]) -> dict[str, list[Row]]:
    """The rows of each family, in a readable order."""
    parts: dict[str, list[Row]] = {family: [] for family in FAMILIES}
    for row in load(results):
        parts[row.family].append(row)
    for family, rows in parts.items():
        key = report_of(family).key
        rows.sort(key=lambda row, key=key: (row.machine, key(row)))  # type: ignore[misc]
    return parts


def docs() -> dict[Path, str]:
    """Files that --docs writes, each with its text."""
    files = [path for path in sorted(STORED.glob("*.json")) if not path.stem.endswith(NOT_STORED)]
    parts = {family: Part(report_of(family), rows) for family, rows in read(files).items() if rows}
    templates = {path.stem: path.read_text(encoding="utf-8") for path in TEMPLATES.glob("*.md")}
    folder, readme = ROOT / "docs", ROOT / "README.md"
    drawn = charts(parts)
    pages = {
        folder / ("benchmarks.md" if name == SUMMARY else f"benchmarks/{name}.md"): with_gpus(
            text, drawn.keys()
        )
        for name, text in render(templates, parts).items()
    }
    pictures = {folder / "charts" / f"{name}.svg": text for name, text in drawn.items()}
    table = replace_generated(readme.read_text(encoding="utf-8"), headlines(parts))
    return {**pictures, **pages, readme: table}


def chart(path: Path, family: str) -> Path:
    """The family's chart, by the path of the main one."""
    suffix = "" if family == MAIN else f"-{family.replace('_', '-')}"
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")


def _show(parts: dict[str, list[Row]], limits: Limits) -> None:
    try:
        for family, rows in parts.items():
            show(report_of(family), rows, limits)
    except ImportError:
        print("rich is not installed: the table as Markdown\n")
        for family, rows in parts.items():
            print(report_of(family).markdown(report_of(family), rows))
    for family, rows in parts.items():
        print(summary(report_of(family), rows, limits))


def _draw(parts: dict[str, list[Row]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for family, rows in parts.items():
        panels = [
            replace(panel, label=f"{panel.label}; {machine}")
            for machine, members in groupby(rows, key=lambda row: row.machine)
            for figure_row in report_of(family).panels(list(members))
            for panel in figure_row
        ]
        place = chart(path, family)
        place.write_text(svg.chart(panels), encoding="utf-8")
        print(f"chart: {place}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
