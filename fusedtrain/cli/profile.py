"""``profile``: where the time of a training script goes, by family of operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

from .. import __version__
from .._scripts import DONE, ENDED, EXITED, RAISED, STOPPED, Run, in_fresh_process
from ..timing import device_name
from ._exit import Exit
from ._output import Column, NewFile, Outputs, Report, Table, output_options, progress, today

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODULE = "fusedtrain.profiling"
COLORS = {
    "conv": "#1b6ca8",
    "matmul": "#7a3e9d",
    "norm": "#c2571a",
    "pointwise": "#e8a33d",
    "pooling": "#2e8540",
    "optimizer": "#b5495b",
    "copies": "#5bb0ba",
    "loader": "#6b5b3e",
    "other": "#8a8a8a",
    "idle": "#e3e3e3",
}
WIDE_ENOUGH = 0.04  # share of the longer bar from which on a part has its number written in


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Exit codes: 0 done; 1 the script took too few optimizer steps; 2 wrong usage; 3 the "
    "script raised; 4 stopped. What was seen until then is shown.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Optimizer steps to profile; as many more are timed without the profiler.",
)
@click.option("--warmup", type=click.IntRange(0), default=3, show_default=True,
              help="Optimizer steps before these.")  # fmt: skip
@click.option("--compare", is_flag=True, help="Run it again with fusedtrain.convert on its models.")
@click.option("--trace", type=NewFile(), help="Write a trace for chrome://tracing.")
@output_options
def command(
    script: str, arguments: Sequence[str], steps: int, warmup: int, compare: bool,
    trace: Path | None, outputs: Outputs,
) -> int:  # fmt: skip
    """Runs SCRIPT with its ARGUMENTS and shows where the time of its steps goes.

    The script runs in a fresh process, and is ended after enough optimizer steps. Options of this
    command come before SCRIPT.
    """
    task = {"steps": steps, "warmup": warmup, "trace": str(trace.resolve()) if trace else None}
    runs: list[Run] = []
    with progress("profile", 2 if compare else 1) as begins:
        begins(f"{script}, as it is")
        runs.append(_run(task, script, arguments, outputs))
        if compare and runs[0].end in (DONE, ENDED) and _saw(runs[0]):
            begins(f"{script}, with fusedtrain")
            second = {**task, "convert": True, "trace": None}
            runs.append(_run(second, script, arguments, outputs))
    report = _report(script, runs, steps)
    outputs.write(report)
    return _status(runs)


def _run(task: dict[str, Any], script: str, arguments: Sequence[str], outputs: Outputs) -> Run:
    return in_fresh_process(MODULE, task, script, arguments, script_prints_to_stderr=outputs.json)


def _saw(run: Run) -> bool:
    return bool(run.results.get("families"))


def _status(runs: Sequence[Run]) -> Exit:
    last = runs[-1]
    if last.end == STOPPED:
        return Exit.STOPPED
    if last.end not in (DONE, ENDED):
        return Exit.SCRIPT_RAISED
    return Exit.DONE if _saw(last) else Exit.FOUND


# --- the report ---


def _report(script: str, runs: Sequence[Run], steps: int) -> Report:
    names = ["as it is", "with fusedtrain"][: len(runs)]
    facts = {
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
        "torch": torch.__version__,
        "fusedtrain": __version__,
        "date": today(),
    }
    notes: list[str] = []
    for name, run in zip(names, runs, strict=True):
        seen = run.results
        if "step_ms" in seen:
            facts[f"step, {name}"] = f"{seen['step_ms']:.4g} ms, the median without the profiler"
        share = seen.get("tensor_core_share")
        if share is not None:
            facts[f"tensor cores, {name}"] = (
                f"{100 * share:.0f} % of the time of convolutions and matrix products, "
                "by the names of kernels"
            )
        notes += [f"{name}: {what}" for what in seen.get("conversion", ())]
        if "no_lines" in seen:
            notes.append(f"{name}: {seen['no_lines']}")
        if run.end == ENDED and _saw(run) and seen["steps"] < steps:
            notes.append(f"{name}: the script ended after {run.steps} optimizer steps; "
                         f"{seen['steps']} of {steps} were profiled")  # fmt: skip
    shown = [(name, run.results) for name, run in zip(names, runs, strict=True) if _saw(run)]
    if shown:
        notes.append(f"Times are of {shown[0][1]['clock']}. {_IDLE[shown[0][1]['clock']]}")
    if len(shown) == 2:
        notes.append(
            "The second run had fusedtrain.convert at the first step of each optimizer; optimizer, "
            "loader and precision stayed. The runs came one after the other: on a busy machine, "
            "repeat."
        )
    data = {
        "script": script,
        "runs": [
            {"name": name, "end": run.end, "steps": run.steps, **_json(run.results)}
            for name, run in zip(names, runs, strict=True)
        ],
    }
    return Report(
        f"fusedtrain profile {script}", data, list(_tables(shown)), notes, facts,
        (lambda: _figure(shown, script)) if shown else None, _partial(runs[-1]),
    )  # fmt: skip


_IDLE = {
    "operators on the host": "Idle is the rest of a step: Python, and waiting.",
    "kernels on the GPU": "Idle is the time in which the GPU ran nothing.",
}


def _json(seen: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {"steps": "profiled_steps"}
    return {renamed.get(name, name): value for name, value in seen.items()}


def _partial(run: Run) -> str:
    taken = f"{run.steps} optimizer step{'s' * (run.steps != 1)}"
    if run.end == RAISED:
        return f"the script raised after {taken}; its traceback is on stderr"
    if run.end == EXITED:
        return f"the script ended with exit status {run.status} after {taken}"
    if run.end == STOPPED:
        return f"stopped after {taken}"
    if run.end not in (DONE, ENDED):
        return f"the script's process died (status {run.status})"
    if not run.steps:
        return "the script took no optimizer step (torch.optim.Optimizer.step): nothing to profile"
    if not _saw(run):
        return f"the script took {taken}, no more than the warm-up: try --warmup 0"
    return ""


def _tables(shown: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Table]:
    if not shown:
        return []
    tables = [_families(shown)]
    top = shown[0][1].get("top_operators")
    if top:
        columns = [Column("operator", left=True), Column("pass", left=True), Column("family", True)]
        columns += [Column("ms"), Column("%"), Column("line", left=True)]
        rows = [
            [row["operator"][:60], row["pass"], row["family"], f"{row['ms']:.3f}",
             f"{100 * row['share']:.1f}", row["line"] or ""]
            for row in top
        ]  # fmt: skip
        tables.append(Table("operators with most time, in one step", columns, rows))
    return tables


def _families(shown: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    before = shown[0][1]["families"]
    columns = [Column("family", left=True), Column("ms/step"), Column("%")]
    if len(shown) == 1:
        columns += [Column("forward"), Column("backward")]
        rows = [
            [row["family"], f"{row['ms']:.3f}", f"{100 * row['share']:.1f}",
             *(f"{row[part]:.3f}" if part in row else "" for part in ("forward", "backward"))]
            for row in before
        ]  # fmt: skip
    else:
        columns += [Column("with fusedtrain"), Column("%"), Column("before / after")]
        rows = [
            [old["family"], f"{old['ms']:.3f}", f"{100 * old['share']:.1f}",
             f"{new['ms']:.3f}", f"{100 * new['share']:.1f}",
             f"{old['ms'] / new['ms']:.2f}" if new["ms"] else ""]
            for old, new in zip(before, shown[1][1]["families"], strict=True)
        ]  # fmt: skip
    return Table("time by family", columns, rows)


def _figure(shown: Sequence[tuple[str, Mapping[str, Any]]], script: str) -> Figure:
    """A bar for each run, cut into families."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.9 + 0.9 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    totals = [sum(row["ms"] for row in seen["families"]) for _, seen in shown]
    for place, (_, seen) in enumerate(shown):
        left = 0.0
        for row in seen["families"]:
            color = COLORS[row["family"]]
            label = row["family"] if place == 0 else None
            axes.barh(place, row["ms"], 0.62, left, color=color, label=label, edgecolor="white")
            if row["ms"] > WIDE_ENOUGH * max(totals):
                dark = row["family"] not in ("idle", "pointwise", "copies")
                text = f"{row['ms']:.3g}"
                axes.text(left + row["ms"] / 2, place, text, ha="center", va="center", fontsize=8,
                          color="white" if dark else "black")  # fmt: skip
            left += row["ms"]
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.invert_yaxis()
    axes.set_xlabel("ms per optimizer step, with the profiler")
    axes.set_title(f"{Path(script).name}: time by family", loc="left", pad=42)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
