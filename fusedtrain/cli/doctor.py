"""``fusedtrain doctor SCRIPT``: what costs a training script time, memory or accuracy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from .._text import time_text
from ..advisor._scripts import DIED, EXITED, RAISED, STOPPED
from ..advisor.diagnosis import Diagnosis, doctor, finding_lines
from ._exit import Exit
from ._output import (
    Column,
    Outputs,
    Report,
    Script,
    Table,
    machine_facts,
    output_options,
    progress,
    say,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = (Column("line", left=True), Column("rule", left=True), Column("cost a step"),
            Column("how known", left=True))  # fmt: skip


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Exit codes: 0 no findings; 1 findings, or no optimizer step was taken; 2 wrong usage; "
    "3 the script raised; 4 stopped. What was seen until then is shown.",
)
@click.option("--steps", default=20, type=click.IntRange(min=4), show_default=True,
              help="Optimizer steps; the first three are observed, the others timed.")  # fmt: skip
@click.option("--assume-gpu", is_flag=True,
              help="Apply the rules for GPUs to a run on the CPU, too.")  # fmt: skip
@click.option("--no-trials", is_flag=True,
              help="Measure nothing after the run: no copies of the model.")  # fmt: skip
@click.option("--fix", is_flag=True,
              help="Print a diff for `patch -p0` that removes findings; no file is written. The "
              "report goes to stderr.")  # fmt: skip
@output_options
@click.argument("script", type=Script())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    script: str,
    arguments: tuple[str, ...],
    steps: int,
    assume_gpu: bool,
    no_trials: bool,
    fix: bool,
    outputs: Outputs,
) -> Exit:
    """Runs SCRIPT with its ARGUMENTS for some steps, and names what costs time, memory or accuracy.

    The script runs in a fresh process, and is ended after enough optimizer steps. Options of this
    command come before SCRIPT.
    """
    with progress("doctor", 1) as begins:
        begins(script)
        diagnosis = doctor(
            script, arguments, steps=steps, assume_gpu=assume_gpu, trials=not no_trials,
            script_prints_to_stderr=fix or outputs.json,
        )  # fmt: skip
    if fix and not outputs.json:
        say(str(diagnosis))
        # The bytes of the source, whatever its encoding and the terminal's.
        sys.stdout.flush()
        sys.stdout.buffer.write(diagnosis.diff().encode(errors="surrogateescape"))
    else:
        outputs.write(_report(diagnosis, script))
    if diagnosis.end in (RAISED, EXITED, DIED):
        return Exit.SCRIPT_RAISED
    if diagnosis.end == STOPPED:
        return Exit.STOPPED
    return Exit.FOUND if diagnosis.findings or not diagnosis.facts.steps else Exit.DONE


def _report(diagnosis: Diagnosis, script: str) -> Report:
    lines = [line for f in diagnosis.findings for line in [*finding_lines(f), ""]]
    rows = []
    for finding in diagnosis.findings:
        seconds = finding.cost.seconds
        cost = time_text(seconds) if seconds else "-"
        rows.append((str(finding.site or "-"), finding.rule, cost, finding.cost.kind))
    tables = [Table("", _COLUMNS, rows)] if rows else []
    data = {**diagnosis.to_json(), "diff": diagnosis.diff()}
    del data["partial"]  # the report has it
    times = any(finding.cost.seconds for finding in diagnosis.findings)
    return Report(
        title=f"{script}: {diagnosis.headline()}",
        data=data,
        tables=tables,
        notes=diagnosis.not_checked_lines(),
        facts=machine_facts(),
        figure=(lambda: _figure(diagnosis)) if times else None,
        partial=diagnosis.partial,
        text="\n".join(lines).rstrip(),
    )


def _figure(diagnosis: Diagnosis) -> Figure:
    """A bar for each finding with a time, beside the step."""
    from matplotlib.figure import Figure

    costs = [(f, f.cost.seconds) for f in diagnosis.findings if f.cost.seconds]
    labels = ["a step", *(f"{f.rule}\n{f.site or ''}" for f, _ in costs)]
    times = [diagnosis.facts.step, *(seconds for _, seconds in costs)]
    colours = ["#9aa5b1", *("#3b6fb6" if f.cost.kind == "measured" else "#e08a1e"
                            for f, _ in costs)]  # fmt: skip
    figure = Figure(figsize=(9, 1.4 + 0.55 * len(times)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(range(len(times)), [1e3 * t for t in times], color=colours)
    axes.bar_label(bars, [f" {time_text(t)}" for t in times], fontsize=9)
    axes.set_yticks(range(len(times)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("ms of a step (blue: measured, orange: at most)")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
