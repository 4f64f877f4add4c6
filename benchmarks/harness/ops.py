"""How the rows of ops on tensors are shown: six families are compared with eager torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.chart import FASTER, Panel, bars
from benchmarks.harness.rows import BUSY, Row
from benchmarks.harness.tables import (
    UNCERTAIN,
    Column,
    Limits,
    Report,
    interval_text,
    ratio_text,
    sections,
)
from fusedtrain._text import shape_text, size_text, time_text

# "exact": fusedtrain's own, where what is compared is its few-bit one.
RIVALS = ("eager", "compile", "exact")
# Below this size a call's fixed cost decides: the target there is in microseconds, not percent.
LARGE = 2**20


def _shape(row: Row) -> Sequence[int]:
    shape: Sequence[int] = row.get("shape", ())
    return shape


def _is_layer(row: Row) -> bool:
    """One of several shapes that share a table."""
    return bool(row.model) or row.family == "pool"


def name(row: Row) -> str:
    """The op, with all that tells it from the others of its table."""
    size = shape_text(_shape(row)[1:]) if _is_layer(row) else ""
    return " ".join(filter(None, (row.op, size, row.layout)))


def _title(row: Row) -> str:
    shape = _shape(row)
    if row.model:
        return f"{row.dtype}, the batch norms of {row.model}, batch {shape[0]}"
    if _is_layer(row):
        return f"{row.dtype}, batch {shape[0]}"
    if shape:
        return f"{row.dtype}, {' x '.join(map(str, shape))}"
    return f"{row.dtype}, {size_text(row.numel)} elements"


def _key(row: Row) -> Any:
    shape = _shape(row)
    size = shape[0] if _is_layer(row) else row.numel
    return row.model, row.dtype, size, -row.numel, *shape[1:], row.op, row.layout, row["pass"]


def _kept_text(row: Row) -> str:
    kept = row.get("kept", None) or {}
    return " / ".join(f"{kept[who]:.3g}" for who in ("fusedtrain", "eager") if who in kept)


COLUMNS = (
    Column("op", name, left=True),
    Column("pass", lambda row: str(row["pass"]), left=True),
    Column("time", lambda row: time_text(row.ns["fusedtrain"] / 1e9)),
    Column("GB/s", lambda row: f"{row['gb_per_s']['fusedtrain']:.1f}"),
    Column("% copy", lambda row: f"{row['percent_of_copy']:.0f}"),
    Column("% prealloc", lambda row: f"{row['percent_of_preallocated_copy']:.0f}"),
    Column("vs eager", ratio_text("eager")),
    Column("99 %", interval_text("eager")),
    Column("vs compile", ratio_text("compile")),
    Column("vs exact", ratio_text("exact"), optional=True),
    Column("kept B", _kept_text, optional=True),
)


def _legend(rows: Sequence[Row]) -> str:
    kept = " kept B: kept for backward for each element of the input, fusedtrain / eager."
    exact = " exact: fusedtrain's with save=None."
    return (
        "vs X: X's time / fusedtrain's, the median over rounds that time both; above 1 is faster. "
        "% copy: of x.clone() of the same size; % prealloc: of out.copy_(x). noisy: the copy took "
        f"over {BUSY:g} times the best of this size, or fusedtrain over its own: do not quote."
        + kept * any(map(_kept_text, rows))
        + exact * any("exact" in row.ratio for row in rows)
    )


def _loses_to(row: Row, limits: Limits) -> str | None:
    """Eager torch, if it is surely faster; on the CPU a small op may take some us longer."""
    slower = row.loses_to("eager", limits.tolerance)
    if slower and row.device_type == "cpu" and row.numel < LARGE:
        slower = row.ns["fusedtrain"] - row.ns["eager"] > limits.overhead_us * 1e3
    return "eager" if slower else None


def _means(row: Row) -> dict[str, float]:
    ratios = row.ratio if row.numel >= LARGE else {}
    return {f"vs {who} at {size_text(LARGE)} and above": ratios[who]
            for who in RIVALS if who in ratios}  # fmt: skip


def _label(row: Row) -> str:
    return f"{name(row)} {row['pass']} {row.dtype} {size_text(row.numel)}"


def _worst_small(rows: Sequence[Row]) -> Iterator[str]:
    small = {row.ns["fusedtrain"] - row.ns["eager"]: row
             for row in rows if "eager" in row.ratio and row.numel < LARGE}  # fmt: skip
    if small:
        yield (
            f"  below {size_text(LARGE)}, most time over eager: {max(small) / 1e3:+.1f} us per "
            f"call ({_label(small[max(small)])})"
        )


# --- Markdown: a line for each op and pass ---


def _markdown(report: Report, rows: Sequence[Row]) -> str:
    """The layers of a network are one line of a table of their own."""
    parts = []
    for first, section in sections(report, [row for row in rows if not row.model]):
        rivals = [rival for rival in RIVALS if any(rival in row.ratio for row in section)]
        columns = ["pass", "time", "GB/s (% copy)", *(f"vs {rival}" for rival in rivals)]
        kept = any(map(_kept_text, section))
        columns += ["kept B / eager's"] * kept
        lines = [
            f"{report.title(first)}, {first.machine}",
            "",
            f"| op | {' | '.join(columns)} |",
            f"| --- | --- |{' ---: |' * (len(columns) - 1)}",
        ]
        for row in sorted(section, key=lambda row: (name(row), row["pass"])):
            cells = [name(row), *_cells(row, rivals), *[_kept_text(row)] * kept]
            lines.append(f"| {' | '.join(cells)} |")
        lines += UNCERTAIN * any(row.noisy for row in section)
        parts.append("\n".join(lines) + "\n")
    parts += _networks([row for row in rows if row.model and "eager" in row.ratio])
    return "\n".join(parts)


def _cells(row: Row, rivals: Sequence[str]) -> list[str]:
    speed = f"{row['gb_per_s']['fusedtrain']:.1f} ({row['percent_of_copy']:.0f} %)"
    time = time_text(row.ns["fusedtrain"] / 1e9) + " \\*" * row.noisy
    return [row["pass"], time, speed, *(ratio_text(rival)(row) for rival in rivals)]


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
        kinds: dict[tuple[str, ...], list[Row]] = {}
        for row in of_machine:
            kind: tuple[str, ...] = (
                f"{row.model}, batch {_shape(row)[0]}",
                row.dtype,
                row.layout,
                row["pass"],
            )
            kinds.setdefault(kind, []).append(row)
        for kind, members in sorted(kinds.items()):
            least = min(members, key=lambda row: row.ratio["eager"])
            mean = geometric_mean([row.ratio["eager"] for row in members])
            size = shape_text(_shape(least)[1:])
            lines.append(
                f"| {' | '.join(kind)} | {len(members)} | {mean:.2f}x | "
                f"{least.ratio['eager']:.2f}x ({least.op} {size}) |"
            )
        parts.append("\n".join(lines) + "\n")
    return parts


# --- chart ---


def speed_ups(
    label: Callable[[Row], str], among: Sequence[str] = ()
) -> Callable[[Sequence[Row]], list[list[Panel]]]:
    """The chart of a family: for each row the ratio to its strongest rival (of these)."""

    def panels(rows: Sequence[Row]) -> list[list[Panel]]:
        best = [row.strongest(among) for row in rows]
        ratios = [row.ratio[who] if who else None for row, who in zip(rows, best, strict=True)]
        return [
            [
                Panel(
                    f"strongest rival's {FASTER}",
                    [label(row) for row in rows],
                    {"fusedtrain": ratios},
                    text=lambda _, group, ratio: f"{ratio:.2f} {best[group]}",
                    line=1,
                )
            ]
        ]

    return panels


def _panels(rows: Sequence[Row]) -> list[list[Panel]]:
    """Speed-up of every op, and bandwidths where torch.compile was a rival; below, in pairs, the
    speed-ups of the layers of networks."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(_title(row), []).append(row)
    single = [section for section in tables.values() if not section[0].model]
    panels: list[list[Panel]] = []
    if single:
        widest = max(single, key=lambda s: (len(s), s[0].dtype == "float32", s[0].numel))
        compiled = max(
            single, key=lambda s: ("compile" in s[0].ratio, s[0].dtype == "float32", s[0].numel)
        )
        panels.append([_ratios(widest), _bandwidths(compiled)])
    layers = [_ratios(section) for section in tables.values() if section[0].model]
    return panels + [layers[i : i + 2] for i in range(0, len(layers), 2)]


