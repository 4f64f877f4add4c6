"""Show benchmark results: a table, a Markdown table, a bar chart, and what is slower than eager.

python -m benchmarks.report RESULTS.json [...] [--png CHART.png] [--markdown] [--fail-slower]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

RIVALS = ("eager", "compile")
# Below this size a call's fixed cost decides: the target there is in microseconds, not percent.
LARGE = 2**20
# A copy whose median is this many times its least ran on a busy machine. With both of two cores
# taken, each call of torch's thread pool waited for a time slice: 16 ms for a copy of 256 KB.
BUSY = 2.0
COLORS = {"fusedtrain": "#1b6ca8", "eager": "#c9c9c9", "compile": "#e8a33d"}


@dataclass(frozen=True)
class Row:
    """One benchmark: an op's pass on one dtype, size and device (see README.md)."""

    op: str
    pass_name: str
    dtype: str
    numel: int
    device: str
    device_type: str
    backend: str
    torch: str
    date: str
    threads: int
    ns: dict[str, float]
    ns_min: dict[str, float]
    gb_per_s: dict[str, float]
    percent_of_copy: float
    percent_of_preallocated_copy: float
    ratio: dict[str, float]
    ratio_interval: dict[str, list[float]]

    @classmethod
    def parse(cls, info: dict[str, Any]) -> Row:
        """From a result's ``extra_info``."""
        fields = {name: info[name] for name in cls.__dataclass_fields__ if name != "pass_name"}
        return cls(pass_name=info["pass"], **fields)

    @property
    def machine(self) -> str:
        """The device with all that must be equal for two rows to be compared."""
        threads = f", {self.threads} threads" if self.device_type == "cpu" else ""
        backend = "" if self.backend == "default" else f", {self.backend} backend"
        return f"{self.device}{threads}{backend}, torch {self.torch}, {self.date[:10]}"

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was too busy for this row to be quoted."""
        return any(self.ns[name] > BUSY * self.ns_min[name] for name in ("copy", "fusedtrain"))

    def is_slower(self, tolerance: float, overhead_us: float) -> bool:
        """Slower than eager by more than ``tolerance``, and surely so.

        Below 2^20 elements on the CPU, a difference within ``overhead_us`` is let pass.
        """
        if "eager" not in self.ratio:
            return False
        surely = self.ratio_interval["eager"][1] < 1
        slower = surely and self.ratio["eager"] < 1 / (1 + tolerance)
        if self.device_type == "cpu" and self.numel < LARGE:
            slower &= self.ns["fusedtrain"] - self.ns["eager"] > overhead_us * 1e3
        return slower


def load(paths: Iterable[Path]) -> list[Row]:
    """The rows of pytest-benchmark's JSON files, in a readable order."""
    rows = []
    for path in paths:
        entries = json.loads(path.read_text())["benchmarks"]
        rows += [Row.parse(e["extra_info"]) for e in entries if "gb_per_s" in e["extra_info"]]
    return sorted(rows, key=lambda row: (*_section(row), row.op, row.pass_name))


def _section(row: Row) -> tuple[str, str, int]:
    return row.machine, row.dtype, row.numel


def size_text(numel: int) -> str:
    """``2^20`` for a power of two."""
    exponent = numel.bit_length() - 1
    return f"2^{exponent}" if numel == 2**exponent else str(numel)


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
    for (machine, dtype, numel), section in groupby(rows, key=_section):
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
                " ".join(["SLOWER"] * slower + ["noisy"] * row.is_noisy),
                style="red" if slower else None,
            )
        console.print(table)
    console.print(
        "vs X: X's time / fusedtrain's, the median over rounds that time both; above 1 is faster. "
        "% copy: of x.clone() of the same size; % prealloc: of out.copy_(x). noisy: a median above "
        f"{BUSY:g} times the least; not to be quoted.",
        style="dim",
    )


