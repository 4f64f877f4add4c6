"""The charts in docs/charts: bars of the stored rows that decide, drawn by matplotlib as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.rows import Row
from fusedtrain._text import shape_text, size_text, time_text

Parts = Mapping[str, Sequence[Row]]  # the rows of each family
NETWORKS = {
    "efficientnet_b0": "EfficientNet-B0", "mobilenet_v3_large": "MobileNetV3-L",
    "mobilenetv4_conv_small": "MobileNetV4-small", "convnext_tiny": "ConvNeXt-T",
    "resnet18": "ResNet-18", "resnet50": "ResNet-50", "vit_l_16": "ViT-L/16",
    "gpt": "GPT", "bert": "BERT", "llama": "Llama", "diffusion_unet": "diffusion U-Net",
}  # fmt: skip
NAMES = {"eager": "eager torch", "compile": "torch.compile", "fused": "torch, fused=True"}
MEMORY = {"fusedtrain": 'memory="recompute"', "store": 'memory="store"'}
APEX = {"fusedtrain": "Apex's calls", "own": "own step", "max_grad_norm": "own, max_grad_norm"}
BOTH = "forward+backward"
MOST = 3.0  # times as long as the rival's: longer bars are cut
WIDTH, BAR = 7.8, 0.17  # inches
# Colours on light pages, and their counterparts on dark ones.
INK, FAINT, CARD = "#1f2328", "#59636e", "#ffffff"
COLORS = {
    "fusedtrain": "#1b6ca8", MEMORY["fusedtrain"]: "#1b6ca8", BOTH: "#1b6ca8",
    MEMORY["store"]: "#8ec1e8", "forward": "#8ec1e8", "backward": "#cfe3f4",
    "Apex's calls": "#1b6ca8", "own step": "#8ec1e8", "own, max_grad_norm": "#cfe3f4",
    "torch.compile": "#e8a33d",
}  # fmt: skip
OTHERS = ("#b8bec6", "#7a8793", "#c9b48a", "#9fc5a4")
DARK = {
    INK: "#f0f6fc", FAINT: "#9198a1", CARD: "#15191f", "#1b6ca8": "#4a9edb", "#b8bec6": "#6b737d",
    "#e8a33d": "#d18f2c", "#8ec1e8": "#2f6d9e", "#cfe3f4": "#274b67",
}  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """A bar, the words at its end, and the ends of its interval."""

    length: float
    text: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """Groups of bars, one of each contestant, the first on top.

    Args:
        title: above the panel.
        label: below the title: unit and direction.
        rows: that are shown.
        groups: their names.
        bars: contestant -> a bar for each group, or None.
        line: where no difference is.
    """

    title: str
    label: str
    rows: Sequence[Row]
    groups: Sequence[str]
    bars: Mapping[str, Sequence[Bar | None]]
    line: float | None = None


def facts(row: Row) -> list[str]:
    """Words that tell a row from others of its family; "" where the row lacks one."""
    size = shape_text(row.get("shape", ())) or size_text(row.numel) * (row.numel > 0)
    if "batch" in row.extra:
        size = f"{row['batch']} x {row['pixels']} px"
    elif "tensors" in row.extra:
        size = f"{row.numel / 1e6:.1f} M"
    step = row.get("job", row.get("pass", ""))
    network, kept = NETWORKS.get(row.model, row.model), row.get("kept", {}) if row.op else {}
    keeps = f"keeps {kept['fusedtrain']:.2g} of {kept['eager']:.2g} B" if kept else ""
    return [row.op, network, step, row.get("optimizer", ""), size, row.layout, row.dtype, keeps]


def labels(rows: Sequence[Row]) -> list[str]:
    """Names of rows in a chart: the facts that differ."""
    table = [facts(row) for row in rows]
    shown = [n for n, column in enumerate(zip(*table, strict=True)) if len({*column}) > 1]
    names = [[line[n] for n in shown or (0, 1) if line[n]] for line in table]
    return ["\n".join(filter(None, (name[0], ", ".join(name[1:])))) for name in names]


def chosen(rows: Iterable[Row], **fields: Any) -> list[Row]:
    """The rows with these values; a tuple has several, and a function says whether one fits."""

    def fits(row: Row, name: str, wanted: Any) -> bool:
        value = vars(row)[name] if name in vars(row) else row.get(name, None)
        if callable(wanted):
            return bool(wanted(value))
        return value in wanted if isinstance(wanted, tuple) else bool(value == wanted)

    return [row for row in rows if all(fits(row, *field) for field in fields.items())]


# --- panels ---


def times(
    title: str,
    rows: Sequence[Row],
    rivals: Sequence[str] = ("eager",),
    others: Sequence[str] = ("compile",),
) -> Panel:
    """Times of fusedtrain, its strongest rival and others, in units of the rival's."""
    pairs = [(row, who) for row in rows if (who := row.strongest(rivals))]
    names = {NAMES.get(who, who) for _, who in pairs}
    base = names.pop() if len(names) == 1 else "rival"

    def ours(row: Row, who: str) -> Bar:
        (low, high), ratio = row.ratio_interval[who], row.ratio[who]
        text = f"{_time(row.ns['fusedtrain'])}, {ratio:.2f}x ({low:.2f} to {high:.2f})"
        return Bar(1 / ratio, text + " *" * row.noisy, (1 / high, 1 / low))

    def other(row: Row, who: str, name: str) -> Bar | None:
        if name not in row.ratio:
            return None
        return Bar(row.ratio[name] / row.ratio[who], _time(row.ns[name]))

    bars: dict[str, list[Bar | None]] = {
        base: [Bar(1, _time(r.ns[who]) + f" {who}" * (base == "rival")) for r, who in pairs],
        **{NAMES.get(n, n): [other(row, who, n) for row, who in pairs] for n in others},
        "fusedtrain": [ours(row, who) for row, who in pairs],
    }
    label = f"Shorter is faster. 1.5x: {base} takes 1.5 times as long (99 % interval)"
    shown = [row for row, _ in pairs]
    return Panel(title, label, shown, labels(shown), _measured_ones(bars), line=1)


