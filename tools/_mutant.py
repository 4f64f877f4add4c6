"""A mutant: one place of a source, changed; and what makes and judges mutants of a language."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")
Key = tuple[str, str, str]


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

    @property
    def key(self) -> Key:
        """The key in tables of equivalents: file, function, the line as it becomes but for a
        comment of Python's. No numbers of lines, which other changes move."""
        return self.file, self.function, self.after.split(" # ")[0]

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


def of_shard(items: list[T], shard: str) -> list[T]:
    """The i-th of n parts, which is i/n: every n-th item."""
    index, count = (int(number) for number in shard.split("/"))
    if not 1 <= index <= count:
        raise SystemExit("--shard: i/n with i from 1 to n")
    return items[index - 1 :: count]


Judge = Callable[[Mutant], str]


class Kind(Protocol):
    """A module that makes mutants of one language, and judges them."""

    # Mutants that change nothing that can be seen, and why.
    EQUIVALENT: Mapping[Key, str]
    # The options of pytest that select its tests.
    CHOSEN: list[str]

    def mutants(self, root: Path) -> list[Mutant]:
        """All of them, in a fixed order."""
        ...

    def prepare(self, tree: Path, mutants: list[Mutant], seconds: float, ends: ExitStack) -> Judge:
        """Builds the copy, runs the tests of the mutants on it without a mutant, and returns a
        function: the test that noticed a mutant, which has been written to the tree; "" for none.
        The function may modify what is built in the tree, but no source.

        Args:
            ends: ends what the function needs.

        Raises:
            RuntimeError: the copy does not build, or a test fails without a mutant.
        """
        ...
