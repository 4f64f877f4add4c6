"""Runs the package's commands as a user does, and reads what they write."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import helpers
from helpers.processes import Done, run_python


def environment() -> dict[str, str]:
    """One thread, and this checkout."""
    return helpers.environment(OMP_NUM_THREADS="1")


def heed_ctrl_c() -> None:
    """In a new process, before its program: what a shell starts behind ``&`` ignores SIGINT, and
    hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def fusedtrain(*words: str, folder: Path) -> Done:
    """``python -m fusedtrain WORDS`` in a folder."""
    return run_python("-m", "fusedtrain", *words, cwd=folder, env=environment(), trains=True)


def parsed(run: Done) -> Any:
    """The JSON that a command has printed."""
    assert run.stdout.startswith("{"), run.stdout + run.stderr
    return json.loads(run.stdout)


def assert_png(path: Path, least: tuple[int, int] = (600, 150)) -> None:
    """A PNG of that many pixels at least, which is not blank."""
    from matplotlib import image

    pixels = image.imread(path)
    assert pixels.shape[0] >= least[1]
    assert pixels.shape[1] >= least[0]
    assert len({tuple(p) for p in pixels[::7, ::7].reshape(-1, pixels.shape[2])}) > 5


class Page(HTMLParser):
    """Contents of a report in HTML: its tables, and the picture."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.images: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "elements that are not closed"

    def handle_starttag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images.append(dict(attributes)["src"] or "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += text
