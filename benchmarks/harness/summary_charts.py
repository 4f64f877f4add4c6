"""The charts in docs/charts: the rows that decide, drawn from the stored results."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean

from benchmarks.harness.chart import Panel
from benchmarks.harness.page import Part
from benchmarks.harness.rows import Row
from benchmarks.harness.svg import chart
from fusedtrain._text import shape_text, time_text

NETWORKS = {
    "efficientnet_b0": "EfficientNet-B0",
    "mobilenet_v3_large": "MobileNetV3-L",
    "mobilenetv4_conv_small": "MobileNetV4-small",
    "convnext_tiny": "ConvNeXt-T",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
}
BOTH = "forward+backward"
MEMORY = ("store", "fusedtrain")  # of the family "memory": its names of our two settings
MOST = 3.0  # times as long as eager's: longer bars are cut
_IMAGE = re.compile(r"^!\[([^\]]*)\]\(((?:\.\./)?charts/)(\w+)\.svg\)$", re.M)
BUSY = "*: measured while the machine was busy; the ratio is uncertain."
BUSY_ROWS = "Some of the rows were measured while the machine was busy."
HOW = "Shorter is faster. 1.5x: {base} takes 1.5 times as long (99 % interval)"


def charts(parts: Mapping[str, Part]) -> dict[str, str]:
    """The text of each chart, by its name; those of a GPU end in the name of the device."""
    rows = [row for part in parts.values() for row in part.rows]
    gpus = [*dict.fromkeys(row.device for row in rows if row.device_type != "cpu")]
    unmeasured = [] if gpus else ["GPUs: not measured yet."]
    drawn = _charts({family: _of_cpu(part) for family, part in parts.items()}, "", unmeasured)
    for device in gpus:
        kept = {
            family: replace(part, rows=[row for row in part.rows if row.device == device])
            for family, part in parts.items()
        }
        drawn |= _charts(kept, f"-{_slug(device)}", [])
    return drawn


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def with_gpus(text: str, names: Collection[str]) -> str:
    """A page with the charts of GPUs below those of the CPU."""

    def image(match: re.Match[str]) -> str:
        alt, folder, name = match.groups()
        also = sorted(n for n in names if n.startswith(f"{name}-"))
        return "\n\n".join([match[0], *(f"![{alt}, {n}]({folder}{n}.svg)" for n in also)])

    return _IMAGE.sub(image, text)


def _of_cpu(part: Part) -> Part:
    """The rows of the CPU that has most."""
    devices: dict[str, list[Row]] = {}
    for row in part.rows:
        if row.device_type == "cpu":
            devices.setdefault(row.device, []).append(row)
    return replace(part, rows=max(devices.values(), key=len, default=[]))


def _charts(parts: Mapping[str, Part], suffix: str, remarks: Sequence[str]) -> dict[str, str]:
    makers: dict[str, tuple[Callable[..., Drawing], list[str]]] = {
        "whole_step": (_whole_step, ["conv_bn", "memory"]),
        "folding": (_folding, ["conv_bn"]),
        "memory": (_memory, ["memory"]),
        "optimizers": (_optimizers, ["amp_step"]),
        "apex": (_apex, ["apex"]),
        "batch_norm": (_batch_norm, ["batch_norm"]),
        "activations": (_activations, ["activations"]),
        "activations_all": (_all_activations, ["activations"]),
        "host": (_host, ["host"]),
        "chains": (_chains, ["chains"]),
        "few_bit": (_few_bit, ["few_bit"]),
        "pool": (_pool, ["pool"]),
        "depthwise": (_depthwise, ["depthwise"]),
        "images": (_images, ["images"]),
    }
    drawn = {}
    for name, (make, families) in makers.items():
        of_name = [parts[family] for family in families if family in parts and parts[family].rows]
        if len(of_name) == len(families):
            panels, rows = make(*of_name)
            panels = [panel for panel in panels if panel.groups]
            if panels:
                drawn[name + suffix] = _drawn(panels, rows, remarks)
    return drawn


def _drawn(panels: Sequence[Panel], rows: Sequence[Row], remarks: Sequence[str]) -> str:
    """The panels with device, release and days of the rows."""
    machines = dict.fromkeys(
        f"{r.device}{f', {r.threads} threads' * (r.device_type == 'cpu')}, torch {r.torch}"
        for r in rows
    )
    days = " and ".join(sorted({row.date[:10] for row in rows}))
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    text = chart(panels)
    notes = [BUSY if " *<" in text else BUSY_ROWS] * any(row.noisy for row in rows)
    measured = f"{'; '.join(machines)}, {dtypes}; measured {days}."
    return chart(panels, [*notes, " ".join([measured, *remarks])])


# --- panels ---


def _times(
    title: str,
    rows: Sequence[Row],
    label: Callable[[Row], str],
    base: Sequence[str] = ("eager",),
    others: Sequence[str] = ("compile",),
) -> Panel:
    """The times of rivals and fusedtrain, in units of the base's (left out: rows without one)."""
    rows = [row for row in rows if any(who in row.ratio for who in base)]

    def base_of(row: Row) -> str:
        return next(who for who in base if who in row.ratio)

    def share(row: Row, who: str) -> float | None:
        if who == "fusedtrain":
            return 1 / row.ratio[base_of(row)]
        return row.ratio[who] / row.ratio[base_of(row)] if who in row.ratio else None

    def text(who: str, group: int, value: float) -> str:
        row = rows[group]
        time = time_text(row.ns[who] / 1e9)
        if who != "fusedtrain":
            return time
        low, high = row.ratio_interval[base_of(row)]
        mark = " *" * row.noisy
        return f"{time}, {row.ratio[base_of(row)]:.2f}x ({low:.2f} to {high:.2f}){mark}"

    def ends(row: Row) -> tuple[float, float]:
        low, high = row.ratio_interval[base_of(row)]
        return 1 / high, 1 / low

    whos = [who for who in (*base, *others, "fusedtrain") if any(who in row.ns for row in rows)]
    absent = "compile" in others and "compile" not in whos
    return Panel(
        HOW.format(base=" or ".join(who for who in base if who in whos)),
        [label(row) for row in rows],
        {who: [share(row, who) for row in rows] for who in whos},
        title=title,
        text=text,
        line=1,
        most=MOST,
        intervals={"fusedtrain": [ends(row) for row in rows]},
        missing={"compile": "not measured in these runs"} if absent else {},
    )


