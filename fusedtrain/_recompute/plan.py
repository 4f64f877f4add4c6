"""A plan of what backward recomputes: one decision for each output that can be recomputed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

from torch import nn

from .._text import column_lines, memory_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMAT = 3  # of the file
_ROWS = 12  # of the table
_BARS = 10  # of the picture
_MODULES = ("#1f4e79", "#3b7dbf", "#7fb2dd", "#2e7d6b", "#63b39e", "#a9d6c8")
_COLOURS = {
    "other modules": "#c3c9d0", "recomputed": "#e08a1e", "gradients and the rest": "#e9dcc3",
}  # fmt: skip


class PlannedStep(NamedTuple):
    """An output that can be recomputed. `op`: the function that makes the output; `module`: the
    module whose forward calls the function; `bytes` of the output; `milliseconds` of the op on the
    example."""

    op: str
    module: str
    bytes: int
    milliseconds: float
    recompute: bool


@dataclass(repr=False)
class MemoryPlan:
    """Decisions of :func:`fusedtrain.plan_memory`. Prints as a table.

    Bytes are those of one training step beside parameters, buffers and inputs: tensors kept for
    backward, recomputed outputs, gradients of activations and parameters. `peak`: measured under
    the plan; `predicted`: simulated; `eager_peak` and `store_peak`: measured of the stock model,
    and of `convert(model)`. `milliseconds`: of a forward and backward of `convert(model)`;
    `extra_milliseconds`: measured, of a step under the plan beyond that.

    `batch`: of the example; 0 if its tensors have no first dimension in common.

    The timelines are simulated bytes at up to 400 points of forward and backward, of which
    `backward_at` is the first of backward: `timeline_store` of `convert(model)`; `timeline` under
    the plan, by area, the sum of all areas being the bytes.
    """

    model: str  # the fingerprint of the model
    budget: int
    peak: int
    predicted: int
    eager_peak: int
    store_peak: int
    milliseconds: float
    extra_milliseconds: float
    device: str
    steps: list[PlannedStep] = field(default_factory=list)
    timeline_store: list[int] = field(default_factory=list)
    timeline: dict[str, list[int]] = field(default_factory=dict)
    backward_at: int = 0
    batch: int = 0
    lines: list[tuple[float, float]] = field(default_factory=list)  # see peak_at
    dropout: str = "torch"  # as in `convert`

    def __repr__(self) -> str:
        return (
            f"MemoryPlan(budget={self.budget}, peak={self.peak}, "
            f"recompute={self.recomputed} of {len(self.steps)})"
        )

    @property
    def recomputed(self) -> int:
        """The number of outputs that backward recomputes."""
        return sum(step.recompute for step in self.steps)

    def peak_at(self, batch: int) -> int:
        """The predicted peak of a step of another batch under this plan, without parameters,
        buffers and inputs, as `peak`.

        The bytes of each moment of the step are taken as a line over the batch, through the example
        and its first half. Batches below that half may need more, and so may larger tensors for
        which a library takes another kernel.

        Args:
            batch: samples.

        Raises:
            ValueError: `batch` is below 1; or the plan knows the example alone: its tensors have
                no first dimension in common, model or loss raised for half of it, or called other
                functions.
        """
        if batch < 1:
            raise ValueError(f"batch: must be at least 1, not {batch}")
        if not self.lines:
            raise ValueError(
                "batch: the plan knows the peak of its example alone; plan with inputs whose first "
                "dimension is the batch, at least 2, and a loss that takes any batch"
            )
        return round(max(base + each * batch for base, each in self.lines))

    def __str__(self) -> str:
        extra = self.extra_milliseconds / self.milliseconds if self.milliseconds else 0.0
        lines = [
            f"peak of a step {memory_text(self.peak)} of {memory_text(self.budget)} allowed, "
            "beside parameters, buffers, inputs and states: "
            f"{self.peak / max(self.eager_peak, 1):.2f}x of eager's {memory_text(self.eager_peak)}",
            f"backward recomputes {self.recomputed} of {len(self.steps)} outputs, "
            f"{extra:.0%} more time ({self.extra_milliseconds:.1f} ms a step, and "
            f"{self.milliseconds:.1f} ms by convert alone)",
        ]
        if self.lines:
            each = (self.peak_at(2 * self.batch) - self.peak_at(self.batch)) / self.batch
            lines.append(f"batch {self.batch}; a sample more takes {memory_text(each)}")
        rows = [("op", "recomputed", "bytes", "time")]
        for op, count, chosen, size, ms in self.kinds()[:_ROWS]:
            rows.append((op, f"{chosen} of {count}", memory_text(size), f"{ms:.1f} ms"))
        return "\n".join([*lines, *(column_lines(rows, words=(0,)) if len(rows) > 1 else ())])

    def kinds(self) -> list[tuple[str, int, int, int, float]]:
        """Rows of recomputed ops, the most bytes first: op, outputs, recomputed ones, their
        bytes and milliseconds."""
        rows = []
        for op in dict.fromkeys(step.op for step in self.steps):
            outputs = [step for step in self.steps if step.op == op]
            chosen = [step for step in outputs if step.recompute]
            size, ms = sum(s.bytes for s in chosen), sum(s.milliseconds for s in chosen)
            if chosen:
                rows.append((op, len(outputs), len(chosen), size, ms))
        return sorted(rows, key=lambda row: -row[3])

    def plot(self, path: str | Path) -> None:
        """Writes a picture with matplotlib: memory over a step, without and with the plan, and the
        ops that are recomputed. The suffix of `path` is the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("MemoryPlan.plot needs matplotlib: pip install matplotlib") from error
        bars = 0.32 * max(len(self.kinds()[:_BARS]), 1)
        figure = Figure(figsize=(11, 6 + bars), layout="constrained")
        top, bottom = figure.subplots(2, 1, height_ratios=[4.6, 0.5 + bars])
        _draw_timeline(top, self)
        _draw_bars(bottom, self)
        for axes in (top, bottom):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        content = {"fusedtrain_memory_plan": _FORMAT, **asdict(self)}
        content["steps"] = [list(step) for step in self.steps]
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> MemoryPlan:
        """Reads a plan that :meth:`save` wrote.

        Raises:
            ValueError: the file is no plan, or one of another format.
        """
        try:
            content = json.loads(Path(path).read_text())
            version = content.pop("fusedtrain_memory_plan")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"path: {path} has no memory plan ({error})") from error
        if version != _FORMAT:
            raise ValueError(
                f"path: {path} has a memory plan of format {version}, not {_FORMAT}: plan once more"
            )
        try:
            for name, hint in get_type_hints(cls).items():
                _check_type(name, content[name], hint)
            content["steps"] = [PlannedStep(*step) for step in content["steps"]]
            content["lines"] = [tuple(line) for line in content["lines"]]
            plan = cls(**content)
            least = 1 if plan.lines else 0
            if plan.batch < least:
                raise ValueError(f"batch: must be at least {least}, not {plan.batch}")
            if any(len(values) != len(plan.timeline_store) for values in plan.timeline.values()):
                raise ValueError("timeline: must be as long as timeline_store")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"path: {path} has no memory plan ({error})") from error
        return plan


