"""Definition of a rule, and of its findings about a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..._text import time_text
from .._views import Site
from ._facts import RunFacts


@dataclass(frozen=True)
class Cost:
    """Cost of the fault in each step.

    Args:
        kind: "at most" is a bound.
        seconds: of a step; None where time is not the cost, or unknown.
        bytes: of memory, for as long as `text` says.
    """

    kind: Literal["measured", "at most", "not measured here"]
    text: str
    seconds: float | None = None
    bytes: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def not_measured(text: str, bytes: float | None = None) -> Cost:
    return Cost("not measured here", text, bytes=bytes)


@dataclass(frozen=True)
class Change:
    """A change of the source that removes the fault; `_edits.py` has the actions."""

    action: str
    file: str
    line: int
    options: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One fault. `number`: the evidence as a number, whose unit is in `evidence`."""

    rule: str
    title: str
    site: Site | None
    evidence: str
    number: float
    cost: Cost
    remedy: str
    changes: tuple[Change, ...] = ()


class Seen(NamedTuple):
    """A fault that a rule sees. `remedy`: instead of the rule's own."""

    site: Site | None
    evidence: str
    number: float
    cost: Cost
    remedy: str = ""
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Rule:
    """`needs`: "timing" (steps that were timed), "gpu", "eager" (no torch.compile), "trials"
    (copies of models were run) or nothing."""

    id: str
    title: str
    remedy: str
    decide: Callable[[RunFacts], Iterable[Seen]]
    needs: tuple[str, ...] = ()

    def findings(self, facts: RunFacts) -> list[Finding]:
        return [
            Finding(self.id, self.title, *seen[:4], seen.remedy or self.remedy, seen.changes)
            for seen in self.decide(facts)
        ]

    def not_checked(self, facts: RunFacts) -> str:
        """Why the rule says nothing about this run; "" where the rule applies."""
        if "gpu" in self.needs and not facts.on_gpu:
            return "for GPUs; this run was on the CPU"
        if "timing" in self.needs and not facts.timed:
            return "no step was timed: the script took too few"
        if "trials" in self.needs and not facts.tried:
            return "trials were left out, or a step takes longer than 5 s"
        if "eager" in self.needs and facts.compiled:
            return "a model is compiled: torch.compile decides"
        return ""


def rule(
    id: str, title: str, remedy: str, *needs: str
) -> Callable[[Callable[[RunFacts], Iterable[Seen]]], Rule]:
    """Makes a rule of the function that decides."""
    return lambda decide: Rule(id, title, remedy, decide, needs)


def change(action: str, site: Site | None, *names: str, **options: str) -> tuple[Change, ...]:
    """The change at a line; nothing where the line is unknown."""
    return () if site is None else (Change(action, site.file, site.line, options, names),)


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def times(count: float) -> str:
    return "once" if count == 1 else f"{count:.3g} times"


def of_a_step(seconds: float, facts: RunFacts) -> str:
    return f"{time_text(seconds)} of {time_text(facts.step)} a step"
