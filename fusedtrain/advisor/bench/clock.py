"""Time: the interleaved clock, and the ratios of rivals."""

from __future__ import annotations

import gc
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._backends import processor

Call = Callable[[], object]
Clock = Callable[[Call, int], float]
Function = Callable[..., Tensor]


def cpu_clock(call: Call, calls: int) -> float:
    """Nanoseconds per call on the host."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls


def cuda_clock(call: Call, calls: int) -> float:
    """Nanoseconds per call between two events of the current stream.

    Back-to-back calls: whichever is longer of the kernel and the host's work to launch it.
    """
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e6 / calls


class FlushingCudaClock:
    """Like cuda_clock, one call at a time, with other memory in the L2 cache before each.

    The result is the time of the kernels alone: the flush is repeated until it takes longer than
    the host needed to launch the call before. With one flush of 70 us, 21 of 38 rows were the
    host's time on an H200 (2026-11-28). The flush reads: written lines would go back to memory
    during the call.
    """

    # Twice the largest L2 of the GPUs this is written for (B200: 126 MB).
    FLUSH_BYTES = 1 << 28
    _MOST_FLUSHES = 64  # 5 ms of an H200; a call that waits for the GPU would want ever more

    def __init__(self) -> None:
        self._buffer = torch.zeros(self.FLUSH_BYTES // 4, device="cuda")
        self._flush_ns = min(cuda_clock(self._buffer.amax, 1) for _ in range(5))
        self.host_ns: dict[Call, float] = {}  # call -> nanoseconds of the host for the last one

    def __call__(self, call: Call, calls: int) -> float:
        del calls
        flushes = 1 + math.ceil(1.5 * self.host_ns.get(call, 0.0) / self._flush_ns)
        self._buffer.expand(min(flushes, self._MOST_FLUSHES), -1).amax()

        def timed() -> None:
            begun = time.perf_counter_ns()
            call()
            self.host_ns[call] = float(time.perf_counter_ns() - begun)

        return cuda_clock(timed, 1)


@dataclass(frozen=True)
class Effort:
    """How long one row may take. A sample is as many calls as fill ``sample_ns``."""

    min_rounds: int
    max_rounds: int
    seconds: float
    sample_ns: float


# Eight rounds are the least whose range is a 99 % interval of the median.
NORMAL = Effort(min_rounds=8, max_rounds=100, seconds=0.25, sample_ns=200_000)
QUICK = Effort(min_rounds=3, max_rounds=9, seconds=0.02, sample_ns=50_000)


def interleave(
    calls: Mapping[str, Call],
    clock: Clock,
    effort: Effort,
    prepare: Callable[[str], object] | None = None,
) -> dict[str, list[float]]:
    """Nanoseconds per call of every rival, one sample of each per round, in shuffled order.

    A neighbour who takes half of the machine for a second then slows all rivals alike, and the
    ratios of a round stay true. ``prepare`` is called before each sample, with the name of who is
    next, and not timed.
    """

    def sample(name: str, times: int) -> float:
        if prepare is not None:
            prepare(name)
        return clock(calls[name], times)

    repeats = {}
    for name in calls:
        sample(name, 1)
        estimate = min(sample(name, 1) for _ in range(2))
        repeats[name] = max(1, math.ceil(effort.sample_ns / estimate))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        deadline = time.perf_counter() + effort.seconds
        for done in range(effort.max_rounds):
            if done >= effort.min_rounds and time.perf_counter() >= deadline:
                break
            shuffle(order)
            for name in order:
                samples[name].append(sample(name, repeats[name]))
    finally:
        gc.enable()
    return samples


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 99 % interval of the median by order statistics (the range, below 8 values)."""
    ordered = sorted(values)
    cut, below = 0, 0.0
    for k in range(len(ordered) // 2):
        below += math.comb(len(ordered), k) / 2 ** len(ordered)
        if below > 0.005:
            break
        cut = k
    return ordered[cut], ordered[-1 - cut]


def compare(samples: Mapping[str, Sequence[float]], rivals: Iterable[str]) -> dict[str, Any]:
    """Each rival's time / fusedtrain's: medians over the rounds, and their 99 % intervals."""
    result: dict[str, Any] = {"ratio": {}, "ratio_interval": {}}
    for rival in rivals:
        ratios = [a / b for a, b in zip(samples[rival], samples["fusedtrain"], strict=True)]
        result["ratio"][rival] = statistics.median(ratios)
        result["ratio_interval"][rival] = median_interval(ratios)
    return result


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's model name where the system tells it."""
    return torch.cuda.get_device_name() if device == "cuda" else processor()


def device_slug(device: str) -> str:
    """The device's name as a file name: ``NVIDIA H100 80GB HBM3`` -> ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")


def compiled(function: Function) -> Function:
    """torch.compile of the function; it compiles at its first call, for the sizes of that."""
    # Dynamo keeps at most 8 variants of one function; rows must not meet that limit.
    torch.compiler.reset()
    result: Function = torch.compile(function, fullgraph=True, dynamic=False)
    return result