def _gains(
    title: str, rows: Sequence[Row], label: Callable[[Row], str], best: bool = False
) -> Panel:
    """The gain over eager torch, or over the strongest rival, the largest first."""

    def rival(row: Row) -> str:
        return (best and row.strongest()) or "eager"

    rows = [row for row in rows if rival(row) in row.ratio]
    rows.sort(key=lambda row: -row.ratio[rival(row)])

    def text(who: str, group: int, value: float) -> str:
        row = rows[group]
        low, high = row.ratio_interval[rival(row)]
        name = f" {rival(row)}" if best else ""
        return f"{value:.2f}x{name} ({low:.2f} to {high:.2f}){' *' * row.noisy}"

    return Panel(
        f"Time of {'the strongest rival' if best else 'eager torch'} / fusedtrain's: "
        "above 1 fusedtrain is faster (99 % interval)",
        [label(row) for row in rows],
        {"fusedtrain": [row.ratio[rival(row)] for row in rows]},
        title=title,
        text=text,
        line=1,
    )


def _largest_batches(rows: Sequence[Row]) -> Panel:
    """Both batches, of `memory="store"` and `"recompute"`, in the memory of eager's batch."""
    return Panel(
        "Images; more is better",
        [f"{_network(row)}\n{row.layout}, {row['pixels']} px" for row in rows],
        _by_memory(rows, lambda row, who: row["fits"].get(who)),
        title="The largest batch that trains in the memory of eager's",
        text=lambda who, group, value: f"{value:.0f}",
    )


def _by_memory(
    rows: Sequence[Row], value: Callable[[Row, str], float | None]
) -> dict[str, Sequence[float | None]]:
    names = {"eager": "eager", "compile": "compile", "store": "store", "recompute": "fusedtrain"}
    series = {name: [value(row, who) for row in rows] for name, who in names.items()}
    return {name: values for name, values in series.items() if any(values)}


def _network(row: Row) -> str:
    return NETWORKS.get(row.model, row.model)


def _step_label(row: Row) -> str:
    size = f"{row.layout}, {row['batch']} x {row['pixels']} px"
    kind = f", {row.dtype.removesuffix(' AMP')}" if row.dtype != "float32" else ""
    return f"{_network(row)}, {row['optimizer']}{kind}\n{size}"


