"""The parts of a report that do not depend on what was run: table, checks, surroundings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fusedtrain
from _train.checks import Check
from fusedtrain.advisor.bench import clock


def wide_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=100)


def memory_label(device: str) -> str:
    return "peak memory, MB" if device == "cuda" else "saved for backward, MB"


def median_seconds(seconds: Sequence[float], warm_up: int) -> float:
    """The median step, without the warm-up."""
    return statistics.median(seconds[min(warm_up, len(seconds) // 2) :])


def build_table(
    title: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]
) -> Table:
    """A row a mode; the first heading is of their names. Without a frame: 100 columns are few."""
    table = Table(title=title, caption=caption, show_edge=False, pad_edge=False)
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading.replace(" for ", " for\n").replace(", ", ",\n"), justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def show_checks(console: Console, checks: Sequence[Check], verdict: str) -> None:
    """Every check, those of a mode together, and the verdict where one has failed."""
    modes = list(dict.fromkeys(check.mode for check in checks))
    headed = ""
    for check in sorted(checks, key=lambda check: modes.index(check.mode)):
        if check.mode != headed:
            headed = check.mode
            console.print(headed or "all modes", highlight=False)
        colour, word = ("green", "ok") if check.passed else ("red", "FAILED")
        console.print(
            f"[{colour}]{word:>6}[/] {check.name} {check.value:.2g} (limit {check.limit:.2g})",
            highlight=False,
        )
    if not all(check.passed for check in checks):
        console.rule("[bold red]FAILED", style="red")
        console.print(
            f"[bold red]{verdict}[/] These numbers are not to be trusted; see the checks marked "
            "FAILED above."
        )


def surroundings(device: str, arguments: dict[str, Any], checks: Sequence[Check]) -> dict[str, Any]:
    """The first entries of every results.json."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(device),
        "torch": torch.__version__,
        "fusedtrain": getattr(fusedtrain, "__version__", None),
        "arguments": {k: plain(v) for k, v in arguments.items()},
        "memory": memory_label(device),
        "passed": all(check.passed for check in checks),
        "checks": [
            {k: plain(v) for k, v in (*asdict(c).items(), ("passed", c.passed))} for c in checks
        ],
    }


def device_name(device: str) -> str:
    threads = "" if device == "cuda" else f", {torch.get_num_threads()} thread(s)"
    return clock.device_name(device) + threads


def plain(value: Any) -> Any:
    """A value that JSON can hold: paths as text, and no NaN or infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
