"""``fit``: the largest batch, or the fastest way to train a batch, in so much memory."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

from .._text import FEW_BYTES, bytes_in, memory_text, shape_text
from ..advisor._views import users_part
from ..advisor.fitting import HEADINGS, PRECISIONS, FitReport, fit
from ..advisor.tuning._job import split
from ._exit import Exit
from ._output import (
    Column,
    NewFile,
    Outputs,
    Report,
    Table,
    machine_facts,
    output_options,
    progress,
    say,
)
from .tune import Setting, Shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEGEND = (
    "peak: parameters, buffers, inputs, gradients, the optimizer's states, everything that a step "
    "keeps for backward or makes meanwhile. Times are medians; the ways took turns."
)


class Size(click.ParamType[int]):
    """A size of memory: 800MB, 4GiB."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        size = value if isinstance(value, int) else bytes_in(str(value))
        if size is None:
            self.fail(f"{value!r} is no size, like '800MB' or '4GiB'", param, ctx)
        if size < FEW_BYTES:
            self.fail(f"{value} are {size} bytes; sizes are '800MB' or '4GiB'", param, ctx)
        return size


class Samples(Shape):
    """The shape of a sample, or path.py:FUNCTION."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        named = isinstance(value, str) and ":" in value
        return _checked(value, "--input") if named else super().convert(value, param, ctx)


def _checked(place: str, option: str) -> str:
    """The place of a function, if its file is there."""
    try:
        path = split(place)[0]
    except ValueError as error:
        hint = error if option == "MODEL" else f"{option}: expected path.py:FUNCTION, got {place}"
        raise click.UsageError(str(hint)) from None
    if path.endswith(".py") and not Path(path).is_file():
        raise click.UsageError(f"there is no file {path}; {option} is path.py:FUNCTION")
    return place


@click.command(epilog="Exit codes: 0 done; 1 nothing fits; 2 wrong usage; 3 the model does not "
               "import or raises; 4 stopped early (Ctrl-C), what was measured is "
               "shown.")  # fmt: skip
@click.argument("model")
@click.option("--input", "shape", type=Samples(), required=True,
              help="Of one sample: 3x224x224; or path.py:FUNCTION of the number of samples, which "
              "returns a batch.")  # fmt: skip
@click.option("--step", help="path.py:FUNCTION of model and batch, which returns the loss.  "
              "[default: cross-entropy, or the model's own loss]")  # fmt: skip
@click.option("--precision", type=click.Choice([*PRECISIONS]), default="fp32", show_default=True,
              help="bf16, fp16: the forward under autocast.")  # fmt: skip
@click.option("--memory", type=Size(), required=True, help="For a step: 800MB, 4GiB.")
@click.option("--batch", type=click.IntRange(2),
              help="The fastest way to train this one.  [default: the largest]")  # fmt: skip
@click.option("--classes", type=click.IntRange(2), default=1000, show_default=True,
              help="Of a model of torchvision, timm or transformers.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(1), help="Inputs are integers below this number.")
@click.option("--config", type=Setting(), multiple=True,
              help="For transformers: hidden_size=128; may be repeated.")  # fmt: skip
@click.option("--optimizer", type=click.Choice(["sgd", "adamw"]), default="sgd", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda if there]")
@click.option("--save", type=NewFile(), help="Write the plan into this JSON file.")
@click.option("--compile", "compiled", is_flag=True,
              help="Adds torch.compile with four activation memory budgets to the chart of "
              "--plot; each is compiled, in a minute or more.")  # fmt: skip
@output_options
def command(
    model: str, shape: tuple[int, ...] | str, step: str | None, precision: str, memory: int,
    batch: int | None, classes: int, tokens: int | None, config: Sequence[tuple[str, Any]],
    optimizer: str, device: str | None, save: Path | None, compiled: bool, outputs: Outputs,
) -> int:  # fmt: skip
    """Finds the largest batch of MODEL that trains in so much memory, or the fastest way to train
    a batch: eager PyTorch, convert, convert(memory="recompute"), or a plan of what is recomputed.

    MODEL: torchvision:resnet50, timm:efficientnet_b0, transformers:BertConfig, or
    path.py:build_model, a function without arguments that returns a module.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no CUDA device; leave --device out")
    _checked(model, "MODEL")
    if step is not None:
        _checked(step, "--step")
    failure: Exception | SystemExit | None = None
    with progress("fit") as begins, redirect_stdout(sys.stderr):
        try:
            seen = fit(
                model, shape, memory, batch=batch, step=step, precision=precision,
                classes=classes, tokens=tokens or 0, optimizer=optimizer, device=device,
                config=dict(config),
                curve=bool(outputs.plot or outputs.html), compiled=compiled, begin=begins,
            )  # fmt: skip
        except (Exception, SystemExit) as error:  # the function of a script may end it
            failure = error
    if failure is not None:
        failure.__traceback__ = users_part(failure.__traceback__)
        if failure.__traceback__ is not None:
            say("".join(traceback.format_exception(failure)).rstrip("\n"))
        say(f"fit: {model}: {type(failure).__name__}: {failure}")
        return Exit.SCRIPT_RAISED
    outputs.write(_report(seen, optimizer, shape))
    _save(seen, save)
    if seen.partial:
        return Exit.STOPPED
    return Exit.DONE if any(row.fits for row in seen.rows) else Exit.FOUND


