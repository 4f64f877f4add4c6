"""Common parts of the commands: options for the output, tables, charts, progress.

A command makes a `Report`, and `Outputs.write` shows it: tables on a terminal, plain columns in a
pipe, JSON, a PNG, one HTML file that needs no other file.
"""

from __future__ import annotations

import base64
import difflib
import functools
import html
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
import rich.box
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

from .. import __version__
from .._text import column_lines
from ..advisor.bench.clock import device_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Command = TypeVar("Command", bound=Callable[..., Any])
_FOLDED = 10  # characters: words are folded into columns of this width, not into narrower ones


@dataclass(frozen=True)
class Column:
    """A column: its heading, and whether its cells are words, which begin at the left."""

    name: str
    left: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text under headings."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]


@dataclass
class Report:
    """Results of a command.

    Args:
        title: the first line.
        data: for ``--json``; every value must be of a JSON type.
        tables: in the order in which they are shown.
        notes: sentences below the tables.
        facts: name -> value, shown under the title: device, torch, date.
        figure: draws the chart of ``--plot`` and ``--html``.
        partial: why results are missing; empty where all are there. Shown, and in the JSON.
        text: plain text that is shown as it is, last (a recipe, a diff).
    """

    title: str
    data: dict[str, Any]
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    facts: dict[str, str] = field(default_factory=dict)
    figure: Callable[[], Figure] | None = None
    partial: str = ""
    text: str = ""


@dataclass(frozen=True)
class Outputs:
    """The forms in which the user wants the report."""

    json: bool = False
    plot: Path | None = None
    html: Path | None = None

    def write(self, report: Report) -> None:
        """Shows the report, and writes the files that were asked for."""
        if self.json:
            stamp = {"facts": report.facts, "partial": report.partial or None}
            print(json.dumps({"title": report.title, **stamp, **report.data}, indent=2))
        else:
            _show(report)
        picture = _picture(report) if self.plot or self.html else None
        if self.plot and picture:
            _write(self.plot, picture)
        elif self.plot:
            say(f"{self.plot} is not written: there is nothing to draw")
        if self.html:
            _write(self.html, _page(report, picture).encode())

    def check(self) -> None:
        """Raises UsageError where a file could not be written after the work is done."""
        if not self.plot and not self.html:
            return
        option = "--plot" if self.plot else "--html"
        try:
            importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise click.UsageError(
                f'{option} needs matplotlib ({error}): pip install "fusedtrain[cli]", or leave '
                f"{option} out"
            ) from None


def _picture(report: Report) -> bytes | None:
    """The chart as a PNG; the results are shown already, and do not fail with the chart."""
    if report.figure is None:
        return None
    try:
        written = io.BytesIO()
        report.figure().savefig(written, format="png", dpi=110)
    except Exception as error:
        say(f"the chart was not drawn: {type(error).__name__}: {error}")
        return None
    return written.getvalue()


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        say(f"{path} is not written: {error}")
    else:
        say(f"{path} is written")


def output_options(function: Command) -> Command:
    """Adds ``--json``, ``--plot`` and ``--html``; the function gets them as ``outputs``."""

    @click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
    @click.option("--plot", type=NewFile(), help="Draw a chart into this PNG file.")
    @click.option("--html", "page", type=NewFile(), help="Write the report as one HTML file.")
    @functools.wraps(function)
    def with_outputs(
        *arguments: Any, as_json: bool, plot: Path | None, page: Path | None, **options: Any
    ) -> Any:
        outputs = Outputs(as_json, plot, page)
        outputs.check()
        return function(*arguments, outputs=outputs, **options)

    return with_outputs  # type: ignore[return-value]


class NewFile(click.Path):
    """A file to be written. Its folder must exist and be writable, which is checked before any work
    is done."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, parameter: Any, context: Any) -> Any:
        path = Path(str(super().convert(value, parameter, context)))
        if not path.parent.is_dir():
            self.fail(f"there is no folder {path.parent}", parameter, context)
        if not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"the folder {path.parent} cannot be written to", parameter, context)
        return path


class Script(click.Path):
    """The user's script, behind this command's options. Options behind it are the script's own, so
    click does not refuse an unknown one before it."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False)

    def convert(self, value: Any, parameter: Any, context: Any) -> Any:
        name = str(value).partition("=")[0]
        if name.startswith("-") and context is not None:
            options = [o for p in context.command.get_params(context) for o in p.opts]
            alike = difflib.get_close_matches(name, options, n=1)
            message = f"No such option {name!r}; options of the script come after SCRIPT."
            raise click.NoSuchOption(name, message, alike, context)
        return super().convert(value, parameter, context)


