"""cuDNN's autotuner on one convolution.

The two settings run in two processes: within one, cuDNN's plan for a convolution is kept by its
shape, whichever setting chose it (run_single_conv of ATen/native/cudnn/Conv_v8.cpp looks there
before it looks at the setting), so the second setting would be timed with the plan of the first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import nn

from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.gains import COLUMNS, gain_of, judge, numbers_of
from benchmarks.experiments.measure import QUICK, Timed, gain_text, timed
from benchmarks.experiments.workers import Handlers, Worker
from fusedtrain.advisor.bench.clock import Call, Effort, interleave

FORWARD, BOTH = "forward", "forward+backward"
PARTS = (FORWARD, BOTH)
SHAPE = (32, 64, 64, 64)
QUICK_SHAPE = (2, 16, 16, 16)
EFFORT = Effort(min_rounds=8, max_rounds=60, seconds=10.0, sample_ns=0.0)
CALLS = 50  # in a sample on a GPU
WARM_UP = 5  # calls, in the first of which the autotuner tries all
LONGEST = 240.0  # seconds for an answer; the first takes the import of torch and the tuning


def calls_of(settings: Settings, autotune: bool) -> dict[str, Call]:
    """Calls to be timed, by part. Each switches the autotuner, which is a switch of the process.

    The gradient is that of the weight and of the input, as within a network.
    """
    shape = QUICK_SHAPE if settings.quick else SHAPE
    torch.manual_seed(settings.seed)
    conv = nn.Conv2d(shape[1], shape[1], 3).to(settings.device)
    x = torch.randn(shape, device=settings.device)
    leaf = x.clone().requires_grad_()
    gradient = torch.randn(*shape[:2], shape[2] - 2, shape[3] - 2, device=settings.device)

    def forward() -> object:
        torch.backends.cudnn.benchmark = autotune
        with torch.no_grad():
            return conv(x)

    def both() -> object:
        torch.backends.cudnn.benchmark = autotune
        return torch.autograd.grad(conv(leaf), [leaf, *conv.parameters()], gradient)

    return {FORWARD: forward, BOTH: both}


@contextlib.contextmanager
def switch_restored() -> Iterator[None]:
    """For all that runs afterwards."""
    before = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def build(settings: Settings, autotune: bool) -> Handlers:
    """In a process of one setting: each part answers with seconds a call."""
    calls = calls_of(settings, autotune)
    for call in calls.values():
        for _ in range(WARM_UP):
            call()

    def seconds(call: Call) -> float:
        _wait(settings)
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        _wait(settings)
        return (time.perf_counter() - start) / CALLS

    return {part: partial(seconds, call) for part, call in calls.items()}


def _wait(settings: Settings) -> None:
    if settings.device == "cuda":
        torch.cuda.synchronize()


def label_of(part: str, autotune: bool) -> str:
    return f"{part}, autotuner {'on' if autotune else 'off'}"


def times_of_processes(settings: Settings) -> Timed:
    """Each setting in a process of its own, which take turns."""
    with contextlib.ExitStack() as stack:
        workers = {on: stack.enter_context(Worker(build, settings, on)) for on in (False, True)}
        questions: dict[str, Call] = {
            label_of(part, on): partial(worker.ask, part, LONGEST)
            for part in PARTS
            for on, worker in workers.items()
        }
        effort = QUICK if settings.quick else EFFORT
        return Timed(interleave(questions, lambda ask, _: cast(float, ask()), effort))


def times_of_one_process(settings: Settings) -> Timed:
    """On the CPU no plan is kept, and starting processes takes longer than measuring."""
    calls = {
        label_of(part, autotune): call
        for autotune in (False, True)
        for part, call in calls_of(settings, autotune).items()
    }
    with switch_restored():
        return timed(calls, settings, EFFORT)


def _runs(settings: Settings) -> Iterator[Run]:
    times = (times_of_processes if settings.device == "cuda" else times_of_one_process)(settings)
    for part in PARTS:
        off, on = label_of(part, False), label_of(part, True)
        yield Run(off, {"ms": 1e3 * times.seconds(off)})
        yield Run(on, {"ms": 1e3 * times.seconds(on), **numbers_of(times.gain(off, on))})


def _judge(runs: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    return [_verdict(part, runs, settings) for part in PARTS]


def _verdict(part: str, runs: Mapping[str, Run], settings: Settings) -> Verdict:
    gain = gain_of(runs, label_of(part, True))
    if settings.device == "cuda" or gain is None:
        return judge({f"{part}, published {PUBLISHED[part]:.2f}x": gain}, OTHERWISE)
    return Verdict(
        None,
        f"The CPU has no cuDNN, so the switch does nothing; the same call twice: {part} "
        f"{gain_text(gain)}.",
    )


def _setup(settings: Settings) -> str:
    shape = QUICK_SHAPE if settings.quick else SHAPE
    processes = ", each setting in its own process" if settings.device == "cuda" else ""
    return (
        f"nn.Conv2d({shape[1]}, {shape[1]}, 3) on an input of {' x '.join(map(str, shape))}, "
        f"float32 (on a GPU torch's default, TF32), contiguous{processes}. Forward is without "
        "gradients; forward+backward has those of the input, the weight and the bias."
    )


OTHERWISE = "the plan that cuDNN's heuristic chooses is as fast as the best that is tried"
PUBLISHED = {FORWARD: 1.70, BOTH: 1.27}
WHERE = "PyTorch performance tuning guide, cuDNN 8; NVIDIA Quadro RTX 8000"
EXPERIMENT = Experiment(
    name="conv_autotune",
    title="cuDNN's autotuner on one convolution",
    question="What does torch.backends.cudnn.benchmark gain for a convolution?",
    setup=_setup,
    columns={"ms": Column("ms", 3), **COLUMNS},
    claims=tuple(
        Claim(
            f"torch.backends.cudnn.benchmark makes {part} {gain:.2f} times as fast.",
            WHERE,
            {label_of(part, True): {"gain": gain}},
        )
        for part, gain in PUBLISHED.items()
    ),
    runs=_runs,
    judge=_judge,
)