def _save(seen: FitReport, path: Path | None) -> None:
    if path is None:
        return
    if seen.plan is None:
        say(f"{path} is not written: no plan fits")
        return
    try:
        seen.plan.save(path)
    except OSError as error:
        say(f"{path} is not written: {error}")
    else:
        say(f"{path} is written: convert(model, memory=MemoryPlan.load({str(path)!r}))")


def _report(seen: FitReport, optimizer: str, shape: Sequence[int] | str) -> Report:
    sample = shape if isinstance(shape, str) else shape_text(shape)
    facts = machine_facts(
        seen.device, threads=str(torch.get_num_threads()),
        input=f"{sample}, {optimizer}, {seen.precision}", memory=memory_text(seen.memory),
    )  # fmt: skip
    columns = [Column(name, left=name in ("way", "")) for name in HEADINGS]
    return Report(
        f"fusedtrain fit {seen.model}",
        {name: value for name, value in seen.to_json().items() if name != "partial"},
        [Table("", columns, seen.table())] if seen.rows else [],
        [*([LEGEND] if seen.rows else []), *seen.summary],
        facts,
        (lambda: _figure(seen)) if seen.curve else None,
        seen.partial,
    )


# --- the chart ---

_COLOURS = {"eager": "#5f6b76", "convert": "#3b6fb6", "recompute": "#8c3b63"}
# Lines of several points: label, colour, marker; by how the names of their ways begin.
_LINES = {"plan": ("plans", "#e08a1e", "o"),
          "checkpoint": ("torch.utils.checkpoint, every 1, 2, 4 blocks", "#2f7d5b", "s"),
          "torch.compile": ("torch.compile, budgets", "#7a5cc0", "^")}  # fmt: skip


def _figure(seen: FitReport) -> Figure:
    """Time of a step over its peak: a line of plans, a point for each other way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    scale, unit = (1e9, "GB") if max(row.peak for row in seen.curve) >= 1e9 else (1e6, "MB")
    for begin, (label, colour, marker) in _LINES.items():
        points = sorted(
            (row.peak / scale, 1e3 * (row.seconds or 0))
            for row in seen.curve
            if row.way.startswith(begin)
        )
        if points:
            axes.plot(*zip(*points), f"{marker}-", color=colour, label=label, zorder=3)
    for row in seen.curve:
        if row.way in _COLOURS:
            place = (row.peak / scale, 1e3 * (row.seconds or 0))
            axes.plot(*place, "D", color=_COLOURS[row.way], markersize=9, label=row.way)
    right = 1.1 * max(row.peak for row in seen.curve) / scale
    if seen.memory / scale < right:
        label = f"--memory: {memory_text(seen.memory)}"
        axes.axvline(seen.memory / scale, color="#b3261e", linewidth=1.2, label=label)
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1.1e3 * max(row.seconds or 0.0 for row in seen.curve))
    axes.set_xlabel(f"peak of a step, {unit}")
    axes.set_ylabel("time of a step, ms")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axes.set_title(f"{seen.model}, batch {seen.curve[0].batch}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
