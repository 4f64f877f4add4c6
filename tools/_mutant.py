"""A mutant: one place of a source, changed. A comment marks an equivalent one where it stands."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from _test_files import located

# `// equal (<= for <, times two #2): reason`, on the line or on a comment line above: these mutants
# of the line change no result; #2 is the second of its sort. At a Python function it holds for all.
_MARK = re.compile(r"(?://|#) equal \(([^()]+)\): \S")
_COMMENT = re.compile(r"\s*(//|#)")


@dataclass(frozen=True)
class Mutant:
    """`old`, which begins at `offset` of `file`, in its `line` (from 1), becomes `new`."""

    file: str  # from the root of the repository
    offset: int
    line: int
    old: str
    new: str
    what: str  # in a few words: "mask dropped"
    function: str  # or kernel
    before: str  # the lines that change, in one, without indentation
    after: str
    insertion: str = ""  # goes behind `old` in the build of all mutants of CUDA
    pointless: bool = False  # no test could notice it
    equal: bool = False  # marked so

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.what}: {self.after}"

    def applied(self, text: str) -> str:
        start = self.offset
        assert text.startswith(self.old, start), f"{self.name}: the source is another one"
        return text[:start] + self.new + text[start + len(self.old) :]


def mutant(
    file: str, text: str, start: int, old: str, new: str, what: str, function: str
) -> Mutant:
    """A mutant of `text`, the source of `file`: `new` in the place of `old` at offset `start`."""
    assert text.startswith(old, start)
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", start + len(old))
    last = len(text) if last < 0 else last

    def lines(middle: str) -> str:
        return " ".join((text[first:start] + middle + text[start + len(old) : last]).split())

    line = text.count("\n", 0, start) + 1
    return Mutant(file, start, line, old, new, what, function, lines(old), lines(new))


def _marks(lines: list[str]) -> dict[tuple[int, str], int]:
    """Sorts marked as equal, by the line (from 1) for which a mark holds, and the mark's line."""
    marks = {}
    for at, line in enumerate(lines):
        if match := _MARK.search(line):
            held = at
            while _COMMENT.match(lines[held]):
                held += 1
            marks.update({(held + 1, sort.strip()): at + 1 for sort in match[1].split(",")})
    return marks


def marked(
    text: str, mutants: Iterable[Mutant], heads: dict[str, int] | None = None
) -> list[Mutant]:
    """The mutants of a source, those marked as equal among them. `heads`: lines of functions.

    Raises:
        ValueError: a mark for which no mutant is made.
    """
    marks = _marks(text.split("\n"))
    unused, counts, made = dict(marks), Counter[tuple[int, str]](), []
    for m in sorted(mutants, key=lambda m: m.offset):
        counts[m.line, m.what] += 1
        head = (heads or {}).get(m.function, 0)
        keys = (m.line, m.what), (m.line, f"{m.what} #{counts[m.line, m.what]}"), (head, m.what)
        for key in keys:
            unused.pop(key, None)
        made.append(replace(m, equal=any(key in marks for key in keys)))
    if unused:
        file = made[0].file if made else ""
        raise ValueError(f"{file}: marks of mutants that are not made: {unused}")
    return made


def named(rows: str) -> list[str]:
    """Tests by lines of `file: case case`, without their `test_`; a file alone is all its tests."""
    tests = []
    for row in filter(str.strip, rows.splitlines()):
        file, _, cases = row.strip().partition(":")
        tests += [f"test_{file}::test_{case}" for case in cases.split()] or [f"test_{file}"]
    return [located(test) for test in tests]


# The test that noticed a mutant, which has been written to the tree; "" for none.
Judge = Callable[[Mutant], str]
NO_MUTANT = "does not compile"
