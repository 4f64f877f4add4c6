"""The picture of a memory plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MODULES = ("#1f4e79", "#3b7dbf", "#7fb2dd", "#2e7d6b", "#63b39e", "#a9d6c8")
_COLOURS = {
    "other modules": "#c3c9d0", "recomputed": "#e08a1e", "gradients and the rest": "#e9dcc3",
}  # fmt: skip
_BARS = 10


class Picture(NamedTuple):
    """Fields of a `MemoryPlan`. `outputs`: how many there are; `kinds`: rows of recomputed ops."""

    budget: int
    peak: int
    eager_peak: int
    store_peak: int
    milliseconds: float
    extra_milliseconds: float
    timeline: dict[str, list[int]]
    timeline_store: list[int]
    backward_at: int
    recomputed: int
    outputs: int
    kinds: list[tuple[str, int, int, int, float]]


def draw(plan: Picture, path: str | Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("MemoryPlan.plot needs matplotlib: pip install matplotlib") from error
    kinds = plan.kinds[:_BARS]
    figure = Figure(figsize=(11, 6 + 0.32 * max(len(kinds), 1)), layout="constrained")
    heights = [4.6, 0.5 + 0.32 * max(len(kinds), 1)]
    top, bottom = figure.subplots(2, 1, height_ratios=heights)
    _timeline(top, plan)
    _bars(bottom, plan, kinds)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _timeline(axes: Axes, plan: Picture) -> None:
    """Areas under the plan, and lines for `convert`, the budget and eager's peak."""
    scale, unit = _unit(max(plan.eager_peak, plan.store_peak, plan.budget))
    moments = range(len(plan.timeline_store))
    names = [name for name, values in plan.timeline.items() if any(values)]
    modules = [name for name in names if name not in _COLOURS]
    order = [*modules, *(name for name in _COLOURS if name in names)]
    colours = {**dict(zip(modules, _MODULES * 2)), **_COLOURS}
    axes.stackplot(
        moments,
        [[value / scale for value in plan.timeline[name]] for name in order],
        labels=[name if name in list(_COLOURS)[1:] else f"kept of {name}" for name in order],
        colors=[colours[name] for name in order],
        linewidth=0,
    )
    store = [value / scale for value in plan.timeline_store]
    axes.plot(moments, store, color="black", linewidth=1.2, label="convert, without the plan")
    lines = (
        ("budget", plan.budget, "#b3261e", "-"),
        ("eager's peak", plan.eager_peak, "gray", ":"),
    )
    for name, size, colour, style in lines:
        if size:
            label = f"{name}: {size / scale:.3g} {unit}"
            axes.axhline(size / scale, color=colour, linestyle=style, linewidth=1.4, label=label)
    axes.axvline(plan.backward_at, color="gray", linewidth=0.8)
    end = axes.get_xaxis_transform()
    axes.text(
        plan.backward_at, 1.0, "forward  ", ha="right", va="bottom", transform=end, fontsize=9
    )
    axes.text(
        plan.backward_at, 1.0, "  backward", ha="left", va="bottom", transform=end, fontsize=9
    )
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    axes.set_xticks([])
    axes.set_ylabel(f"allocated, {unit}")
    axes.set_xlabel("moments of a training step: every tensor that autograd saves, then uses")
    axes.set_title(
        f"peak {plan.peak / scale:.3g} {unit} under the plan, {plan.recomputed} of "
        f"{plan.outputs} outputs recomputed",
        loc="left", pad=18,
    )  # fmt: skip
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False,
        fontsize=8,
    )  # fmt: skip


def _bars(axes: Axes, plan: Picture, kinds: list[tuple[str, int, int, int, float]]) -> None:
    """The bytes of each op's recomputed outputs, with their time as text."""
    scale, unit = _unit(max((row[3] for row in kinds), default=0))
    bars = axes.barh(range(len(kinds)), [row[3] / scale for row in kinds], 0.7, color="#e08a1e")
    texts = [
        f"{size / scale:.3g} {unit}, {ms:.3g} ms ({chosen} of {count})"
        for _, count, chosen, size, ms in kinds
    ]
    axes.bar_label(bars, texts, padding=4, fontsize=8)
    axes.set_yticks(range(len(kinds)), [row[0] for row in kinds], fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.32)
    axes.set_xlabel(f"bytes that are recomputed instead of kept, {unit}")
    share = plan.extra_milliseconds / plan.milliseconds if plan.milliseconds else 0.0
    title = f"recomputed: {plan.extra_milliseconds:.3g} ms, {share:.0%} of a step"
    axes.set_title(title if kinds else "nothing is recomputed", loc="left", fontsize=10)
    if not kinds:
        axes.set_axis_off()


def _unit(size: float) -> tuple[float, str]:
    return next(
        ((scale, unit) for scale, unit in ((1e9, "GB"), (1e6, "MB")) if size >= scale), (1e3, "kB")
    )
