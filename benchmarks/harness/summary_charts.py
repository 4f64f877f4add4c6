"""The charts in docs/charts: what decides, drawn from the stored rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.chart import Panel
from benchmarks.harness.page import Part
from benchmarks.harness.rows import Row
from benchmarks.harness.svg import chart
from fusedtrain._text import time_text

NETWORKS = {
    "efficientnet_b0": "EfficientNet-B0",
    "mobilenet_v3_large": "MobileNetV3-L",
    "mobilenetv4_conv_small": "MobileNetV4-small",
    "convnext_tiny": "ConvNeXt-T",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
}


def charts(parts: Mapping[str, Part]) -> dict[str, str]:
    """The text of each chart, by its name."""
    return {"whole_step": whole_step(parts)}


def whole_step(parts: Mapping[str, Part]) -> str:
    """The time of whole training steps, and the batch that fits into eager's memory."""
    steps = [row for row in parts["conv_bn"].rows if row["job"] == "train"]
    memory = parts["memory"].rows
    return chart([_time_of_steps(steps), _largest_batches(memory)], [_measured([*steps, *memory])])


def _time_of_steps(rows: Sequence[Row]) -> Panel:
    """Eager's time is 1 in each group; rows of a run that had torch.compile have its bar, too."""
    whos = [who for who in ("eager", "compile", "fusedtrain") if any(who in row.ns for row in rows)]

    def of_eager(row: Row, who: str) -> float | None:
        if who == "fusedtrain":
            return 1 / row.ratio["eager"]
        return row.ratio[who] / row.ratio["eager"] if who in row.ratio else None

    def text(who: str, group: int, value: float) -> str:
        row = rows[group]
        time = time_text(row.ns[who] / 1e9)
        if who != "fusedtrain":
            return time
        low, high = row.ratio_interval["eager"]
        return f"{time}, {row.ratio['eager']:.2f}x ({low:.2f} to {high:.2f})"

    def ends(row: Row) -> tuple[float, float]:
        low, high = row.ratio_interval["eager"]
        return 1 / high, 1 / low

    return Panel(
        "Time; shorter is faster. 1.54x: eager takes 1.54 times as long (99 % interval)",
        [f"{NETWORKS[r.model]}, {r['optimizer']}\n{r.layout}, {r['batch']} x {r['pixels']} px"
         for r in rows],
        {who: [of_eager(row, who) for row in rows] for who in whos},
        title="A whole training step: forward, backward, optimizer",
        text=text,
        line=1,
        intervals={"fusedtrain": [ends(row) for row in rows]},
        missing={} if "compile" in whos else {"compile": "not measured in these runs"},
    )  # fmt: skip


def _largest_batches(rows: Sequence[Row]) -> Panel:
    """By `memory="store"` and `"recompute"`, in the memory of eager's batch."""
    names = {"eager": "eager", "store": "store", "recompute": "fusedtrain"}
    return Panel(
        "Images; more is better",
        [f"{NETWORKS[row.model]}\n{row.layout}, {row['pixels']} px" for row in rows],
        {name: [row["fits"][who] for row in rows] for name, who in names.items()},
        title="The largest batch that trains in the memory of eager's",
        text=lambda who, group, value: f"{value:.0f}",
    )


def _measured(rows: Sequence[Row]) -> str:
    """Device, release and days of the rows."""
    machines = dict.fromkeys(f"{r.device}, {r.threads} threads, torch {r.torch}" for r in rows)
    days = " and ".join(sorted({row.date[:10] for row in rows}))
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    return f"{'; '.join(machines)}, {dtypes}; measured {days}. GPUs: not measured yet."
