"""Output of the command: with rich where rich is installed, otherwise plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH = 160  # of tables that go to a file


class Screen:
    """Standard output, line by line; nothing waits in a buffer."""

    def __init__(self) -> None:
        self._console: Any = None
        try:
            from rich.console import Console
        except ImportError:
            return
        console = Console(highlight=False)
        self._console = console if console.is_terminal else Console(width=WIDTH, highlight=False)

    def line(self, text: str = "", style: str = "") -> None:
        """A line; ``style`` is rich's."""
        if self._console is None or not self._console.is_terminal:
            print(text, flush=True)
            return
        from rich.text import Text

        self._console.print(Text(text, style=style))

    def table(
        self, headings: Sequence[str], rows: Sequence[Sequence[str]], words: set[int]
    ) -> None:
        """A table.

        Args:
            headings: of the columns.
            rows: of cells.
            words: columns that begin at the left; the others are numbers.
        """
        if self._console is None:
            from fusedtrain._text import column_lines  # and torch, whose import takes seconds

            for text in column_lines([headings, *rows], words):
                print(text, flush=True)
            return
        import rich.box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for number, heading in enumerate(headings):
            table.add_column(Text(heading), justify="left" if number in words else "right")
        for row in rows:
            table.add_row(*map(Text, row))
        self._console.print(table)
