"""An experiment: a published claim, runs that repeat it, and a verdict in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Column:
    """A number that every run may have.

    Args:
        name: heading of the table, with the unit.
        digits: after the point.
    """

    name: str
    digits: int = 1


@dataclass(frozen=True)
class Claim:
    """A published claim.

    Args:
        text: the claim in one sentence, with its numbers.
        where: the device, and the kind of publication with its year, as far as known.
        numbers: label of a run -> key of a column -> the published number.
    """

    text: str
    where: str
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """How an experiment is run.

    Args:
        device: "cpu" or "cuda".
        quick: a smoke test of seconds, whose numbers mean nothing.
        seed: of data and weights.
    """

    device: str = "cpu"
    quick: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One line of the table.

    Args:
        label: which run.
        numbers: key of a column -> number. A column without a number was not measured.
        note: what a reader must know of the run: why a number lacks, what was left out.
    """

    label: str
    numbers: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds here.

    Args:
        holds: None where this device cannot tell.
        words: one or two sentences with the numbers that decide, and the reason where the claim
            does not hold.
    """

    holds: bool | None
    words: str


Judge = Callable[[Mapping[str, Run], Settings], Sequence[Verdict]]


@dataclass(frozen=True)
class Experiment:
    """A published experiment.

    Args:
        name: of its file.
        title: a few words.
        question: what a reader wants to know, in a sentence.
        setup: model, data, batch and steps of these settings, in a sentence.
        columns: key -> column; the order is that of the table.
        claims: what was published.
        runs: measures, and yields each run as soon as it is measured.
        judge: a verdict for each claim, in the order of ``claims``. Runs may lack.
    """

    name: str
    title: str
    question: str
    setup: Callable[[Settings], str]
    columns: Mapping[str, Column]
    claims: Sequence[Claim]
    runs: Callable[[Settings], Iterator[Run]]
    judge: Judge