def amounts(title: str, rows: Sequence[Row], field: str) -> Panel:
    """Bytes, images or times of each contestant, and what they are of the base's."""
    label, form = AMOUNTS[field]
    names = {"apex": APEX, "memory": MEMORY}.get(rows[0].family if rows else "", {})
    base = "fusedtrain" if names is APEX else "eager"
    values: list[Mapping[str, float]] = [getattr(row, field, None) or row[field] for row in rows]

    def bar(of_row: Mapping[str, float], who: str) -> Bar | None:
        if who not in of_row:
            return None
        ratio = f", {of_row[who] / of_row[base]:.2f}x" if who != base else ""
        return Bar(of_row[who], form(of_row[who]) + ratio)

    order = (base, "compile", "store", "own", "max_grad_norm", "fused", "foreach", "masters",
             "fusedtrain")  # fmt: skip
    bars = {names.get(w, NAMES.get(w, w)): [bar(of_row, w) for of_row in values] for w in order}
    return Panel(title, label, rows, labels(rows), _measured_ones(bars))


def means(title: str, rows: Sequence[Row]) -> Panel:
    """Geometric means of eager's time / fusedtrain's over layers, and their range."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in chosen(rows, ratio=lambda ratio: "eager" in ratio):
        kind = NETWORKS.get(row.model, row.op)
        group = f"{kind}, batch {row['shape'][0]}\n{row.layout}"
        ratios.setdefault((row["pass"], group), []).append(row.ratio["eager"])

    def bar(kind: tuple[str, str]) -> Bar | None:
        if kind not in ratios:
            return None
        mean, least, most = (of(ratios[kind]) for of in (geometric_mean, min, max))
        return Bar(mean, f"{mean:.2f}x, {least:.2f}x to {most:.2f}x")

    label = "Eager's time / fusedtrain's, geometric mean and range: above 1 fusedtrain is faster"
    groups = sorted({group for _, group in ratios})
    bars = {
        name: [bar((name, group)) for group in groups] for name in ("forward", "backward", BOTH)
    }
    return Panel(title, label, rows, groups, _measured_ones(bars), line=1)


def _measured_ones(bars: Mapping[str, list[Bar | None]]) -> dict[str, list[Bar | None]]:
    return {who: of_who for who, of_who in bars.items() if any(of_who)}


def _time(ns: float) -> str:
    return time_text(ns / 1e9)


def _bytes(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


AMOUNTS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "fits": ("Images; more is better", "{:.0f}".format), "kept": ("Less is better", _bytes),
    "saved": ("Less is better", _bytes), "peak": ("Less is better", _bytes),
    "ns": ("Less is better", _time),
}  # fmt: skip
_BOTH = {"pass": BOTH, "dtype": "float32"}
_LARGE = {**_BOTH, "numel": lambda numel: numel > 2**23}
_BATCH = "The largest batch that trains in the memory of eager's"
_RESNET = {"model": "resnet50", "dtype": "float32"}
# Chart, panel, title, family, fields of the rows, and what else the panel wants.
PANELS: Sequence[tuple[str, Callable[..., Panel], str, str, Mapping[str, Any], Sequence[Any]]] = (
    ("whole_step", times, "A whole training step: forward, backward, optimizer", "conv_bn",
     {"job": "train"}, ()),
    ("whole_step", amounts, _BATCH, "memory", {}, ["fits"]),
    ("transformers", times, "A training step with dropout: forward, backward, AdamW",
     "transformers", {}, ()),
    ("folding", times, "Inference with folded norms: fold_conv_bn", "conv_bn",
     {"job": "inference"}, ()),
    ("folding", times, "A training step with frozen norms: fold_frozen_norms", "conv_bn",
     {"job": "tune"}, ()),
    ("folding", amounts, "... and what it keeps for backward", "conv_bn", {"job": "tune"},
     ["saved"]),
    ("memory", amounts, "Kept by forward for backward", "memory", {}, ["kept"]),
    ("memory", amounts, "Peak of forward and backward", "memory", {}, ["peak"]),
    ("memory", amounts, _BATCH, "memory", {}, ["fits"]),
    ("memory", amounts, "Time of forward and backward", "memory", {}, ["ns"]),
    ("optimizers", times, "AdamW on ResNet-50's parameters; each job adds to the one above",
     "amp_step", {**_RESNET, "op": "adamw"}, [("fused",), ("foreach", "deepspeed cpu")]),
    ("optimizers", times, "Every optimizer with scaler and check, beside its strongest rival",
     "amp_step", {**_RESNET, "job": "check"}, [(), ()]),
    ("apex", amounts, "A step in Apex's calls, and by other means", "apex", {}, ["ns"]),
    ("batch_norm", times, "Batch norm with what follows, [32, 96, 56, 56], forward and backward",
     "batch_norm", {**_LARGE, "model": ""}, ()),
    ("batch_norm", means, "The norms with activation or addition of whole networks", "batch_norm",
     {"model": bool, "op": lambda op: op != "bn"}, ()),
    ("activations", times, "Activations, 2^23 elements, forward and backward", "activations",
     {**_BOTH, "numel": 2**23}, ()),
    ("activations_all", times, "Every activation, 2^20 elements, forward and backward",
     "activations", {**_BOTH, "numel": 2**20}, ()),
    ("host", times, "A call on a tensor of 64 numbers, forward and backward: time on the host",
     "host", {"pass": (BOTH, "clip"), "layout": ("contiguous", ""), "model": ""}, [(), ()]),
    ("chains", times, "Chains of 2^24 elements, forward and backward", "chains", _LARGE, ()),
    ("few_bit", times, "Derivatives in few bits, 2^24 elements, forward and backward", "few_bit",
     {**_BOTH, "numel": 2**24}, ()),
    ("pool", times, "Max pooling, batch 8, forward and backward", "pool", _BOTH, ()),
    ("depthwise", means, "Layers of networks by dimensions, kernel size / stride", "depthwise",
     {}, ()),
    ("images", times, "Bytes to normalised floats", "images", {"dtype": "float32"}, ()),
)  # fmt: skip


def charts(parts: Parts) -> dict[str, list[Panel]]:
    """Panels of each chart by its name, which ends in the device's for a GPU."""
    made: dict[str, list[Panel]] = {}
    rows = [row for of_family in parts.values() for row in of_family]
    for device in ("", *dict.fromkeys(row.device for row in rows if row.device_type != "cpu")):
        end = device and "-" + re.sub(r"[^a-z0-9]+", "-", device.lower())
        for name, panel_of, title, family, fields, more in PANELS:
            shown = chosen(_of_device(parts.get(family, ()), device), **fields)
            if (panel := panel_of(title, shown, *more)).groups:
                made.setdefault(name + end, []).append(panel)
    return made