def _check_type(name: str, value: Any, hint: Any) -> None:
    """Raises ValueError unless a value of JSON has the type that a field is annotated with."""
    kind, of = get_origin(hint) or hint, get_args(hint)
    if hint is PlannedStep:
        kind, of = tuple, tuple(get_type_hints(PlannedStep).values())
    expected: Any = {tuple: list, float: (int, float)}.get(kind, kind)
    if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name}: must be finite, not {value}")
    if kind is tuple:
        if len(value) != len(of):
            raise ValueError(f"{name}: expected rows of {len(of)}, got one of {len(value)}")
        for item, one in zip(value, of):
            _check_type(name, item, one)
    elif kind in (list, dict):
        for item in value.values() if kind is dict else value:
            _check_type(name, item, of[-1])


def fingerprint(model: nn.Module) -> str:
    """The names of a model's parameters and buffers, their shapes, dtypes, and what is trained."""
    import hashlib

    rows = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in (*model.named_parameters(), *model.named_buffers())
    ]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


OP_NAMES: dict[Callable[..., Any], str] = {}  # of this package's ops, which have no name themselves


def op_name(function: Callable[..., Any]) -> str:
    """The name of a step's function: `conv2d` of torch, `silu` of this package."""
    name: str = OP_NAMES.get(function, "")
    if not name:
        name = getattr(function, "__name__", "") or getattr(function, "name", "")
    return name.strip("_")