def _by_name(rows: Sequence[Row], pass_name: str, value: Callable[[Row], float | None]) -> Any:
    return {name(row): value(row) for row in rows if row["pass"] == pass_name}


def _ratios(rows: Sequence[Row]) -> Panel:
    passes = sorted({row["pass"] for row in rows})
    ratios: Mapping[str, Any] = {
        p: _by_name(rows, p, lambda row: row.ratio.get("eager")) for p in passes
    }
    last = ratios[passes[-1]]
    names = sorted({name(row) for row in rows}, key=lambda op: -(last.get(op) or 0.0))
    return Panel(
        f"eager {FASTER}",
        names,
        {p: [ratios[p].get(op) for op in names] for p in passes},
        f"against eager: {_title(rows[0])}",
        line=1,
    )


def _bandwidths(rows: Sequence[Row]) -> Panel:
    last = max(row["pass"] for row in rows)
    shown = sorted((r for r in rows if r["pass"] == last), key=lambda r: -r["percent_of_copy"])

    def percent(row: Row, who: str) -> float | None:
        speed = row["gb_per_s"]
        return 100 * speed[who] / speed["copy_fresh"] if who in speed else None

    return Panel(
        "percent of the bandwidth of x.clone() in the same rounds",
        [name(row) for row in shown],
        bars(shown, ("fusedtrain", "eager", "compile"), percent),
        f"{last}: {_title(rows[0])}",
        text=lambda who, group, value: f"{value:.0f}",
        line=100,
    )


def report(family: str, *, chosen_by: tuple[str, ...] = ("dtype",)) -> Report:
    """The report of a family of such ops."""
    return Report(
        family.replace("_", " "),
        _title,
        COLUMNS,
        _key,
        _label,
        _legend,
        _panels,
        loses_to=_loses_to,
        means=_means,
        notes=_worst_small,
        markdown=_markdown,
        chosen_by=chosen_by,
    )
