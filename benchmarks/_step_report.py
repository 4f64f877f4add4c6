"""Tables, summary and bar chart of the AMP step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks._step_rows import StepRow, section_key
from benchmarks._tables import Table, show, strongest_text
from benchmarks._tables import markdown as markdown_of
from benchmarks._tables import summary as summary_of

COLUMNS = (
    "optimizer", "job", "ms", "B/param", "GB/s", "% copy", "host us", "launches", "vs strongest",
    "99 %", "all rivals",
)  # fmt: skip
LEGEND = (
    "Each job does what those before it do: step; check: GradScaler's unscaling and check for "
    "infs; clip: the norm of all gradients; ema: averaged weights; zero: gradients. B/param: what "
    "the job must read and write at least, counted; GB/s of these bytes; % copy: of the bandwidth "
    "of a copy in the same rounds. host us: the same call on one element a tensor. launches: of "
    "kernels on CUDA, on the CPU (ops) dispatched operators. host and launches: fusedtrain / the "
    "strongest rival. vs: the rival's time / fusedtrain's, above 1 fusedtrain is faster."
)
COLORS = {"fusedtrain": "#1b6ca8", "strongest": "#c9c9c9"}


def _title(machine: str, model: str, dtype: str, row: StepRow) -> str:
    size = f"{row.numel / 1e6:.1f} M parameters in {row.tensors} tensors"
    return f"{model}, {dtype}: {size} ({machine})"


def _pair(values: dict[str, Any], rival: str | None, form: str) -> str:
    names = ["fusedtrain", *([rival] if rival else [])]
    return " / ".join(format(values[name], form) for name in names)


def _cells(row: StepRow) -> Iterator[str]:
    best = row.strongest
    yield row.op
    yield row.job
    yield f"{row.ns['fusedtrain'] / 1e6:.3g}"
    yield str(row.bytes_per_parameter)
    yield f"{row.gb_per_s['fusedtrain']:.1f}"
    yield f"{row.percent_of_copy:.0f}"
    yield _pair({k: v / 1e3 for k, v in row.host_ns.items()}, best, ".0f")
    yield _pair(row.counts, best, "d") + (" ops" if row.device_type == "cpu" else "")
    yield from strongest_text(row)


def _tables(rows: Sequence[StepRow]) -> Iterator[Table]:
    """One per machine, network and dtype."""
    for key, members in groupby(rows, key=section_key):
        section = list(members)
        table = Table(_title(*key, section[0]), COLUMNS, frozenset({0, 1, 10}))
        table.rows = [(row, list(_cells(row))) for row in section]
        yield table


def print_tables(rows: Sequence[StepRow], tolerance: float) -> None:
    """The full tables, with rich."""
    show(_tables(rows), LEGEND, tolerance)


def markdown(rows: Sequence[StepRow], dtypes: Sequence[str]) -> str:
    """The tables in Markdown."""
    return markdown_of(_tables([row for row in rows if row.dtype in dtypes]), 2)


def summary(rows: Sequence[StepRow], tolerance: float) -> str:
    """Counts, geometric means and the rows that are slower than the strongest rival."""
    return summary_of(
        "AMP step", rows, lambda row: f"{row.op} {row.job} {row.dtype} {row.model}", tolerance
    )


def draw(rows: Sequence[StepRow], path: Path) -> None:
    """The bar chart: time against the strongest rival, and bandwidths next to the copy's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    machines = [list(members) for _, members in groupby(rows, key=lambda row: row.machine)]
    most = max(map(len, machines))
    figure, axes = plt.subplots(
        len(machines),
        2,
        figsize=(14, len(machines) * (2.2 + 0.3 * most)),
        squeeze=False,
        layout="constrained",
    )
    for (left, right), members in zip(axes, machines, strict=True):
        places = range(len(members), 0, -1)
        labels = [f"{r.model} {r.dtype}  {r.op} {r.job}" for r in members]
        ratios = [r.ratio[name] if (name := r.strongest) else 0.0 for r in members]
        bars = left.barh(places, ratios, 0.7, color=COLORS["fusedtrain"])
        names = [f"{x:.2f} {r.strongest or ''}" for x, r in zip(ratios, members, strict=True)]
        left.bar_label(bars, names, fontsize=7, padding=2)
        left.axvline(1, color="black", linewidth=1)
        left.set_yticks(places, labels, fontsize=8)
        left.set_xlabel("strongest rival's time / fusedtrain's (above 1: fusedtrain is faster)")
        left.set_title(members[0].machine, loc="left", fontsize=9)
        left.margins(x=0.15, y=0.01)
        for shift, who in ((0.2, "fusedtrain"), (-0.2, "strongest")):
            percents = [_percent_of_copy(r, who) for r in members]
            heights = [place + shift for place in places]
            drawn = right.barh(heights, percents, 0.4, color=COLORS[who], label=who)
            right.bar_label(drawn, fmt="%.0f", fontsize=7, padding=2)
        right.axvline(100, color="black", linewidth=1)
        right.set_yticks([])
        right.set_xlabel("least bytes / time, percent of the bandwidth of a copy")
        right.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
        right.margins(x=0.1, y=0.01)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _percent_of_copy(row: StepRow, who: str) -> float:
    name = who if who == "fusedtrain" else row.strongest
    return 100 * row.gb_per_s[name] / row.gb_per_s["copy"] if name else 0.0