def _draw_timeline(axes: Axes, plan: MemoryPlan) -> None:
    """Areas under the plan, and lines for `convert`, the budget and eager's peak."""
    moments = range(len(plan.timeline_store))
    names = [name for name, values in plan.timeline.items() if any(values)]
    modules = [name for name in names if name not in _COLOURS]
    order = [*modules, *(name for name in _COLOURS if name in names)]
    colours = {**dict(zip(modules, _MODULES * 2)), **_COLOURS}
    axes.stackplot(
        moments,
        [plan.timeline[name] for name in order],
        labels=[name if name in list(_COLOURS)[1:] else f"kept of {name}" for name in order],
        colors=[colours[name] for name in order],
        linewidth=0,
    )
    label = "convert, without the plan"
    axes.plot(moments, plan.timeline_store, color="black", linewidth=1.2, label=label)
    lines = (
        ("budget", plan.budget, "#b3261e", "-"),
        ("eager's peak", plan.eager_peak, "gray", ":"),
    )
    for name, size, colour, style in lines:
        if size:
            label = f"{name}: {memory_text(size)}"
            axes.axhline(size, color=colour, linestyle=style, linewidth=1.4, label=label)
    axes.axvline(plan.backward_at, color="gray", linewidth=0.8)
    end = axes.get_xaxis_transform()
    for text, side in (("forward  ", "right"), ("  backward", "left")):
        axes.text(plan.backward_at, 1.0, text, ha=side, va="bottom", transform=end, fontsize=9)
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    axes.set_xticks([])
    axes.yaxis.set_major_formatter(lambda size, _: memory_text(size))
    axes.set_ylabel("allocated")
    axes.set_xlabel("moments of a training step: every tensor that autograd saves, then uses")
    title = f"peak {memory_text(plan.peak)} under the plan, {plan.recomputed} of {len(plan.steps)}"
    axes.set_title(f"{title} outputs recomputed", loc="left", pad=18)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False,
        fontsize=8,
    )  # fmt: skip


def _draw_bars(axes: Axes, plan: MemoryPlan) -> None:
    """The bytes of each op's recomputed outputs, with their time as text."""
    kinds = plan.kinds()[:_BARS]
    bars = axes.barh(range(len(kinds)), [row[3] for row in kinds], 0.7, color="#e08a1e")
    texts = [
        f"{memory_text(size)}, {ms:.3g} ms ({chosen} of {count})"
        for _, count, chosen, size, ms in kinds
    ]
    axes.bar_label(bars, texts, padding=4, fontsize=8)
    axes.set_yticks(range(len(kinds)), [row[0] for row in kinds], fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.32)
    axes.xaxis.set_major_formatter(lambda size, _: memory_text(size))
    axes.set_xlabel("bytes that are recomputed instead of kept")
    share = plan.extra_milliseconds / plan.milliseconds if plan.milliseconds else 0.0
    title = f"recomputed: {plan.extra_milliseconds:.3g} ms, {share:.0%} of a step"
    axes.set_title(title if kinds else "nothing is recomputed", loc="left", fontsize=10)
    if not kinds:
        axes.set_axis_off()
