"""An experiment in words and tables: on the screen, and in docs/experiments.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.experiments.experiment import Experiment, Run, Verdict
from benchmarks.experiments.store import Result

ROOT = Path(__file__).resolve().parent.parent.parent
TEMPLATE = Path(__file__).with_name("page.md")
PAGE = ROOT / "docs" / "experiments.md"
PLACE = "{{ experiments }}"
ABSENT = "-"


class Table(NamedTuple):
    """Cells, and the numbers of the columns that are words."""

    headings: list[str]
    rows: list[list[str]]
    words: set[int]


def table(experiment: Experiment, runs: Sequence[Run]) -> Table:
    """Measured and published numbers beside each other; runs that only have a published number come
    last."""
    measured = {run.label: run for run in runs}
    labels = [*measured]
    labels += [
        label
        for label in dict.fromkeys(name for c in experiment.claims for name in c.numbers)
        if label not in measured
    ]
    headings, columns = ["run"], [labels]
    for key, column in experiment.columns.items():
        digits = column.digits
        ours = [
            _number(measured[label].numbers if label in measured else {}, key, digits)
            for label in labels
        ]
        if any(cell != ABSENT for cell in ours):
            headings.append(column.name)
            columns.append(ours)
        for where, numbers in _published(experiment, key).items():
            headings.append(f"{column.name}, published ({where})")
            columns.append([_number(numbers, label, digits) for label in labels])
    notes = [measured[label].note if label in measured else "not measured" for label in labels]
    words = {0}
    if any(notes):
        words.add(len(headings))
        headings.append("note")
        columns.append(notes)
    return Table(headings, [list(row) for row in zip(*columns, strict=True)], words)


def _published(experiment: Experiment, key: str) -> dict[str, dict[str, float]]:
    """Where -> label -> the number of this column."""
    places: dict[str, dict[str, float]] = {}
    for claim in experiment.claims:
        for label, numbers in claim.numbers.items():
            if key in numbers:
                places.setdefault(claim.where, {})[label] = numbers[key]
    return places


def _number(numbers: Mapping[str, float], key: str, digits: int) -> str:
    return f"{numbers[key]:,.{digits}f}" if key in numbers else ABSENT


def run_line(experiment: Experiment, run: Run) -> str:
    """A run in a line, for the moment when the run is measured."""
    cells = [
        f"{column.name} {run.numbers[key]:,.{column.digits}f}"
        for key, column in experiment.columns.items()
        if key in run.numbers
    ]
    note = f" ({run.note})" if run.note else ""
    return f"{run.label}: {', '.join(cells) or 'no numbers'}{note}"


def verdict_words(verdict: Verdict) -> str:
    """The verdict with its reason."""
    heads = {True: "holds here", False: "does not hold here", None: "cannot be told here"}
    head = heads[verdict.holds]
    return f"{head}: {verdict.words}"


def machine_words(result: Result) -> str:
    """Device, threads, torch and day."""
    m = result.machine
    threads = f", {m['threads']} threads" if m["device_type"] == "cpu" else ""
    backend = "" if m["backend"] == "default" else f", {m['backend']} backend"
    return f"{m['device']}{threads}{backend}, torch {m['torch']}, {result.date[:10]}"


# --- the page ---


def render(
    template: str, experiments: Sequence[Experiment], devices: Sequence[Mapping[str, Result]]
) -> str:
    """The page: the line ``{{ experiments }}`` becomes a section for each experiment.

    Raises:
        ValueError: the template has no such line, or more than one.
    """
    if template.splitlines().count(PLACE) != 1:
        raise ValueError(f"the template must have one line {PLACE}")
    sections = [
        "\n\n".join(_section(e, [device[e.name] for device in devices if e.name in device]))
        for e in experiments
    ]
    overview = [_overview(device, experiments) for device in devices]
    return template.replace(PLACE, "\n\n".join([*overview, *sections]))


def _overview(device: Mapping[str, Result], experiments: Sequence[Experiment]) -> str:
    """A table of the device: the verdict on every claim in one word, with a link."""
    judged = [(e, device[e.name]) for e in experiments if e.name in device]
    lines = [f"| {_device(device)}: claim | holds here |", "| --- | --- |"]
    for experiment, result in judged:
        place = f"[{experiment.title}](#{_anchor(experiment.title)})"
        answers = {True: "yes", False: "**no**", None: "cannot be told"}
        lines += [
            f"| {place}: {_escaped(claim.text)} | {answers[verdict.holds]} |"
            for claim, verdict in zip(experiment.claims, result.verdicts)
        ]
    return "\n".join(lines)


def _device(device: Mapping[str, Result]) -> str:
    return str(next(iter(device.values())).machine["device"]) if device else ""


def _anchor(heading: str) -> str:
    """Anchor of a heading, as web sites make it of Markdown."""
    kept = (c for c in heading.lower() if c.isalnum() or c in " -_")
    return "".join(kept).replace(" ", "-")


def _lacking(results: Sequence[Result]) -> str:
    """On which kinds of devices the experiment is not measured, in words."""
    types = {result.machine["device_type"] for result in results}
    kinds = {"cpu": "a CPU", "cuda": "a GPU"}
    return " and ".join(words for kind, words in kinds.items() if kind not in types)


def _section(experiment: Experiment, results: Sequence[Result]) -> Iterator[str]:
    yield f"## {experiment.title}"
    yield experiment.question
    yield "\n".join(f"- Published ({c.where}): {c.text}" for c in experiment.claims)
    for result in results:
        yield f"**{machine_words(result)}.** {result.setup}"
        if result.runs:
            yield _markdown(table(experiment, result.runs))
        if result.error:
            yield f"The experiment failed: {_escaped(result.error)}"
        elif not result.finished:
            yield "The experiment was stopped before its end: there is no verdict."
        else:
            pairs = zip(experiment.claims, result.verdicts, strict=True)
            yield "\n".join(f"- {c.text} **{_bold(verdict_words(v))}" for c, v in pairs)
    if lacking := _lacking(results):
        yield f"Not measured yet on {lacking}."
    yield f"Repeat: `python -m benchmarks.experiments {experiment.name}`"


def _bold(words: str) -> str:
    """The head of a verdict is bold; the bold text begins before these words."""
    head, _, reason = words.partition(": ")
    return f"{head[0].upper()}{head[1:]}:** {reason}"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _markdown(cells: Table) -> str:
    lines = [
        cells.headings,
        ["---" if number in cells.words else "---:" for number in range(len(cells.headings))],
        *cells.rows,
    ]
    return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)
