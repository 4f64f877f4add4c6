"""Tables and the summary of rows that are compared with eager torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from benchmarks._rows import BUSY, FAMILIES, LARGE, RIVALS, Row, section_key, size_text

KEPT = " kept B: kept for backward for each element of the input, fusedtrain / eager."
EXACT = " exact: fusedtrain's with save=None."


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


def _has_exact(rows: Sequence[Row]) -> bool:
    return any("exact" in row.ratio for row in rows)


def _has_kept(rows: Sequence[Row]) -> bool:
    return any(row.kept for row in rows)


def _kept_text(row: Row) -> str:
    ours, eager = ((row.kept or {}).get(who) for who in ("fusedtrain", "eager"))
    return " / ".join(f"{each:.3g}" for each in (ours, eager) if each is not None)


def print_tables(rows: Sequence[Row], tolerance: float, overhead_us: float) -> None:
    """The full tables, one per machine, dtype and size, with rich."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        # Wide enough for ratios of three digits beside "SLOWER noisy".
        console = Console(width=140 + 20 * any(row.shape for row in rows) + 20 * _has_kept(rows))
    for _, members in groupby(rows, key=section_key):
        section = list(members)
        title = f"{section[0].title} ({section[0].machine})"
        table = Table(title=title, title_justify="left")
        table.add_column("op", no_wrap=True)
        table.add_column("pass", no_wrap=True)
        columns = ["time", "GB/s", "% copy", "% prealloc", "vs eager", "99 %", "vs compile"]
        exact, kept = _has_exact(section), _has_kept(section)
        for name in (*columns, *["vs exact"] * exact, *["kept B"] * kept):
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
                *[_ratio_text(row, "exact")] * exact,
                *[_kept_text(row)] * kept,
                " ".join(["SLOWER"] * slower + ["noisy"] * row.noisy),
                style="red" if slower else None,
            )
        console.print(table)
    console.print(
        "vs X: X's time / fusedtrain's, the median over rounds that time both; above 1 is faster. "
        "% copy: of x.clone() of the same size; % prealloc: of out.copy_(x). noisy: the copy took "
        f"over {BUSY:g} times the best of this size, or fusedtrain over its own: do not quote."
        + KEPT * _has_kept(rows)
        + EXACT * _has_exact(rows),
        style="dim",
    )


def markdown(rows: Sequence[Row], dtypes: Sequence[str], sizes: Sequence[int]) -> str:
    """One Markdown table per machine, dtype and size: a line per op, its passes side by side.

    ``sizes``: of the activations. The layers of a network are one line of a table of their own.
    """
    parts = []
    shown = [
        row
        for row in rows
        if row.dtype in dtypes and (row.family != FAMILIES[0] or row.numel in sizes)
    ]
    for _, members in groupby([row for row in shown if not row.model], key=section_key):
        section = list(members)
        passes = sorted({row.pass_name for row in section})
        rivals = [r for r in RIVALS if any(r in row.ratio for row in section)]
        columns = [
            f"{name} {what}"
            for name in passes
            for what in ("GB/s (% of copy)", *(f"vs {rival}" for rival in rivals))
        ]
        kept = _has_kept(section)
        columns += ["kept B / eager's"] * kept
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
            cells += [_kept_text(next(iter(by_pass.values())))] * kept
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
