"""``tune``: which switches make a model train faster here, each measured on the model itself."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import torch

from .._text import memory_text, shape_text
from ..advisor.tuning import (
    HEADINGS,
    NAMES,
    TrialFailed,
    TunedTrial,
    TuneReport,
    parse_budget,
    tune,
)
from ._exit import Exit
from ._output import Column, Outputs, Report, Table, machine_facts, output_options, progress, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEGEND = (
    "gain: the time of the best so far / the trial's, for a sample; both took turns. interval: "
    "99 % of the median gain, of fewer than 8 rounds their range. images/s of two trials are of "
    "different moments: compare gains. first step: build the model, apply the switches, take a "
    "step."
)


class Shape(click.ParamType[tuple[int, ...]]):
    """The shape of a sample: 3x224x224."""

    name = "shape"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            shape = tuple(int(part) for part in str(value).lower().split("x"))
        except ValueError:
            shape = ()
        if min(shape, default=0) < 1:
            self.fail(f"{value} is no shape of a sample, like 3x224x224", param, ctx)
        return shape


class Time(click.ParamType[float]):
    """A time: 90s, 5m, 1h."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            return parse_budget(str(value)) if isinstance(value, str) else float(value)
        except ValueError:
            self.fail(f"{value} is no time, like 90s, 5m or 1h", param, ctx)


class Setting(click.ParamType[tuple[str, Any]]):
    """NAME=VALUE; the value is a Python literal, otherwise text."""

    name = "name=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"{value} is not NAME=VALUE", param, ctx)
        try:
            return name, ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return name, text


@click.command(epilog="Exit codes: 0 done; 2 wrong usage; 3 the plain model does not import, "
               "raises or does not fit; 4 stopped early (Ctrl-C, the budget), what was measured "
               "is shown.")  # fmt: skip
@click.argument("model")
@click.option("--input", "shape", type=Shape(), required=True, help="Of one sample: 3x224x224.")
@click.option("--batch", type=click.IntRange(2), default=32, show_default=True,
              help="Samples in a step, until the batch size is tuned.")  # fmt: skip
@click.option("--classes", type=click.IntRange(2), default=1000, show_default=True,
              help="Of a model of torchvision, timm or transformers.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(1), help="Inputs are integers below this number.")
@click.option("--config", type=Setting(), multiple=True,
              help="For transformers: hidden_size=128; may be repeated.")  # fmt: skip
@click.option("--loader", help="path.py:build_loader; random samples without it.")
@click.option("--optimizer", type=click.Choice(["sgd", "adamw"]), default="sgd", show_default=True)
@click.option("--lr", type=float, help="Learning rate for --batch.  [default: 0.1; adamw: 1e-3]")
@click.option("--budget", type=Time(), default="5m", show_default=True,
              help="No trial is begun that would not fit.")  # fmt: skip
@click.option("--switch", "switches", type=click.Choice(NAMES), multiple=True,
              help="Try only this one; may be repeated.")  # fmt: skip
@click.option("--full", is_flag=True, help="Every combination, not one switch at a time.")
@click.option("--compile", "compiled", is_flag=True, help="Try torch.compile, too (slow).")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda if there]")
@output_options
def command(
    model: str, shape: tuple[int, ...], batch: int, classes: int, tokens: int | None,
    config: Sequence[tuple[str, Any]], loader: str | None, optimizer: str, lr: float | None,
    budget: float, switches: Sequence[str], full: bool, compiled: bool, device: str | None,
    outputs: Outputs,
) -> int:  # fmt: skip
    """Tries switches of training on MODEL, keeps those that pay here, and prints the recipe.

    MODEL: torchvision:resnet50, timm:efficientnet_b0, transformers:BertConfig, or
    path.py:build_model, a function without arguments that returns a module.
    """
    failed: TrialFailed | None = None
    with progress("tune") as begins:
        try:
            seen = tune(
                model, shape, batch=batch, classes=classes, tokens=tokens or 0,
                loader=loader or "", optimizer=optimizer, lr=lr, device=device, budget=budget,
                full=full, compile=compiled, switches=switches, config=dict(config), begin=begins,
            )  # fmt: skip
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        except TrialFailed as failure:
            failed = failure
    if failed is not None:
        if failed.traceback:
            say(failed.traceback.rstrip("\n"))
        say(f"tune: {model}: {failed.reason}")
        return Exit.SCRIPT_RAISED
    outputs.write(_report(seen, optimizer, shape))
    return Exit.STOPPED if seen.partial else Exit.DONE


def _report(seen: TuneReport, optimizer: str, shape: Sequence[int]) -> Report:
    threads, sample = str(torch.get_num_threads()), f"{shape_text(shape)}, {optimizer}"
    facts = machine_facts(seen.device, threads=threads, input=sample)
    facts["time"] = f"{seen.seconds:.0f} s"
    names = (*HEADINGS[:-1], "verdict")
    columns = [Column(name, left=name in ("trial", "verdict")) for name in names]
    notes = [*seen.summary, LEGEND, f"{seen.memory_means}."] if seen.trials else []
    timed = [trial for trial in seen.trials if trial.images_per_second is not None]
    return Report(
        f"fusedtrain tune {seen.model}",
        {name: value for name, value in seen.to_json().items() if name != "partial"},
        [Table("", columns, seen.rows())] if seen.trials else [],
        notes,
        facts,
        (lambda: _figure(timed, seen.model)) if timed else None,
        seen.partial,
        seen.recipe,
    )


# --- the chart ---

ACCEPTED, REFUSED, PLAIN = "#2e8540", "#b8c0c8", "#1b6ca8"


def _figure(trials: Sequence[TunedTrial], model: str) -> Figure:
    """Speed and memory of each trial, side by side."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 2 + 0.42 * len(trials)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    speeds = _relative(trials)
    memory = [(trial.memory or 0) / 1e6 for trial in trials]
    _bars(left, trials, speeds, [f"{speed:.2f}x" for speed in speeds])
    _bars(right, trials, memory, [memory_text(1e6 * size) for size in memory])
    left.set_yticks(range(len(trials)), [trial.name for trial in trials], fontsize=9)
    left.invert_yaxis()
    left.set_xlabel("images/s / plain's: gains, multiplied along the accepted")
    right.set_xlabel("memory of a step, MB")
    kinds = (("plain", PLAIN), ("accepted", ACCEPTED), ("refused", REFUSED))
    handles = [Patch(color=color, label=name) for name, color in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{model}: trials in their order", x=0.01, ha="left")
    return figure


def _relative(trials: Sequence[TunedTrial]) -> list[float]:
    """Speeds relative to the first trial: each has its gain over the best before it."""
    best, speeds = 1.0, [1.0]
    for trial in trials[1:]:
        speeds.append(best * (trial.gain or 0))
        if trial.accepted:
            best = speeds[-1]
    return speeds


def _bars(
    axes: Axes, trials: Sequence[TunedTrial], sizes: Sequence[float], labels: Sequence[str]
) -> None:
    colors = [ACCEPTED if trial.accepted else REFUSED for trial in trials]
    colors[0] = PLAIN
    bars = axes.barh(range(len(trials)), sizes, 0.68, color=colors)
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.margins(x=0.16)
    axes.spines[["top", "right"]].set_visible(False)
