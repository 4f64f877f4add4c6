"""Networks at 224 pixels: what does fusedtrain give them, beside torch.compile?

Speeds are over eager's, in turns with it. MB: at most allocated by a step, beyond weights and
states.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

import fusedtrain
from benchmarks.charts import NETWORKS
from benchmarks.experiments.experiment import Numbers, Row, Settings, peak_mb, timed
from benchmarks.harness.networks import Gate, Setup, batch_of, build, call
from fusedtrain.advisor.bench.gate import NotTheJob

EAGER, OURS, RECOMPUTE, COMPILED = "eager", "fusedtrain", "fusedtrain, recompute", "torch.compile"
HALF = ("float16 AMP", "bfloat16 AMP")
GATE_PIXELS = 64  # of the check in float64, which is slow on GPUs, too
# Largest error of the first loss, relative to eager's: 16 bits have 3 digits, and a mean over
# images has fewer errors than each. A wrong layer changes the loss of 7 by much more.
LOSS_OFF = 0.02
COMPILE_UNTIL = {"cuda": 420.0, "cpu": 150.0}  # seconds: no compilation starts later


def cases(settings: Settings) -> list[Setup]:
    """Networks with their inputs, which the contestants share."""
    if settings.quick:
        dtype = HALF[1] if settings.device == "cuda" else "float32"
        return [Setup("train", "resnet18", 4, 32, dtype=dtype)]
    # Without instructions for 16 bits a processor needs 8 times as long for their convolutions.
    dtypes, batch, count = settings.pick((HALF, 4, 0), (("float32",), 4, 2), (HALF, 128, 3))
    models = ("resnet50", "efficientnet_b0", "convnext_tiny")[:count]
    return [Setup("train", model, batch, 224, dtype=dtype) for model in models for dtype in dtypes]


def label(setup: Setup, who: str) -> str:
    """The run of a contestant."""
    return f"{NETWORKS[setup.model]}, {setup.dtype.removesuffix(' AMP')}, {who}"


def contestant(who: str, stock: nn.Module) -> nn.Module:
    """A network that starts from the weights of ``stock``."""
    model = copy.deepcopy(stock)
    if who == COMPILED:
        torch.compiler.reset()
        compiled: nn.Module = torch.compile(model, dynamic=False)  # type: ignore[assignment]
        return compiled
    if who != EAGER:
        fusedtrain.convert(model, memory="recompute" if who == RECOMPUTE else "store")
    return model


@cache
def _refused(setup: Setup, who: str, device: str) -> str:
    """The reason if our contestant fails the check against the stock network in float64."""
    stock = build(setup, device)
    try:
        Gate(stock, setup, device).check(who, contestant(who, stock))
    except NotTheJob as error:
        return f"refused: {error}"
    return ""


def measured(setup: Setup, contestants: Sequence[str], settings: Settings) -> Iterator[Row]:
    """Rows of eager and of contestants that take turns with it, unless they are refused."""
    small = replace(setup, batch=4, pixels=min(GATE_PIXELS, setup.pixels), dtype="float32")
    ours = [who for who in contestants if who != COMPILED]
    reasons = {who: why for who in ours if (why := _refused(small, who, settings.device))}
    stock = build(setup, settings.device)
    batch = batch_of(setup, settings.device)
    call(contestant(EAGER, stock), setup, *batch)()  # libraries are loaded by the first step of all
    calls: dict[str, Callable[[], Tensor]] = {}
    first: dict[str, float] = {}  # seconds of conversion or compilation, and of a step
    losses: dict[str, float] = {}
    for who in (EAGER, *contestants):
        if who in reasons:
            continue
        start = time.perf_counter()
        step = call(contestant(who, stock), setup, *batch)
        losses[who] = float(step())  # waits for the device
        first[who] = time.perf_counter() - start
        off = abs(losses[who] / losses[EAGER] - 1)
        if off <= LOSS_OFF:
            calls[who] = step
        else:
            reasons[who] = f"refused: the first loss is off by {off:.1%}"
    times = timed(calls, settings, 40, 8.0 if settings.device == "cuda" else 30.0)
    for who in (EAGER, *contestants):
        numbers: Numbers = {}
        if who in calls:
            numbers["images/s"] = setup.batch / times.seconds(who)
            numbers |= times.over(EAGER, who, "speed over eager")
            numbers["peak MB"] = peak_mb(calls[who], settings)
            numbers["s to the first step"] = first[who]
        yield Row(label(setup, who), numbers, reasons.get(who, ""))


def rows(settings: Settings) -> Iterator[Row]:
    begun = time.perf_counter()
    for setup in cases(settings):
        yield from measured(setup, (OURS, RECOMPUTE), settings)
        _release(settings)
    for setup in cases(settings):
        if settings.quick:
            note = "left out of a quick run: it compiles for seconds"
        elif time.perf_counter() - begun > COMPILE_UNTIL[settings.device]:
            note = f"not measured: {COMPILE_UNTIL[settings.device]:.0f} s were over"
        else:
            try:  # beside another eager network, whose row is known already
                yield [*measured(setup, (COMPILED,), settings)][1]
                continue
            except RuntimeError as error:  # of Triton or the host's compiler, which may be missing
                first = str(error).strip().split("\n")[0][:120]
                note = f"not measured: {type(error).__name__}: {first}"
            finally:
                _release(settings)
        yield Row(label(setup, COMPILED), {}, note)


def _release(settings: Settings) -> None:
    torch.compiler.reset()
    if settings.device == "cuda":
        torch.cuda.empty_cache()