def markdown(rows: Sequence[Row], dtypes: Sequence[str], sizes: Sequence[int]) -> str:
    """One Markdown table per machine, dtype and size: a line per op, its passes side by side."""
    parts = []
    for (machine, dtype, numel), members in groupby(rows, key=_section):
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
                cells.append(f"{row.gb_per_s['fusedtrain']:.1f} ({row.percent_of_copy:.0f} %)")
                cells += [_ratio_text(row, rival) for rival in rivals]
            lines.append(f"| {op} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def summary(rows: Sequence[Row], tolerance: float, overhead_us: float) -> str:
    """Counts, geometric means and the rows that are slower than eager."""
    lines = []
    for machine, members in groupby(rows, key=lambda row: row.machine):
        of_machine = list(members)
        noisy = sum(row.is_noisy for row in of_machine)
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
        f"{time_text(row.ns['eager'])}"
        for row in slower
    ]
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """The bar chart: speed-up of every op, and bandwidths where torch.compile was a rival."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    machines = [list(members) for _, members in groupby(rows, key=lambda row: row.machine)]
    most = max(len({row.op for row in members}) for members in machines)
    figure, axes = plt.subplots(
        len(machines),
        2,
        figsize=(14, len(machines) * (2.2 + 0.34 * most)),
        squeeze=False,
        layout="constrained",
    )
    for (left, right), members in zip(axes, machines, strict=True):
        _draw_ratios(left, _widest(members))
        _draw_bandwidths(right, _largest_compiled(members))
        left.set_ylabel(members[0].machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _sections(rows: Sequence[Row]) -> list[list[Row]]:
    return [list(members) for _, members in groupby(rows, key=_section)]


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
    last = {row.op: row.ratio.get("eager", 0.0) for row in rows if row.pass_name == passes[-1]}
    ops = sorted({row.op for row in rows}, key=lambda op: last.get(op, 0.0))
    height = 0.8 / len(passes)
    for index, (name, color) in enumerate(zip(passes, ("#8ec1e8", "#1b6ca8"), strict=False)):
        bars = {row.op: row.ratio.get("eager", 0.0) for row in rows if row.pass_name == name}
        drawn = axes.barh(
            [y + height * (len(passes) / 2 - index - 0.5) for y in range(len(ops))],
            [bars.get(op, 0.0) for op in ops],
            height,
            label=name,
            color=color,
        )
        axes.bar_label(drawn, fmt="%.2f", fontsize=7, padding=2)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(ops)), ops)
    axes.set_xlabel("eager time / fusedtrain time (above 1: fusedtrain is faster)")
    axes.set_title(f"against eager: {rows[0].dtype}, {size_text(rows[0].numel)} elements")
    axes.legend(loc="lower right")
    axes.margins(x=0.1, y=0.01)


def _draw_bandwidths(axes: Any, rows: Sequence[Row]) -> None:
    name = sorted({row.pass_name for row in rows})[-1]
    shown = [row for row in rows if row.pass_name == name]
    shown.sort(key=lambda row: row.gb_per_s["fusedtrain"])
    series = [s for s in COLORS if any(s in row.gb_per_s for row in shown)]
    height = 0.8 / len(series)
    for index, which in enumerate(series):
        drawn = axes.barh(
            [y + height * (len(series) / 2 - index - 0.5) for y in range(len(shown))],
            [row.gb_per_s.get(which, 0.0) for row in shown],
            height,
            label=which,
            color=COLORS[which],
        )
        axes.bar_label(drawn, fmt="%.1f", fontsize=7, padding=2)
    copies = sorted(row.gb_per_s["copy_fresh"] for row in shown)
    axes.axvline(
        copies[len(copies) // 2], color="black", linestyle="--", linewidth=1, label="x.clone()"
    )
    axes.set_yticks(range(len(shown)), [row.op for row in shown])
    axes.set_xlabel("GB/s of the bytes that the cheapest exact scheme moves")
    axes.set_title(f"{name}: {rows[0].dtype}, {size_text(rows[0].numel)} elements")
    axes.legend(loc="lower right")
    axes.margins(x=0.1, y=0.01)


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

    rows = load(options.results)
    if not rows:
        print(f"no benchmark rows in {', '.join(map(str, options.results))}", file=sys.stderr)
        return 2
    if options.markdown:
        sizes = options.numel or [2**20, 2**23]
        print(markdown(rows, options.dtype or ["float32"], sizes), end="")
    else:
        try:
            print_tables(rows, options.tolerance, options.overhead_us)
        except ImportError:
            print("rich is not installed: the table as Markdown\n")
            dtypes, sizes = {row.dtype for row in rows}, {row.numel for row in rows}
            print(markdown(rows, sorted(dtypes), sorted(sizes)))
        print(summary(rows, options.tolerance, options.overhead_us))
    if options.png:
        try:
            draw(rows, options.png)
        except ImportError:
            print("matplotlib is not installed: no chart", file=sys.stderr)
        else:
            print(f"chart: {options.png}", file=sys.stderr)
    slower = any(row.is_slower(options.tolerance, options.overhead_us) for row in rows)
    return int(options.fail_slower and slower)


if __name__ == "__main__":
    sys.exit(main())
