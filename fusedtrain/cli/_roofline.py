"""The roofline of ``bench``: arithmetic per byte against arithmetic per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from ..advisor.bench import EAGER, OURS, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "activations": "#1b6ca8",
    "norm": "#c2571a",
    "amp-step": "#2e8540",
    "conv": "#7a3e9d",
    "depthwise": "#2a9d9d",
    "chains": "#b0892f",
}
GREY = "#8a8a8a"


def roofline(results: Sequence[Result], bandwidth: float, peak: float, device: str) -> Figure:
    """A point for each row, which has counted operations, and the two roofs of the same run.

    ``bandwidth`` in GB/s, of a copy; ``peak`` in operations/s, of a matrix product (NaN: no roof).
    """
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    for family in dict.fromkeys(r.entry.family for r in results):
        _points(axes, family, [r for r in results if r.entry.family == family])
    places = [r.operations / r.bytes for r in results]
    left, right = min(places) / 3, max(places) * 3
    if not math.isnan(peak):
        right = max(right, 3 * peak / (bandwidth * 1e9))
    _roofs(axes, left, right, bandwidth * 1e9, peak)
    axes.scatter([], [], marker="o", facecolors="none", edgecolors=GREY, label="eager torch")
    axes.set_xlabel("operations for each byte that must be moved")
    axes.set_ylabel("operations/s")
    axes.set_title(f"fusedtrain (filled) and eager torch (hollow) on {device}", loc="left")
    axes.grid(which="major", color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlim(left, right)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    return figure


def _points(axes: Axes, family: str, results: Sequence[Result]) -> None:
    color = COLORS[family]
    x = [r.operations / r.bytes for r in results]
    ours = [r.operations / (r.ns[OURS] * 1e-9) for r in results]
    axes.scatter(x, ours, color=color, label=family, zorder=3, s=28)
    for place, result, top in zip(x, results, ours, strict=True):
        if EAGER in result.ns:
            eager = result.operations / (result.ns[EAGER] * 1e-9)
            axes.plot([place, place], [eager, top], color=color, linewidth=0.8, zorder=2)
            axes.scatter([place], [eager], facecolors="white", edgecolors=color, zorder=3, s=28)


def _roofs(axes: Axes, left: float, right: float, bandwidth: float, peak: float) -> None:
    """The slope of the copy's bandwidth, and from where it meets the peak a level."""
    if math.isnan(bandwidth):
        return
    bend = right if math.isnan(peak) else min(right, peak / bandwidth)
    axes.plot([left, bend], [left * bandwidth, bend * bandwidth], color=GREY, linewidth=1.5)
    style: dict[str, Any] = {"color": "#555555", "fontsize": 9}
    place = left**0.2 * bend**0.8  # four fifths of the slope, on a logarithmic axis
    axes.annotate(
        f"copy: {bandwidth / 1e9:.1f} GB/s", (place, place * bandwidth), (-8, 4),
        textcoords="offset points", ha="right", **style,
    )  # fmt: skip
    if bend < right:
        axes.plot([bend, right], [peak, peak], color=GREY, linewidth=1.5)
        axes.annotate(
            f"matrix product: {peak / 1e9:.4g} GFLOP/s", (right, peak), (-6, 6),
            textcoords="offset points", ha="right", **style,
        )  # fmt: skip
