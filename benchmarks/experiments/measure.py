"""Time and memory of the runs of an experiment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.experiments.experiment import Settings
from benchmarks.harness.memory import most_allocated
from fusedtrain.advisor.bench.clock import Call, Effort, cpu_clock, interleave, median_interval

STEPS = Effort(min_rounds=8, max_rounds=40, seconds=8.0, sample_ns=0.0)  # of a training step
QUICK = Effort(min_rounds=2, max_rounds=2, seconds=0.0, sample_ns=0.0)


@dataclass(frozen=True)
class Timed:
    """Seconds of every contestant, one sample of each a round."""

    samples: Mapping[str, list[float]]

    def seconds(self, label: str) -> float:
        """The median."""
        return statistics.median(self.samples[label])

    def gain(self, slow: str, fast: str) -> tuple[float, float, float]:
        """Time of ``slow`` / time of ``fast``: median of the rounds, and its 99 % interval."""
        pairs = zip(self.samples[slow], self.samples[fast], strict=True)
        ratios = [first / second for first, second in pairs]
        return statistics.median(ratios), *median_interval(ratios)


def timed(calls: Mapping[str, Call], settings: Settings, effort: Effort = STEPS) -> Timed:
    """Contestants take turns, so that noise of the machine cancels in the ratios of a round."""
    clock = _synchronised if settings.device == "cuda" else cpu_clock
    samples = interleave(calls, clock, QUICK if settings.quick else effort)
    return Timed({label: [ns * 1e-9 for ns in values] for label, values in samples.items()})


def _synchronised(call: Call, calls: int) -> float:
    """Nanoseconds per call from the first line of the host to the end of the GPU's work."""
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / calls


def peak_megabytes(call: Callable[[], Any], settings: Settings) -> float:
    """MB (1e6 bytes) that the call allocates at most, beyond what is allocated before the call."""
    peak, _ = most_allocated(call, settings.device)
    return peak / 1e6


def gain_text(gain: tuple[float, float, float]) -> str:
    """``1.31x (1.28 to 1.35)``."""
    return f"{gain[0]:.2f}x ({gain[1]:.2f} to {gain[2]:.2f})"
