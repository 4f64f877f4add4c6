"""AMP and cuDNN's autotuner, with and without each other: memory and time of a training."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.gains import SPEED, triple
from benchmarks.experiments.measure import gain_text, peak_megabytes, timed
from benchmarks.experiments.training import (
    EPOCH,
    Job,
    Maker,
    autocast,
    fresh_step,
    full,
    half,
)
from benchmarks.experiments.workers import Handlers, Worker

FLOAT32, AMP = "float32", "AMP"
AUTOTUNE = " + autotune"
FUSED = f"{AMP}{AUTOTUNE}, fusedtrain"


@dataclass(frozen=True)
class Contestant:
    """Features that a run switches on."""

    amp: bool
    autotune: bool
    fused: bool = False

    def maker(self, settings: Settings) -> Maker:
        if not self.amp:
            return full
        dtype = half(settings)
        return autocast(dtype, scaled=dtype == torch.float16, fused=self.fused)


CONTESTANTS = {
    FLOAT32: Contestant(False, False),
    FLOAT32 + AUTOTUNE: Contestant(False, True),
    AMP: Contestant(True, False),
    AMP + AUTOTUNE: Contestant(True, True),
    FUSED: Contestant(True, True, fused=True),
}


def job(settings: Settings) -> Job:
    """A CPU without 16-bit instructions needs ten times as long for bfloat16 as for float32."""
    if settings.quick:
        return Job("resnet18", 8, 2)
    return Job("resnet18", 64, 128) if settings.device == "cuda" else Job("resnet18", 16, 16)


def setup(settings: Settings) -> str:
    chosen = job(settings)
    text = (
        f"ResNet-18 for 32 px (width {chosen.width}) on random images, batch {chosen.batch},"
        " channels_last, SGD with momentum; each run is a process, and the processes take turns."
        f" Time is that of an epoch of {EPOCH:,} images, extrapolated from the median step"
    )
    if settings.device == "cuda":
        return (
            f"{text} and the first step, which has the autotuner's search. Memory is the most that"
            " the network and two steps allocate, the search included; AMP is float16."
        )
    return (
        f"{text}. Memory is the most that the network and two steps allocate. AMP is bfloat16"
        " autocast without a scaler. A CPU has no autotuner: the switch is set and changes nothing."
    )


def build(contestant: Contestant, settings: Settings, threads: int) -> Handlers:
    """In the worker: what the parent may ask for."""
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = contestant.autotune
    chosen, make = job(settings), contestant.maker(settings)
    # The libraries are loaded by images of another size: the first step below has the search alone.
    fresh_step(replace(chosen, batch=chosen.batch // 2 or 1), make, settings)()
    measured: dict[str, float] = {}

    def train() -> object:
        step = fresh_step(chosen, make, settings)
        begun = time.perf_counter()
        for _ in range(2):
            step()
            if settings.device == "cuda":
                torch.cuda.synchronize()
            measured.setdefault("first", time.perf_counter() - begun)
        return step

    gc.collect()
    measured["mb"] = peak_megabytes(train, settings)
    step = fresh_step(chosen, make, settings)
    return {"numbers": lambda: measured, "steps": partial(_steps, step, settings)}


def calls(settings: Settings) -> int:
    """Steps of a sample: on a GPU so many that the pipe to the worker costs little beside them."""
    return 5 if settings.device == "cuda" and not settings.quick else 1


def _steps(step: Callable[[], object], settings: Settings) -> None:
    for _ in range(calls(settings)):
        step()
    if settings.device == "cuda":
        torch.cuda.synchronize()


def runs(settings: Settings) -> Iterator[Run]:
    with contextlib.ExitStack() as stack:
        workers = {
            label: stack.enter_context(Worker(build, c, settings, torch.get_num_threads()))
            for label, c in CONTESTANTS.items()
        }
        # One after another: each asks for the threads of the whole machine.
        numbers = {label: dict(worker.ask("numbers")) for label, worker in workers.items()}
        times = timed({label: partial(w.ask, "steps") for label, w in workers.items()}, settings)
    per_epoch = EPOCH / job(settings).batch
    for label in CONTESTANTS:
        seconds = times.seconds(label) / calls(settings)
        first = numbers[label]["first"] if settings.device == "cuda" else seconds
        row = {
            "total": first + (per_epoch - 1) * seconds,
            "ms": seconds * 1e3,
            "mb": numbers[label]["mb"],
        }
        if settings.device == "cuda":
            row["first"] = first
        rival = AMP + AUTOTUNE if label == FUSED else FLOAT32
        note = ""
        if label != rival:
            gain = times.gain(rival, label)
            row |= dict(zip(SPEED, gain, strict=True))
            note = f"steps at {gain_text(gain)} the speed of {rival}"
        yield Run(label, row, note)


def judge(measured: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    if not {*CONTESTANTS} - {FUSED} <= measured.keys():
        return [Verdict(None, "Not all runs were measured.")] * 3
    return [_memory(measured), _autotuner(measured, settings), _amp_speed(measured)]


def _memory(measured: Mapping[str, Run]) -> Verdict:
    """The runs of AMP need less than both others."""
    mb = {label: measured[label].numbers["mb"] for label in CONTESTANTS if label in measured}
    least_without = min(mb[FLOAT32], mb[FLOAT32 + AUTOTUNE])
    words = f"AMP needs {mb[AMP]:,.1f} MB and float32 {mb[FLOAT32]:,.1f} MB"
    if mb[AMP] < least_without:
        return Verdict(True, f"{words}.")
    return Verdict(
        False,
        f"{words}: copies of weights in 16 bits cost more than activations of this size save.",
    )


def _autotuner(measured: Mapping[str, Run], settings: Settings) -> Verdict:
    tuned, plain = measured[FLOAT32 + AUTOTUNE].numbers, measured[FLOAT32].numbers
    speed = gain_text(triple(measured[FLOAT32 + AUTOTUNE], SPEED))
    if settings.device != "cuda":
        return Verdict(
            None, f"A CPU has no autotuner. The switch gives {speed}, the noise of the machine."
        )
    words = (
        f"Steps with the autotuner have {speed} the speed, with {tuned['mb']:,.0f} instead of "
        f"{plain['mb']:,.0f} MB"
    )
    if tuned["least"] > 1 and tuned["mb"] > plain["mb"]:
        return Verdict(True, f"{words}.")
    if tuned["least"] > 1:
        return Verdict(False, f"{words}: the faster algorithms need no more memory here.")
    if tuned["most"] < 1 or tuned["mb"] > plain["mb"]:
        return Verdict(
            False, f"{words}: cuDNN's heuristics choose algorithms as fast without a search."
        )
    return Verdict(None, f"{words}: the interval of the speed includes 1.")


def _amp_speed(measured: Mapping[str, Run]) -> Verdict:
    plain, amp = measured[FLOAT32].numbers, measured[AMP].numbers
    speed = gain_text(triple(measured[AMP], SPEED))
    words = (
        f"AMP has {speed} the speed of float32 ({amp['total']:,.1f} and {plain['total']:,.1f} s)"
    )
    if amp["least"] > 1:
        return Verdict(False, f"{words}: this device computes convolutions faster in 16 bits.")
    return Verdict(True, f"{words}.")


_WHERE = "RTX 3080 Ti, a tutorial on memory and speed in PyTorch"
EXPERIMENT = Experiment(
    name="amp_autotune",
    title="AMP and cuDNN's autotuner",
    question="What do mixed precision and the search for the fastest convolution cost and gain, "
    "alone and together?",
    setup=setup,
    columns={
        "total": Column("s/epoch"),
        "ms": Column("ms/step", 2),
        "mb": Column("MB"),
        "first": Column("first step, s", 2),
    },
    claims=[
        Claim("Of these switches AMP saves most memory.", _WHERE),
        Claim("The autotuner makes training faster, and training takes more memory.", _WHERE),
        Claim("AMP does not make training faster on this card.", _WHERE),
    ],
    runs=runs,
    judge=judge,
)