def _chosen(part: Part, **fields: object) -> list[Row]:
    """The rows with these values."""

    def value(row: Row, name: str) -> object:
        return vars(row)[name] if name in vars(row) else row.get(name, None)

    return [r for r in part.rows if all(value(r, name) == v for name, v in fields.items())]


def _largest(rows: Sequence[Row]) -> list[Row]:
    """The largest size of each op and layout."""
    most: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row.op, row.layout
        if key not in most or row.numel > most[key].numel:
            most[key] = row
    return [*most.values()]


# --- families ---

Drawing = tuple[list[Panel], Sequence[Row]]


def _whole_step(networks: Part, memory: Part) -> Drawing:
    steps = _chosen(networks, job="train")
    title = "A whole training step: forward, backward, optimizer"
    panels = [_times(title, steps, _step_label), _largest_batches(memory.rows)]
    return panels, [*steps, *memory.rows]


def _folding(part: Part) -> Drawing:
    folded, frozen = _chosen(part, job="inference"), _chosen(part, job="tune")

    def label(row: Row) -> str:
        return f"{_network(row)}\n{row.layout}, {row['batch']} x {row['pixels']} px"

    kept = Panel(
        "MB; less is better",
        [label(row) for row in frozen],
        {who: [row["saved"][who] / 1e6 for row in frozen] for who in ("eager", "fusedtrain")},
        title="... and what it keeps for backward",
        text=lambda who, group, value: f"{value:.0f} MB",
    )
    panels = [
        _times("Inference with folded norms: fold_conv_bn", folded, label),
        _times("A training step with frozen norms: fold_frozen_norms", frozen, _step_label),
        kept,
    ]
    return panels, [*folded, *frozen]


def _memory(part: Part) -> Drawing:
    rows = part.rows

    def label(row: Row) -> str:
        return f"{_network(row)}\n{row.layout}, {row['batch']} x {row['pixels']} px"

    def bytes_panel(what: str, title: str) -> Panel:
        def text(who: str, group: int, value: float) -> str:
            return f"{value:.0f} MB, {1e6 * value / rows[group][what]['eager']:.2f}x"

        def megabytes(row: Row, who: str) -> float | None:
            return row[what][who] / 1e6 if who in row[what] else None

        series = _by_memory(rows, megabytes)
        return Panel("Less is better", [*map(label, rows)], series, title, text)

    def of_eager(row: Row, who: str) -> float | None:
        return row.ns[who] / row.ns["eager"] if who in row.ns else None

    time = Panel(
        "Of eager's; shorter is faster",
        [label(row) for row in rows],
        _by_memory(rows, of_eager),
        "Time of forward and backward",
        text=lambda who, group, value: f"{value:.2f}x",
        line=1,
    )
    panels = [
        bytes_panel("kept", "Kept by forward for backward"),
        bytes_panel("peak", "Peak of forward and backward"),
        _largest_batches(rows),
        time,
    ]
    return panels, rows


JOBS = {
    "step": "the step alone",
    "check": "+ scaler and check for infs",
    "clip": "+ clipping",
    "ema": "+ average of weights",
    "zero": "+ zeroing gradients",
}


def _optimizers(part: Part) -> Drawing:
    rows = _chosen(part, model="resnet50", dtype="float32", op="adamw")
    rows.sort(key=lambda row: [*JOBS].index(row["job"]))
    others = _chosen(part, model="resnet50", dtype="float32", job="check")
    jobs = _times(
        "AdamW, ResNet-50's parameters; each job adds to the one above",
        rows, lambda row: JOBS[row["job"]], ("fused",), ("foreach", "deepspeed cpu"),
    )  # fmt: skip
    check = _gains("Every optimizer with scaler and check", others, lambda row: row.op, best=True)
    return [jobs, check], [*rows, *others]


def _apex(part: Part) -> Drawing:
    first = part.report.panels(part.rows)[0][0]
    return [replace(first, title="A step in Apex's calls, and by other means")], part.rows


