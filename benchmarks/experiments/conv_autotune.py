"""cuDNN's autotuner on one convolution: what does torch.backends.cudnn.benchmark gain?

The two settings run in two processes: within one, cuDNN's plan for a convolution is kept by its
shape, whichever setting chose it (run_single_conv of ATen/native/cudnn/Conv_v8.cpp looks there
before it looks at the setting).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import cache, partial

import torch
from torch import nn

from benchmarks.experiments.experiment import Row, Settings, processes, synchronise, timed
from fusedtrain.advisor.bench.clock import Call

PARTS = ("forward", "forward+backward")
WARM_UP = 5  # calls, in the first of which the autotuner tries all


@cache
def _calls_of(switch: str, settings: Settings) -> dict[str, Call]:
    """In the process of this setting: calls to be timed, by part."""
    torch.backends.cudnn.benchmark = switch == "on"
    shape = settings.pick((2, 16, 16, 16), (32, 64, 64, 64), (32, 64, 64, 64))
    torch.manual_seed(settings.seed)
    conv = nn.Conv2d(shape[1], shape[1], 3).to(settings.device)
    x = torch.randn(shape, device=settings.device)
    leaf = x.clone().requires_grad_()
    gradient = torch.randn(*shape[:2], shape[2] - 2, shape[3] - 2, device=settings.device)

    def both() -> object:
        return torch.autograd.grad(conv(leaf), [leaf, *conv.parameters()], gradient)

    calls: dict[str, Call] = {PARTS[0]: torch.no_grad()(partial(conv, x)), PARTS[1]: both}
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    return calls


def nanoseconds(part: str, switch: str, settings: Settings) -> float:
    """In the process of this setting: a call's time, of a sample that the pipe costs little."""
    call, calls = _calls_of(switch, settings)[part], settings.pick(1, 1, 50)
    synchronise(settings)
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    synchronise(settings)
    return (time.perf_counter_ns() - start) / calls


def _answer(worker: Executor, part: str, switch: str, settings: Settings) -> float:
    return worker.submit(nanoseconds, part, switch, settings).result()


def rows(settings: Settings) -> Iterator[Row]:
    with processes(("off", "on")) as workers:
        answers: dict[str, Call] = {
            f"{part}, autotuner {switch}": partial(_answer, worker, part, switch, settings)
            for part in PARTS
            for switch, worker in workers.items()
        }
        times = timed(answers, settings, 60, 10.0, clock=lambda answer, _: float(answer()))  # type: ignore[arg-type]
    for part in PARTS:
        for label in (f"{part}, autotuner off", f"{part}, autotuner on"):
            gain = times.over(f"{part}, autotuner off", label)
            yield Row(label, {"ms": 1e3 * times.seconds(label), **gain})
