"""An experiment in words and tables: on the screen, and in docs/experiments.md with its pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.experiments.experiment import Experiment, Run, Verdict
from benchmarks.experiments.store import Result
from benchmarks.harness.chart import Panel
from benchmarks.harness.svg import chart

ROOT = Path(__file__).resolve().parent.parent.parent
TEMPLATE = Path(__file__).with_name("page.md")
DOCS = ROOT / "docs"
SUMMARY = "experiments.md"
PLACE = "{{ experiments }}"
ABSENT = "-"
RATIOS = ("gain", "cost")  # columns whose published numbers can be compared with ours in a chart
MOST_BARS = 16  # in a chart
PAGE_WIDTH, BORDERS = 96, 3  # characters: of a row of a table on the site, of a cell's two borders


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
) -> dict[str, str]:
    """The files, by their paths in docs/: the summary, where the line ``{{ experiments }}`` becomes
    a chart and a question for each experiment; a page and a chart of each experiment.

    Raises:
        ValueError: the template has no such line, or more than one.
    """
    if template.splitlines().count(PLACE) != 1:
        raise ValueError(f"the template must have one line {PLACE}")
    files, sections = {}, []
    for experiment in experiments:
        name = experiment.name
        results = [device[name] for device in devices if name in device]
        drawn = _drawn(experiment, results)
        title, *rest = _section(experiment, results)
        picture = [f"![{experiment.title}]({name}.svg)"] * bool(drawn)
        files[f"experiments/{name}.md"] = "\n\n".join([title, *picture, *rest]) + "\n"
        if drawn:
            files[f"experiments/{name}.svg"] = drawn
        picture = [f"![{experiment.title}](experiments/{name}.svg)"] * bool(drawn)
        link = f"[Runs and verdicts](experiments/{name}.md)."
        sections += [f"## {experiment.title}", experiment.question, *picture, link]
    overview = [_overview(device, experiments) for device in devices]
    return {SUMMARY: template.replace(PLACE, "\n\n".join([*overview, *sections])), **files}


def _drawn(experiment: Experiment, results: Sequence[Result]) -> str:
    """A chart of the column that the publication has as a ratio, or of the first column."""
    published = [key for key in RATIOS if _published(experiment, key)]
    key = (published or [*experiment.columns])[0]
    panels = []
    for result in results:
        runs = {run.label: run.numbers for run in result.runs if key in run.numbers}
        if not 1 < len(runs) <= MOST_BARS:
            continue
        theirs = {k: v for of in _published(experiment, key).values() for k, v in of.items()}
        labels = [*dict.fromkeys([*runs, *(theirs if key in RATIOS else ())])]
        column = experiment.columns[key]
        digits = max(column.digits, 1)
        series = {"here": [runs.get(label, {}).get(key) for label in labels]}
        if theirs and key in RATIOS:
            series["published"] = [theirs.get(label) for label in labels]
        label = f"{column.name}; {machine_words(result)}"
        text = partial(_bar_text, digits)
        panels.append(Panel(label, labels, series, experiment.title, text))
    return chart(panels) if panels else ""


def _bar_text(digits: int, who: str, group: int, value: float) -> str:
    return f"{value:,.{digits}f}"


def _overview(device: Mapping[str, Result], experiments: Sequence[Experiment]) -> str:
    """A table of the device: the verdict on every claim in one word, with a link."""
    judged = [(e, device[e.name]) for e in experiments if e.name in device]
    lines = [f"| {_device(device)}: claim | holds here |", "| --- | --- |"]
    for experiment, result in judged:
        place = f"[{experiment.title}](experiments/{experiment.name}.md)"
        answers = {True: "yes", False: "**no**", None: "cannot be told"}
        lines += [
            f"| {place}: {_escaped(claim.text)} | {answers[verdict.holds]} |"
            for claim, verdict in zip(experiment.claims, result.verdicts)
        ]
    return "\n".join(lines)


def _device(device: Mapping[str, Result]) -> str:
    return str(next(iter(device.values())).machine["device"]) if device else ""


def _lacking(results: Sequence[Result]) -> str:
    """On which kinds of devices the experiment is not measured, in words."""
    types = {result.machine["device_type"] for result in results}
    kinds = {"cpu": "a CPU", "cuda": "a GPU"}
    return " and ".join(words for kind, words in kinds.items() if kind not in types)


def _section(experiment: Experiment, results: Sequence[Result]) -> Iterator[str]:
    yield f"# {experiment.title}"
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
    """The head of a verdict is bold; the bold text begins before these words. Parts of the reason
    between semicolons are sentences, so that the page is short to read."""
    head, _, reason = words.partition(": ")
    sentences = (_capital(part) for part in (head, *reason.rstrip(".").split("; ")))
    return f"{next(sentences)}:** {'. '.join(sentences)}."


def _capital(text: str) -> str:
    """With a capital letter, where the first word is no name of code."""
    return re.sub(r"^[a-z]+(?=[ ,:]|$)", lambda word: word[0].capitalize(), text)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _markdown(cells: Table) -> str:
    """Tables that fit a page: the columns beyond its width are in a table of their own."""
    widths = [
        max(map(len, " ".join(column).split()), default=0) + BORDERS
        for column in zip(cells.headings, *cells.rows, strict=True)
    ]  # a column is as wide as its longest word
    parts: list[list[int]] = [[]]
    for number in range(1, len(widths)):
        if widths[0] + sum(widths[n] for n in [*parts[-1], number]) > PAGE_WIDTH:
            parts.append([])
        parts[-1].append(number)
    return "\n\n".join(_table_of(cells, [0, *numbers]) for numbers in parts)


def _table_of(cells: Table, numbers: Sequence[int]) -> str:
    """The columns with these numbers."""
    rule = ["---" if number in cells.words else "---:" for number in numbers]
    lines = [[line[number] for number in numbers] for line in (cells.headings, *cells.rows)]
    return "\n".join(
        f"| {' | '.join(map(_escaped, line))} |" for line in (lines[0], rule, *lines[1:])
    )
