"""Tables, summary and bar chart of Apex's calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks._apex_contestants import INSIDE, OWN, RIVALS
from benchmarks._apex_rows import PROMISE, ApexRow
from benchmarks._tables import Table, show
from benchmarks._tables import markdown as markdown_of
from benchmarks._tables import summary as summary_of

LISTED = ("fusedtrain", OWN, *RIVALS)  # side by side; INSIDE has a column of its own
COLUMNS = (
    "script", "job", "ms", "GB/s", "% copy", "host us", "launches", "vs own", "99 %", "vs fused",
    "99 %", "vs max_grad_norm",
)  # fmt: skip
LEGEND = (
    "From the loss to the next forward, but for zero_grad and the backward pass. step: scale_loss "
    "and optimizer.step(); clip: and clip_grad_norm_. ms, host us (the same on one element a "
    "tensor) and launches (on the CPU dispatched operators, ops): Apex's calls / own: fusedtrain's "
    "optimizer and GradScaler / torch's GradScaler with its fused / foreach optimizers in float32 "
    "/ masters: foreach on float32 copies of a float16 model, by hand. GB/s: of the bytes that the "
    "step must move at least; % copy: of the bandwidth of a copy in the same rounds. vs: the other"
    "'s time / Apex's calls', above 1 Apex's calls are faster. max_grad_norm: the own step that "
    f"clips inside. SLOWER: than a step of torch, or than own by more than {PROMISE:.0%}."
)
COLORS = dict(zip(
    ("fusedtrain", OWN, INSIDE, *RIVALS),
    ("#1b6ca8", "#8ec1e8", "#cfe3f4", "#c9c9c9", "#8a8a8a", "#e8a33d"), strict=True,
))  # fmt: skip
LABELS = {"fusedtrain": "Apex's calls", OWN: "own step", INSIDE: "own, max_grad_norm"}


def _key(row: ApexRow) -> tuple[str, str]:
    return row.machine, row.model


def _each(values: Mapping[str, Any], form: str) -> str:
    return " / ".join(format(values[name], form) for name in LISTED if name in values)


def _ratio(row: ApexRow, rival: str) -> str:
    return f"{row.ratio[rival]:.2f}x" if rival in row.ratio else ""


def _interval(row: ApexRow, rival: str) -> str:
    return "-".join(f"{x:.2f}" for x in row.ratio_interval.get(rival, ()))


def _cells(row: ApexRow) -> Iterator[str]:
    yield row.op
    yield row.job
    yield _each({k: v / 1e6 for k, v in row.ns.items()}, ".3g")
    yield f"{row.gb_per_s['fusedtrain']:.1f}"
    yield f"{row.percent_of_copy:.0f}"
    yield _each({k: v / 1e3 for k, v in row.host_ns.items()}, ".0f")
    yield _each(row.counts, "d") + (" ops" if row.device_type == "cpu" else "")
    for rival in (OWN, "fused"):
        yield _ratio(row, rival)
        yield _interval(row, rival)
    yield _ratio(row, INSIDE)


def _tables(rows: Sequence[ApexRow]) -> Iterator[Table]:
    """One per machine and network."""
    for (machine, model), members in groupby(rows, key=_key):
        section = list(members)
        first = section[0]
        size = f"{first.numel / 1e6:.1f} M parameters in {first.tensors} tensors"
        table = Table(f"Apex's calls, {model}: {size} ({machine})", COLUMNS, frozenset({0, 1}))
        table.rows = [(row, list(_cells(row))) for row in section]
        yield table


def print_tables(rows: Sequence[ApexRow], tolerance: float) -> None:
    """The full tables, with rich."""
    show(_tables(rows), LEGEND, tolerance, width=180)


def markdown(rows: Sequence[ApexRow], dtypes: Sequence[str]) -> str:
    """The tables in Markdown, whatever the dtypes: a level's are its own."""
    del dtypes
    return markdown_of(_tables(rows), 2)


def summary(rows: Sequence[ApexRow], tolerance: float) -> str:
    """Counts, geometric means, and the rows that are slower than they may be."""
    lines = [summary_of("Apex's calls", rows, _name, tolerance)]
    for machine, members in groupby(rows, key=lambda row: row.machine):
        ratios = [1 / row.ratio[OWN] for row in members]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append(
            f"Apex's calls / own step, {machine}: {mean:.3f} (geometric mean of {len(ratios)}), "
            f"at most {max(ratios):.3f}"
        )
    return "\n".join(lines)


def _name(row: ApexRow) -> str:
    return f"{row.model} {row.op} {row.job}"


def draw(rows: Sequence[ApexRow], path: Path) -> None:
    """The bar chart: times of the whole step, and of the host's part of it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    machines = [list(members) for _, members in groupby(rows, key=lambda row: row.machine)]
    bars = [sum(len(row.who) + 1 for row in members) for members in machines]
    heights = [1.6 + 0.17 * number for number in bars]
    figure, axes = plt.subplots(
        len(machines), 2, figsize=(14, sum(heights)), height_ratios=heights, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for (left, right), members in zip(axes, machines, strict=True):
        steps = [row.ns for row in members]
        _draw_groups(left, members, [{k: v / 1e6 for k, v in ns.items()} for ns in steps], "{:.3g}")
        left.set_xlabel("ms a step, loss to next forward, without backward (over Apex's calls')")
        left.set_title(members[0].machine, loc="left", fontsize=9)
        hosts = [{k: v / 1e3 for k, v in row.host_ns.items()} for row in members]
        _draw_groups(right, members, hosts, "{:.0f}")
        right.set_xlabel("us a step on one element a tensor: everything that is not memory")
        right.set_yticks([])
        handles, labels = left.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        order = [LABELS.get(who, who) for who in COLORS if LABELS.get(who, who) in named]
        right.legend(
            [named[label] for label in order], order, loc="lower right", bbox_to_anchor=(1, 1),
            ncols=len(order), frameon=False, fontsize=8,
        )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_groups(
    axes: Any, rows: Sequence[ApexRow], values: Sequence[Mapping[str, float]], form: str
) -> None:
    """A bar for each contestant, one group below the other."""
    place, ticks = 0.0, []
    for row, of_row in zip(rows, values, strict=True):
        ticks.append(place - (len(row.who) - 1) / 2)
        for who in row.who:
            drawn = axes.barh(
                place, of_row[who], 0.9, color=COLORS[who], label=LABELS.get(who, who)
            )
            share = of_row[who] / of_row["fusedtrain"]
            note = "" if who == "fusedtrain" else f"  ({share:.2f}x)"
            axes.bar_label(drawn, [form.format(of_row[who]) + note], fontsize=7, padding=2)
            place -= 1
        place -= 1
    axes.set_yticks(ticks, [f"{row.model}\n{row.op} {row.job}" for row in rows], fontsize=8)
    axes.margins(x=0.15, y=0.01)
