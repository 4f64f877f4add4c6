"""Runs of the experiments: quick ones, and made-up ones for the judges."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from benchmarks.experiments import command, gains
from benchmarks.experiments.experiment import Run, Settings, Verdict
from benchmarks.experiments.workers import Handlers

QUICK, CPU, CUDA = Settings(quick=True), Settings("cpu"), Settings("cuda")
FAST, SLOW, NOISE = (1.5, 1.4, 1.6), (0.8, 0.7, 0.9), (1.1, 0.9, 1.3)


@cache
def measured(name: str) -> tuple[dict[str, Run], list[Verdict]]:
    """The runs of a quick experiment, by their labels, and its verdicts."""
    experiment = command.experiment_of(name)
    runs = {run.label: run for run in experiment.runs(QUICK)}
    return runs, [*experiment.judge(runs, QUICK)]


def judged(
    name: str, numbers: Mapping[str, Mapping[str, float]], settings: Settings = QUICK
) -> list[bool | None]:
    """The verdicts on made-up runs."""
    runs = {label: Run(label, row) for label, row in numbers.items()}
    verdicts = command.experiment_of(name).judge(runs, settings)
    assert all(verdict.words for verdict in verdicts)
    return [verdict.holds for verdict in verdicts]


class Inline(contextlib.nullcontext[Any]):
    """A worker in this process; others import torch for seconds."""

    def __init__(self, build: Callable[..., Handlers], *arguments: Any) -> None:
        super().__init__(self)
        self.handlers = build(*arguments)

    def ask(self, name: str, patience: float | None = None) -> Any:
        return self.handlers[name]()


def runs_of(numbers: Mapping[str, tuple[float, float, float]]) -> dict[str, Run]:
    return {label: Run(label, gains.numbers_of(gain)) for label, gain in numbers.items()}