def _batch_norm(part: Part) -> Drawing:
    rows = _largest(_chosen(part, model="", dtype="float32", **{"pass": BOTH}))
    names = {"bn_relu": "BN + ReLU", "bn_silu": "BN + SiLU", "bn_add_relu": "BN + add + ReLU",
             "frozen_bn_relu": "frozen BN + ReLU"}  # fmt: skip
    size = f", {rows[0]['shape']}" if rows else ""
    title = f"Batch norm with what follows it{size}, forward and backward"
    ops = _times(title, rows, lambda row: f"{names[row.op]}\n{row.layout}")
    layers = [row for row in part.rows if row.model and row.op != "bn"]
    return [ops, _layers(layers)], [*rows, *layers]


def _layers(rows: Sequence[Row]) -> Panel:
    """Geometric means over the norms of networks that something follows."""
    kinds: dict[str, list[float]] = {}
    for row in rows:
        name = f"{_network(row)}, batch {row['shape'][0]}\n{row.layout}"
        kinds.setdefault(name, []).append(row.ratio["eager"])
    means = [geometric_mean(ratios) for ratios in kinds.values()]

    def text(who: str, group: int, value: float) -> str:
        ratios = [*kinds.values()][group]
        return f"{value:.2f}x, layers {min(ratios):.2f}x to {max(ratios):.2f}x"

    return Panel(
        "Eager's time / fusedtrain's, geometric mean: above 1 fusedtrain is faster",
        [*kinds],
        {"fusedtrain": means},
        "The norms with activation or addition of whole networks",
        text,
        line=1,
    )


def _activations(part: Part) -> Drawing:
    rows = _chosen(part, dtype="float32", numel=2**23, **{"pass": BOTH})
    return [_times("Activations, 2^23 elements, forward and backward", rows, _op)], rows


def _all_activations(part: Part) -> Drawing:
    rows = _chosen(part, dtype="float32", numel=2**20, **{"pass": BOTH})
    return [_gains("Every activation, 2^20 elements, forward and backward", rows, _op)], rows


def _op(row: Row) -> str:
    return row.op


def _host(part: Part) -> Drawing:
    rows = [
        row
        for row in part.rows
        if row["pass"] in (BOTH, "clip") and row.layout in ("contiguous", "") and not row.model
    ]
    title = "A call on a tensor of 64 numbers, forward and backward: time on the host"
    return [_times(title, rows, _op, ("eager", "fused"), ())], rows


def _chains(part: Part) -> Drawing:
    rows = _largest(_chosen(part, dtype="float32", **{"pass": BOTH}))
    title = "Chains of 2^24 elements, forward and backward"
    return [_times(title, rows, lambda row: f"{row.op}\n{row.layout or 'rows'}")], rows


def _few_bit(part: Part) -> Drawing:
    rows = _chosen(part, dtype="float32", numel=2**24, **{"pass": BOTH})
    title = "Derivatives in few bits, 2^24 elements, forward and backward"
    return [_times(title, rows, lambda row: f"{row.op}\nkeeps {_kept(row)} an element")], rows


def _pool(part: Part) -> Drawing:
    rows = _chosen(part, dtype="float32", **{"pass": BOTH})
    rows.sort(key=lambda row: (row.layout, -row.numel, row.op))

    def label(row: Row) -> str:
        size = shape_text(row["shape"][1:])
        window = row.op.removeprefix("max_pool2d ")
        return f"{size}, {window}\n{row.layout}, keeps {_kept(row)}"

    return [_times("Max pooling, batch 8, forward and backward", rows, label)], rows


def _kept(row: Row) -> str:
    ours, theirs = (row["kept"][who] for who in ("fusedtrain", "eager"))
    return f"{ours:.2g} of {theirs:.2g} B"


def _depthwise(part: Part) -> Drawing:
    panels = [_filled(panel) for panels in part.report.panels(part.rows) for panel in panels]
    return panels, part.rows


def _filled(panel: Panel) -> Panel:
    """Without the groups that have no bar."""
    numbers = [n for n in range(len(panel.groups)) if any(v[n] for v in panel.series.values())]
    series = {who: [values[n] for n in numbers] for who, values in panel.series.items()}
    return replace(panel, groups=[panel.groups[n] for n in numbers], series=series)


def _images(part: Part) -> Drawing:
    rows = _chosen(part, dtype="float32")

    def label(row: Row) -> str:
        return f"{row['shape'][0]} of 3 x 224 x 224\n{row.layout}"

    return [_times("Bytes to normalised floats", rows, label)], rows