def _of_device(rows: Sequence[Row], device: str) -> list[Row]:
    """The rows of the device; "" stands for the CPU that has most."""
    devices = [row.device for row in rows if row.device_type == "cpu"]
    device = device or max(dict.fromkeys(devices), key=devices.count, default="")
    return [row for row in rows if row.device == device]


# --- drawing ---


def draw(panels: Sequence[Panel]) -> str:
    """The panels below each other as SVG: the same numbers give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    sizes = [_size(panel) for panel in panels]
    file = io.StringIO()
    with rc_context({"svg.hashsalt": "fusedtrain", "svg.fonttype": "none", "font.size": 8,
                     "text.color": INK, "ytick.color": INK}):  # fmt: skip
        figure = Figure((WIDTH, sum(sizes) + 0.3), facecolor=CARD, layout="constrained")
        places = figure.subplots(len(panels), squeeze=False, height_ratios=sizes)[:, 0]
        for axes, panel in zip(places, panels, strict=True):
            _draw(axes, panel)
        figure.supxlabel(_measured(panels), color=FAINT, size=7, x=0.01, ha="left")
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    dark = "".join(
        f'[style*="{of}: {light}"]{{{of}:{there}!important}}'
        for light, there in DARK.items()
        for of in ("fill", "stroke")
    )
    font = "text{font-family:'DejaVu Sans',Verdana,sans-serif}"
    style = f"<style>{font}@media(prefers-color-scheme:dark){{{dark}}}</style>"
    svg = re.sub(r"<!--.*?-->|font-family: [^;]*; ", "", file.getvalue(), flags=re.S)
    return re.sub(r"<svg [^>]*>", lambda tag: tag[0] + style, " ".join(svg.split()), count=1) + "\n"


def _measured(panels: Sequence[Panel]) -> str:
    """Device, release and days of the rows."""
    rows = [row for panel in panels for row in panel.rows]
    machines = dict.fromkeys(
        f"{r.device}{f', {r.threads} threads' * (r.device_type == 'cpu')}, torch {r.torch}"
        for r in rows
    )
    days = " and ".join(sorted({row.date[:10] for row in rows}))
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    busy = "  *: the machine was busy" * any(row.noisy for row in rows)
    return f"{'; '.join(machines)}, {dtypes}; measured {days}.{busy}"


def _size(panel: Panel) -> float:
    """Inches."""
    lines = sum(max(2, sum(b[n] is not None for b in panel.bars.values())) + 0.7
                for n in range(len(panel.groups)))  # fmt: skip
    return BAR * lines + 0.8


def _draw(axes: Any, panel: Panel) -> None:
    """One panel: a bar is 1 high."""
    y, middles = 0.0, []
    most = max(bar.length for bars in panel.bars.values() for bar in bars if bar is not None)
    if panel.label.startswith("Shorter"):
        most = min(MOST, most)
    drawn = set[str]()
    for group in range(len(panel.groups)):
        of_group = {who: bar for who, bars in panel.bars.items() if (bar := bars[group])}
        empty = max(0, 2 - len(of_group)) / 2
        middles.append(y + empty + (len(of_group) - 1) / 2)
        for number, (who, bar) in enumerate(of_group.items()):
            place = y + empty + number
            color = COLORS.get(who, OTHERS[[*panel.bars].index(who) % len(OTHERS)])
            name = who if who not in drawn else None
            axes.barh(place, min(bar.length, most), 0.84, color=color, label=name)
            drawn.add(who)
            end = min(bar.length, most)
            if bar.interval is not None:
                ends = [min(end, most) for end in bar.interval]
                axes.plot(ends, [place, place], color=INK, lw=0.9, marker="|", ms=4)
                end = max(end, *ends)
            words = bar.text + ", bar cut" * (bar.length > most)
            axes.annotate(words, (end, place), (4, 0), textcoords="offset points", va="center")
        y += max(2, len(of_group)) + 0.7
    if panel.line is not None:
        axes.axvline(panel.line, color=FAINT, lw=0.7, ls=(0, (3, 3)), zorder=0)
    axes.set(xlim=(0, 1.6 * most), ylim=(y - 1, -0.7), xticks=[], yticks=middles)
    axes.set_yticklabels(panel.groups, ha="left")
    longest = max(len(line) for name in panel.groups for line in name.split("\n"))
    axes.tick_params(length=0, pad=4 + 4.7 * longest)  # points
    axes.spines[:].set_visible(False)
    columns = 4 if len(panel.bars) <= 4 else 3
    lines = -(-len(panel.bars) // columns)
    axes.set_title(panel.title, loc="left", weight="bold", size=9, pad=18 + 12 * lines)
    axes.annotate(panel.label, (0, 1), (0, 8 + 12 * lines), xycoords="axes fraction", size=7,
                  textcoords="offset points", color=FAINT)  # fmt: skip
    if len(panel.bars) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False,
                    borderaxespad=0, handlelength=1, columnspacing=1)  # fmt: skip
