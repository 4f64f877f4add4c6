"""Settings and rows of the experiments, and the time and memory of their runs."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks.harness.memory import most_allocated
from fusedtrain.advisor.bench import CLOCKS
from fusedtrain.advisor.bench.clock import (
    Call,
    Clock,
    Effort,
    interleave,
    median_interval,
)

Gain = tuple[float, float, float]  # a ratio of times: the median, and its 99 % interval
Numbers = dict[str, float | Gain]
T = TypeVar("T")


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

    def pick(self, quick: T, cpu: T, cuda: T) -> T:
        """The value for these settings."""
        return quick if self.quick else cuda if self.device == "cuda" else cpu


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        label: which run.
        numbers: heading with the unit -> number. A missing number was not measured.
        note: reason of a missing number, or what was left out.
    """

    label: str
    numbers: Mapping[str, float | Gain]
    note: str = ""


class WrongResult(RuntimeError):
    """A contestant computes something else; its times would mean nothing."""


def require(what: str, error: float, most: float) -> float:
    """Returns the error.

    Raises:
        WrongResult: the error is above ``most``, or NaN.
    """
    if not error <= most:
        raise WrongResult(f"{what}: {error:.3g}, where rounding makes at most {most:g}")
    return error


@dataclass(frozen=True)
class Timed:
    """Seconds of every contestant, one sample of each a round."""

    samples: Mapping[str, list[float]]

    def seconds(self, label: str) -> float:
        """The median."""
        return statistics.median(self.samples[label])

    def gain(self, slow: str, fast: str) -> Gain:
        """Time of ``slow`` / time of ``fast``."""
        pairs = zip(self.samples[slow], self.samples[fast], strict=True)
        ratios = [first / second for first, second in pairs]
        return statistics.median(ratios), *median_interval(ratios)

    def over(self, rival: str, label: str, heading: str = "times as fast") -> Numbers:
        """The gain under this heading; nothing for the rival itself."""
        return {} if label == rival else {heading: self.gain(rival, label)}


def timed(
    calls: Mapping[str, Call],
    settings: Settings,
    rounds: int = 40,
    seconds: float = 8.0,
    sample_ns: float = 0.0,
    clock: Clock | None = None,
) -> Timed:
    """Contestants take turns, so that noise of the machine cancels in the ratios of a round."""
    clock = clock or CLOCKS[settings.device]
    effort = Effort(8, rounds, seconds, sample_ns)
    samples = interleave(calls, clock, Effort(2, 2, 0.0, 0.0) if settings.quick else effort)
    return Timed({label: [ns * 1e-9 for ns in values] for label, values in samples.items()})


def synchronise(settings: Settings) -> None:
    """Waits for a GPU."""
    if settings.device == "cuda":
        torch.cuda.synchronize()


def peak_mb(call: Callable[[], Any], settings: Settings) -> float:
    """MB (1e6 bytes) that the call allocates at most, beyond what is allocated before the call."""
    return most_allocated(call, settings.device)[0] / 1e6


@contextlib.contextmanager
def processes(labels: Iterable[str]) -> Iterator[dict[str, Executor]]:
    """A process for each label, for settings that a process cannot take back.

    cuDNN's frontend in torch keeps the algorithm that was chosen first for a shape, whether a
    search (``torch.backends.cudnn.benchmark``) or a heuristic chose the algorithm.
    """
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ignore = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the others
    with contextlib.ExitStack() as stack:
        yield {
            label: stack.enter_context(ProcessPoolExecutor(1, spawn, signal.signal, ignore))
            for label in labels
        }
