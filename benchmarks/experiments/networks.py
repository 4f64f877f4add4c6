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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Numbers, Row, Settings, peak_mb, timed
from benchmarks.harness.networks import Gate, Setup, batch_of, build, call
from fusedtrain.advisor.bench.gate import NotTheJob

EAGER, OURS, RECOMPUTE, COMPILED = "eager", "fusedtrain", "fusedtrain, recompute", "torch.compile"
TITLES = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "efficientnet_b0": "EfficientNet-B0",
    "convnext_tiny": "ConvNeXt-T",
}
HALF = ("float16", "bfloat16")  # with autocast
GATE_PIXELS = 64  # of the check in float64, which is slow on GPUs, too
# Largest error of the first loss, relative to eager's: 16 bits have 3 digits, and a mean over
# images has fewer errors than each. A wrong layer changes the loss of 7 by much more.
LOSS_OFF = 0.02
COMPILE_UNTIL = {"cuda": 420.0, "cpu": 150.0}  # seconds: no compilation starts later


class Case(NamedTuple):
    """A network with its input, which the contestants share."""

    network: str
    dtype: str
    batch: int
    pixels: int = 224

    def label(self, who: str) -> str:
        return f"{TITLES[self.network]}, {self.dtype}, {who}"

    @property
    def setup(self) -> Setup:
        return Setup("train", self.network, self.batch, self.pixels)


def cases(settings: Settings) -> list[Case]:
    if settings.quick:
        return [Case("resnet18", "bfloat16" if settings.device == "cuda" else "float32", 4, 32)]
    # Without instructions for 16 bits a processor needs 8 times as long for their convolutions.
    dtypes, batch, count = settings.pick((HALF, 4, 0), (("float32",), 4, 2), (HALF, 128, 3))
    return [Case(network, dtype, batch) for network in [*TITLES][1 : 1 + count] for dtype in dtypes]


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
def _gated(network: str, pixels: int, settings: Settings) -> dict[str, str]:
    """Our contestants that fail the check against the stock network in float64, with the reason."""
    small = Setup("train", network, 4, min(GATE_PIXELS, pixels))
    stock = build(small, settings.device)
    gate, reasons = Gate(stock, small, settings.device), {}
    for who in (OURS, RECOMPUTE):
        try:
            gate.check(who, contestant(who, stock))
        except NotTheJob as error:
            reasons[who] = f"refused: {error}"
    return reasons


class Entrant(NamedTuple):
    """A contestant after its first step."""

    step: Callable[[], Tensor]
    first: float  # seconds: conversion or compilation, and the step
    loss: float


def _enter(who: str, stock: nn.Module, case: Case, batch: tuple[Tensor, Tensor]) -> Entrant:
    start = time.perf_counter()
    dtype = f"{case.dtype} AMP" if case.dtype in HALF else case.dtype
    step = call(contestant(who, stock), replace(case.setup, dtype=dtype), *batch)
    loss = float(step())  # waits for the device
    return Entrant(step, time.perf_counter() - start, loss)


def measured(case: Case, contestants: Sequence[str], settings: Settings) -> Iterator[Row]:
    """Rows of eager and of contestants that take turns with it, unless they are refused."""
    refused = {} if COMPILED in contestants else _gated(case.network, case.pixels, settings)
    stock = build(case.setup, settings.device)
    batch = batch_of(case.setup, settings.device)
    _enter(EAGER, stock, case, batch)  # libraries are loaded by the first step of all
    entrants = {
        who: _enter(who, stock, case, batch) for who in (EAGER, *contestants) if who not in refused
    }
    loss, reasons = entrants[EAGER].loss, dict(refused)
    for who in [*entrants]:
        off = abs(entrants[who].loss - loss) / abs(loss)
        if not off <= LOSS_OFF:
            reasons[who] = f"refused: the first loss is off by {off:.1%}"
            del entrants[who]
    calls: dict[str, Callable[[], Any]] = {who: entry.step for who, entry in entrants.items()}
    times = timed(calls, settings, 40, 8.0 if settings.device == "cuda" else 30.0)
    for who in (EAGER, *contestants):
        if who not in entrants:
            yield Row(case.label(who), {}, reasons[who])
            continue
        numbers: Numbers = {"images/s": case.batch / times.seconds(who)}
        numbers |= times.over(EAGER, who, "speed over eager")
        numbers["peak MB"] = peak_mb(entrants[who].step, settings)
        yield Row(case.label(who), {**numbers, "s to the first step": entrants[who].first})


def rows(settings: Settings) -> Iterator[Row]:
    begun = time.perf_counter()
    for case in cases(settings):
        yield from measured(case, (OURS, RECOMPUTE), settings)
        _release(settings)
    for case in cases(settings):
        label = case.label(COMPILED)
        if settings.quick:
            yield Row(label, {}, "left out of a quick run: it compiles for seconds")
        elif time.perf_counter() - begun > COMPILE_UNTIL[settings.device]:
            yield Row(label, {}, f"not measured: {COMPILE_UNTIL[settings.device]:.0f} s were over")
        else:
            yield _compiled(case, settings)
            _release(settings)


def _compiled(case: Case, settings: Settings) -> Row:
    """torch.compile, in turns with another eager network, whose row is known already."""
    try:
        return [*measured(case, (COMPILED,), settings)][1]
    except RuntimeError as error:  # of Triton or the host's compiler, which may be missing
        first = str(error).strip().split("\n")[0][:120]
        return Row(case.label(COMPILED), {}, f"not measured: {type(error).__name__}: {first}")


def _release(settings: Settings) -> None:
    torch.compiler.reset()
    if settings.device == "cuda":
        torch.cuda.empty_cache()
