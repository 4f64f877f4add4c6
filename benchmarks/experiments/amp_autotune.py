"""AMP and cuDNN's autotuner: what do they cost and gain, alone and together?

Each run is a process of its own; an epoch is extrapolated from the median step and, on a GPU,
the first one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import torch

from benchmarks.experiments.experiment import (
    Row,
    Settings,
    peak_mb,
    processes,
    synchronise,
    timed,
)
from benchmarks.experiments.training import EPOCH, Job, autocast, fresh_step, full, half

FLOAT32, TUNED, FUSED = "float32", "AMP + autotune", "AMP + autotune, fusedtrain"
LABELS = (FLOAT32, "float32 + autotune", "AMP", TUNED, FUSED)  # the words decide what is on


def job_of(settings: Settings) -> Job:
    """A CPU without 16-bit instructions needs ten times as long for bfloat16 as for float32."""
    return Job("resnet18", *settings.pick((8, 2), (16, 16), (64, 128)))


def calls_of(settings: Settings) -> int:
    """Steps of a sample: on a GPU so many that the pipe to the worker costs little beside them."""
    return settings.pick(1, 1, 5)


@cache
def built(
    label: str, settings: Settings, threads: int
) -> tuple[dict[str, float], Callable[[], object]]:
    """In the worker: its first step's seconds and its memory, and a step."""
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = "autotune" in label
    job, dtype = job_of(settings), half(settings)
    amp = autocast(dtype, scaled=dtype == torch.float16, fused=label == FUSED)
    make = amp if "AMP" in label else full
    # The libraries are loaded by images of another size: the first step below has the search alone.
    fresh_step(replace(job, batch=job.batch // 2 or 1), make, settings)()
    measured: dict[str, float] = {}

    def train() -> object:
        step = fresh_step(job, make, settings)
        begun = time.perf_counter()
        for _ in range(2):
            step()
            synchronise(settings)
            measured.setdefault("first step, s", time.perf_counter() - begun)
        return step

    gc.collect()
    measured["MB"] = peak_mb(train, settings)
    return measured, fresh_step(job, make, settings)


def numbers_of(label: str, settings: Settings, threads: int) -> dict[str, float]:
    return built(label, settings, threads)[0]


def run_steps(label: str, settings: Settings, threads: int) -> None:
    for _ in range(calls_of(settings)):
        built(label, settings, threads)[1]()
    synchronise(settings)


def rows(settings: Settings) -> Iterator[Row]:
    threads = torch.get_num_threads()
    with processes(LABELS) as workers:

        def ask(label: str, question: Callable[..., object]) -> object:
            return workers[label].submit(question, label, settings, threads).result()

        # One after another: each asks for the threads of the whole machine.
        numbers: dict[str, object] = {label: ask(label, numbers_of) for label in LABELS}
        times = timed({who: partial(ask, who, run_steps) for who in LABELS}, settings)
    for label in LABELS:
        seconds, measured = times.seconds(label) / calls_of(settings), numbers[label]
        assert isinstance(measured, dict)
        first = measured["first step, s"] if settings.device == "cuda" else seconds
        epoch = first + (EPOCH / job_of(settings).batch - 1) * seconds
        rival = TUNED if label == FUSED else FLOAT32
        mine = {"s/epoch": epoch, "ms/step": seconds * 1e3, **measured}
        yield Row(label, {**mine, **times.over(rival, label)}, f"gain over {rival}")
