"""``profile``: where the time of a training script goes, by family of operators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any

import click

from .._text import counted
from ..advisor._scripts import DONE, ENDED, EXITED, RAISED, STOPPED, Run, in_fresh_process
from ._exit import Exit
from ._output import (
    Column,
    NewFile,
    Outputs,
    Report,
    Script,
    Table,
    machine_facts,
    output_options,
    progress,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WATCHER = "fusedtrain.advisor.profiling._watcher:ProfilingWatcher"
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
NAMES = ("as it is", "with fusedtrain")
# Runs of each, in turns: a machine that becomes slower is no difference between them.
LEAST, MOST = 2, 4
WIDE_ENOUGH = 0.04  # share of the longer bar from which on a part has its number written in


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Exit codes: 0 done; 1 the script took too few optimizer steps; 2 wrong usage; 3 the "
    "script raised; 4 stopped. What was seen until then is shown.",
)
@click.argument("script", type=Script())
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
@click.option(
    "--compare",
    is_flag=True,
    help="Run it twice as it is and twice with fusedtrain.convert on its models, in turns; up to "
    "four times each while the steps decide nothing.",
)
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
    names = MOST * NAMES if compare else NAMES[:1]
    with progress("profile", len(names)) as begins:
        for name in names:
            if name == NAMES[0] and any(map(_decided, _steps(_compared(runs)))):
                break
            begins(f"{script}, {name}")
            now = {**task, "convert": name == NAMES[1], "trace": None if runs else task["trace"]}
            runs.append(_run(now, script, arguments, outputs))
            if runs[-1].end not in (DONE, ENDED) or not _saw(runs[-1]):
                break
    report = _report(script, runs, steps)
    outputs.write(report)
    return _status(runs)


def _run(task: dict[str, Any], script: str, arguments: Sequence[str], outputs: Outputs) -> Run:
    return in_fresh_process(WATCHER, task, script, arguments, script_prints_to_stderr=outputs.json)


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
    names = (MOST * NAMES)[: len(runs)]
    facts = machine_facts()
    notes: list[str] = []
    by_name = {
        name: [run.results for other, run in zip(names, runs, strict=True)
               if other == name and _saw(run)]
        for name in NAMES
    }  # fmt: skip
    for name, each in by_name.items():
        if steps_ms := [seen["step_ms"] for seen in each if "step_ms" in seen]:
            listed = ", ".join(f"{ms:.4g}" for ms in steps_ms)
            facts[f"step, {name}"] = f"{listed} ms, the median without the profiler"
    compared = _compared(runs)
    if steps_of_both := _steps(compared):
        facts[f"step, {RATIO}"] = "; by processor time ".join(map(_range, steps_of_both))
    for name, run in list(zip(names, runs, strict=True))[: len(NAMES)]:
        seen = run.results
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
    shown = [(name, _mean(each)) for name, each in by_name.items() if each]
    if shown:
        notes.append(f"Times are of {shown[0][1]['clock']}. {_IDLE[shown[0][1]['clock']]}")
    if len(shown) == 2:
        notes.append(
            f"Runs {NAMES[1]} had fusedtrain.convert at the first step of each optimizer; "
            "optimizer, loader and precision stayed."
        )
        notes.append(
            f"{RATIO}: 95 % interval of the ratio, of {len(runs) // 2} runs each, which came in "
            "turns; ms are their means. Where the interval has 1 in it the ratio is undecided. One "
            "interval in twenty misses the ratio by chance."
            if compared
            else f"The runs cannot be compared: {NAMES[0]} and {NAMES[1]} must run twice each."
        )
    data = {
        "script": script,
        "runs": [
            {"name": name, "end": run.end, "steps": run.steps, **_json(run.results)}
            for name, run in zip(names, runs, strict=True)
        ],
        "before_after": compared or None,
    }
    return Report(
        f"fusedtrain profile {script}", data, list(_tables(shown, compared)), notes, facts,
        (lambda: _figure(shown, script)) if shown else None, _partial(runs[-1]),
    )  # fmt: skip


ON_HOST = "operators on the host"
_IDLE = {
    ON_HOST: "Idle is the rest of a step: Python, and waiting.",
    "kernels on the GPU": "Idle is the time in which the GPU ran nothing.",
}


RATIO = "before / after"
# Quantiles by the runs of each: 95 % in all, two-sided, as up to three intervals are looked at.
STUDENT = {2: 7.649, 3: 3.961, 4: 3.288}


def _compared(runs: Sequence[Run]) -> dict[str, tuple[float, float]]:
    """95 % intervals of the ratio of runs to others, of each family and of the step.

    Steps of one run share its memory and its place in time, so that only runs are independent. If
    runs did not differ at all, both before would still be slower than both after in one of six.
    """
    every = [[_times(run.results) for run in runs[one::2] if _saw(run)] for one in range(2)]
    count = min(map(len, every))
    if count < LEAST:
        return {}
    compared = {}
    for what in every[0][0]:
        times = [[seen.get(what, 0.0) for seen in each[:count]] for each in every]
        if min(map(min, times)) > 0:
            old, new = ([math.log(ms) for ms in each] for each in times)
            ratio = fmean(old) - fmean(new)
            margin = STUDENT[count] * math.sqrt((variance(old) + variance(new)) / count)
            compared[what] = (math.exp(ratio - margin), math.exp(ratio + margin))
    return compared


def _steps(compared: Mapping[str, tuple[float, float]]) -> list[tuple[float, float]]:
    """The step's interval, and the one by processor time if the first decides nothing."""
    intervals = [compared[what] for what in ("step", "processor") if what in compared]
    return intervals[: 1 if intervals and _decided(intervals[0]) else 2]


def _decided(interval: tuple[float, float]) -> bool:
    return not interval[0] <= 1 <= interval[1]


def _times(seen: Mapping[str, Any]) -> dict[str, float]:
    families = {row["family"]: row["ms"] for row in seen["families"]}
    whole = {"step": seen.get("step_ms", 0.0)}
    if seen["clock"] == ON_HOST:  # other programs take no time of ours there
        whole["processor"] = seen.get("processor_ms", 0.0)
    return families | whole


def _mean(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first of the runs, with the mean times of all."""
    rows = [
        {key: value if isinstance(value, str) else sum(row[key] for row in same) / len(same)
         for key, value in same[0].items()}
        for same in zip(*(seen["families"] for seen in runs), strict=True)
    ]  # fmt: skip
    return {**runs[0], "families": rows}


def _range(interval: tuple[float, float]) -> str:
    words = "-".join(f"{ratio:.2f}" for ratio in interval)
    return words if _decided(interval) else f"undecided: {words}"


def _json(seen: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {"steps": "profiled_steps"}
    return {renamed.get(name, name): value for name, value in seen.items()}


def _partial(run: Run) -> str:
    taken = counted(run.steps, "optimizer step")
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


def _tables(
    shown: Sequence[tuple[str, Mapping[str, Any]]], compared: Mapping[str, tuple[float, float]]
) -> list[Table]:
    if not shown:
        return []
    tables = [_families(shown, compared)]
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


def _families(
    shown: Sequence[tuple[str, Mapping[str, Any]]], compared: Mapping[str, tuple[float, float]]
) -> Table:
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
        columns += [Column("with fusedtrain"), Column("%"), Column(RATIO)]
        rows = [
            [old["family"], f"{old['ms']:.3f}", f"{100 * old['share']:.1f}",
             f"{new['ms']:.3f}", f"{100 * new['share']:.1f}",
             _range(compared[old["family"]]) if old["family"] in compared else ""]
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
