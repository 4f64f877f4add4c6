"""Made-up runs, for the judges of the experiments."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.experiments import gains
from benchmarks.experiments.experiment import Run

FAST, SLOW, NOISE = (1.5, 1.4, 1.6), (0.8, 0.7, 0.9), (1.1, 0.9, 1.3)


def runs_of(numbers: Mapping[str, tuple[float, float, float]]) -> dict[str, Run]:
    return {label: Run(label, gains.numbers_of(gain)) for label, gain in numbers.items()}