def today() -> str:
    """The time of a report, in UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def machine_facts(device: str | None = None, **more: str) -> dict[str, str]:
    """Facts of every report. `device`: its name; None: that of the GPU, or else of the CPU."""
    device = device or device_name("cuda" if torch.cuda.is_available() else "cpu")
    versions = {"torch": torch.__version__, "fusedtrain": __version__}
    return {"device": device, **versions, **more, "date": today()}


# --- progress ---


def say(message: str) -> None:
    """A line beside the results, on stderr."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Shows that work goes on: a bar on a terminal, in a log a line for each stage.

    Yields a function that the caller calls with the name of each stage when the stage begins.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: say(f"{what}: {stage}")
        return
    shape = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*shape, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        begun = 0

        def stage_begins(stage: str) -> None:
            nonlocal begun
            bar.update(task, description=f"{what}: {stage}", completed=begun)
            begun += 1

        yield stage_begins


# --- a terminal, or a pipe ---


def _show(report: Report) -> None:
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(Text(report.title, style="bold"))
    else:
        print(report.title)
    if report.partial:
        _line(console, f"PARTIAL: {report.partial}", style="bold red")
    for name, value in report.facts.items():
        _line(console, f"{name}: {value}", style="dim")
    for table in report.tables:
        print()
        if console.is_terminal and _least_width(table) > console.width:
            for line in _stacked(table):
                console.print(Text(line))
        elif console.is_terminal:
            console.print(_boxed(table))
        else:
            print("\n".join(_columns(table)))
    if report.notes:
        print()
    for note in report.notes:
        _line(console, note)
    if report.text:
        print(f"\n{report.text}")


def _line(console: Console, text: str, style: str = "") -> None:
    if console.is_terminal:
        console.print(Text(text, style=style))
    else:
        print(text)


def _boxed(table: Table) -> RichTable:
    shown = RichTable(
        title=table.title or None,
        box=rich.box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 0, 0, 1),
    )
    for column in table.columns:
        # On a narrow terminal words are folded, and numbers stay whole.
        justify: Literal["left", "right"] = "left" if column.left else "right"
        shown.add_column(column.name, justify=justify, no_wrap=not column.left, overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def _least_width(table: Table) -> int:
    """Least width of a terminal that shows the table as one: numbers whole, words folded."""
    lines = [[column.name for column in table.columns], *table.rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return 1 + sum(
        2 + (min(width, _FOLDED) if column.left else width)
        for column, width in zip(table.columns, widths, strict=True)
    )


def _stacked(table: Table) -> Iterator[str]:
    """A few lines a row: its words, then its numbers by their names. The terminal wraps them."""
    if table.title:
        yield table.title
    for row in table.rows:
        cells = list(zip(table.columns, row, strict=True))
        yield " ".join(cell for column, cell in cells if column.left and cell)
        numbers = [f"{column.name} {cell}" for column, cell in cells if not column.left and cell]
        if numbers:
            yield f"  {', '.join(numbers)}"


def _columns(table: Table) -> list[str]:
    """One line a row, without boxes or colours: for grep, awk and logs."""
    lines = [[column.name for column in table.columns], *table.rows]
    words = [number for number, column in enumerate(table.columns) if column.left]
    return [table.title] * bool(table.title) + column_lines(lines, words)


# --- HTML ---

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em;
       color: #1c2733; }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; font-size: 14px; }
caption { text-align: left; font-weight: 600; padding: 0.3em 0; }
th, td { padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #dde3e9; }
th { background: #f1f5f9; } .left { text-align: left; }
.facts { color: #5b6875; } .partial { background: #fde8e8; padding: 0.5em 1em; font-weight: 600; }
img { max-width: 100%; } pre { background: #f1f5f9; padding: 1em; overflow-x: auto; }
"""


def _page(report: Report, picture: bytes | None) -> str:
    body = [f"<h1>{html.escape(report.title)}</h1>"]
    if report.partial:
        body.append(f'<p class="partial">PARTIAL: {html.escape(report.partial)}</p>')
    facts = (f"{html.escape(k)}: {html.escape(v)}" for k, v in report.facts.items())
    body.append(f'<p class="facts">{"<br>".join(facts)}</p>')
    if picture:
        encoded = base64.b64encode(picture).decode()
        body.append(f'<img alt="chart" src="data:image/png;base64,{encoded}">')
    body += map(_html_table, report.tables)
    body += [f"<p>{html.escape(note)}</p>" for note in report.notes]
    if report.text:
        body.append(f"<pre>{html.escape(report.text)}</pre>")
    title = f"<title>{html.escape(report.title)}</title>"
    head = f'<meta charset="utf-8">{title}<style>{_STYLE}</style>'
    lines = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{lines}\n</body></html>\n'
    )


def _html_table(table: Table) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        kinds = [' class="left"' if column.left else "" for column in table.columns]
        pairs = zip(kinds, row, strict=True)
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in pairs)

    head = cells([column.name for column in table.columns], "th")
    rows = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in table.rows)
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    return f"<table>{caption}<tr>{head}</tr>\n{rows}</table>"
