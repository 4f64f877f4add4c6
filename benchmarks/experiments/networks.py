"""Networks at 224 pixels in mixed precision: eager, torch.compile, fusedtrain, recomputation."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.gains import KEYS, columns_of, triple
from benchmarks.experiments.measure import Timed, gain_text, peak_megabytes, timed
from benchmarks.harness.networks import Gate, Setup, batch_of, build, call
from fusedtrain.advisor.bench.clock import Effort
from fusedtrain.advisor.bench.gate import NotTheJob

EAGER, OURS, RECOMPUTE, COMPILED = "eager", "fusedtrain", "fusedtrain, recompute", "torch.compile"
NETWORKS = ("resnet50", "efficientnet_b0", "convnext_tiny")
NAMES = {
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
SURELY = 0.98  # of eager's speed: less may be noise of the machine


@dataclass(frozen=True)
class Case:
    """A network with its input, which the contestants share."""

    network: str
    dtype: str
    batch: int
    pixels: int = 224

    def label(self, who: str) -> str:
        return f"{NAMES[self.network]}, {self.dtype}, {who}"

    @property
    def setup(self) -> Setup:
        return Setup("train", self.network, self.batch, self.pixels)

    @property
    def timed(self) -> Setup:
        """With autocast to 16 bits."""
        return replace(self.setup, dtype=f"{self.dtype} AMP" if self.dtype in HALF else self.dtype)


def cases(settings: Settings) -> list[Case]:
    if settings.quick:
        return [Case("resnet18", "bfloat16" if settings.device == "cuda" else "float32", 4, 32)]
    if settings.device == "cuda":
        return [Case(network, dtype, 128) for network in NETWORKS for dtype in HALF]
    # Without instructions for 16 bits a processor needs 8 times as long for their convolutions.
    return [Case(network, "float32", 4) for network in ("resnet50", "efficientnet_b0")]


def effort(settings: Settings) -> Effort:
    """Effort for a case: all its contestants together."""
    seconds = 8.0 if settings.device == "cuda" else 30.0
    return Effort(min_rounds=8, max_rounds=40, seconds=seconds, sample_ns=0.0)


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


def _gated(stock: nn.Module, case: Case, settings: Settings) -> dict[str, str]:
    """Our contestants that fail the check against the stock network in float64, with the reason."""
    pixels = min(GATE_PIXELS, case.pixels)
    gate = Gate(stock, Setup("train", case.network, 4, pixels), settings.device)
    reasons = {}
    for who in (OURS, RECOMPUTE):
        try:
            gate.check(who, contestant(who, stock))
        except NotTheJob as error:
            reasons[who] = f"refused: {error}"
    return reasons


@dataclass
class Entrant:
    """A contestant after its first step."""

    step: Callable[[], Tensor]
    first: float  # seconds: conversion or compilation, and the step
    loss: float


def _enter(who: str, stock: nn.Module, case: Case, batch: tuple[Tensor, Tensor]) -> Entrant:
    start = time.perf_counter()
    step = call(contestant(who, stock), case.timed, *batch)
    loss = float(step())  # waits for the device
    return Entrant(step, time.perf_counter() - start, loss)


def _numbers(
    who: str, entrant: Entrant, times: Timed, case: Case, settings: Settings
) -> dict[str, float]:
    numbers = {
        "speed": case.batch / times.seconds(who),
        "mb": peak_megabytes(entrant.step, settings),
        "first": entrant.first,
    }
    if who != EAGER:
        numbers |= dict(zip(KEYS, times.gain(EAGER, who), strict=True))
    return numbers


def _wrong_loss(entrant: Entrant, eager: Entrant) -> str:
    off = abs(entrant.loss - eager.loss) / abs(eager.loss)
    return "" if off <= LOSS_OFF else f"refused: the first loss is off by {off:.1%}"


def measured(
    case: Case, contestants: Sequence[str], settings: Settings, refused: Mapping[str, str]
) -> Iterator[Run]:
    """Runs of eager and of contestants that take turns with it.

    Args:
        case: network, dtype and batch.
        contestants: besides eager.
        settings: of the experiment.
        refused: contestants that are not timed, with the reason.
    """
    stock = build(case.setup, settings.device)
    batch = batch_of(case.setup, settings.device)
    _enter(EAGER, stock, case, batch)  # libraries are loaded by the first step of all
    entrants = {
        who: _enter(who, stock, case, batch) for who in (EAGER, *contestants) if who not in refused
    }
    eager, reasons = entrants[EAGER], dict(refused)
    for who in [*entrants]:
        if reason := _wrong_loss(entrants[who], eager):
            reasons[who] = reason
            del entrants[who]
    calls: dict[str, Callable[[], Any]] = {who: entry.step for who, entry in entrants.items()}
    times = timed(calls, settings, effort(settings))
    for who in (EAGER, *contestants):
        if who in entrants:
            numbers = _numbers(who, entrants[who], times, case, settings)
            yield Run(case.label(who), numbers)
        else:
            yield Run(case.label(who), {}, reasons[who])


def _runs(settings: Settings) -> Iterator[Run]:
    begun = time.perf_counter()
    checked: dict[str, dict[str, str]] = {}
    for case in cases(settings):
        if case.network not in checked:
            stock = build(case.setup, settings.device)
            checked[case.network] = _gated(stock, case, settings)
            del stock
        yield from measured(case, (OURS, RECOMPUTE), settings, checked[case.network])
        _release(settings)
    for case in cases(settings):
        label = case.label(COMPILED)
        if settings.quick:
            yield Run(label, {}, "left out of a quick run: it compiles for seconds")
        elif time.perf_counter() - begun > COMPILE_UNTIL[settings.device]:
            yield Run(label, {}, f"not measured: {COMPILE_UNTIL[settings.device]:.0f} s were over")
        else:
            yield _compiled(case, settings)
            _release(settings)


def _compiled(case: Case, settings: Settings) -> Run:
    """torch.compile, in turns with another eager network: that one's run is known already."""
    try:
        runs = {run.label: run for run in measured(case, (COMPILED,), settings, {})}
    except RuntimeError as error:  # of Triton or the host's compiler, which may be missing
        first = str(error).strip().split("\n")[0][:120]
        return Run(case.label(COMPILED), {}, f"not measured: {type(error).__name__}: {first}")
    return runs[case.label(COMPILED)]


def _release(settings: Settings) -> None:
    torch.compiler.reset()
    if settings.device == "cuda":
        torch.cuda.empty_cache()


# --- verdicts ---


def _of(runs: Mapping[str, Run], settings: Settings, who: str) -> dict[str, tuple[Run, Run]]:
    """Network and dtype -> eager's run and this contestant's, where both were measured."""
    pairs = {}
    for case in cases(settings):
        eager, run = runs.get(case.label(EAGER)), runs.get(case.label(who))
        if eager is not None and run is not None and eager.numbers and run.numbers:
            pairs[f"{NAMES[case.network]} {case.dtype}"] = eager, run
    return pairs


def _refusals(runs: Mapping[str, Run], settings: Settings, who: str) -> list[str]:
    labels = [case.label(who) for case in cases(settings)]
    return [
        f"{label} {runs[label].note}"
        for label in labels
        if label in runs and runs[label].note.startswith("refused")
    ]


def _judge_speed(runs: Mapping[str, Run], settings: Settings, who: str) -> Verdict:
    refusals = _refusals(runs, settings, who)
    if refusals:
        return Verdict(False, "; ".join(refusals))
    pairs = _of(runs, settings, who)
    gains = {name: triple(run) for name, (_, run) in pairs.items()}
    if not gains:
        return Verdict(None, "nothing was measured")
    words = "; ".join(f"{name}: {gain_text(gain)}" for name, gain in gains.items())
    slower = [name for name, (_, _, high) in gains.items() if high < SURELY]
    if slower:
        return Verdict(False, f"{words}. Slower: {', '.join(slower)}")
    unsure = [name for name, (_, low, _) in gains.items() if low < SURELY]
    if unsure:
        return Verdict(None, f"{words}. Below {SURELY:g} within the interval: {', '.join(unsure)}")
    return Verdict(True, words)


def _judge_memory(runs: Mapping[str, Run], settings: Settings, who: str) -> Verdict:
    pairs = _of(runs, settings, who)
    if not pairs:
        return Verdict(None, "nothing was measured")
    ratios = {name: run.numbers["mb"] / eager.numbers["mb"] for name, (eager, run) in pairs.items()}
    words = "; ".join(
        f"{name}: {run.numbers['mb']:,.0f} MB of eager's {eager.numbers['mb']:,.0f} "
        f"({ratios[name]:.2f}x)"
        for name, (eager, run) in pairs.items()
    )
    fails = [name for name, ratio in ratios.items() if ratio >= 0.99]
    if fails:
        return Verdict(False, f"{words}. No saving: {', '.join(fails)}")
    return Verdict(True, words)


def _judge(runs: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    return [
        _judge_speed(runs, settings, OURS),
        _judge_memory(runs, settings, OURS),
        _judge_memory(runs, settings, RECOMPUTE),
    ]


def _setup(settings: Settings) -> str:
    listed = "; ".join(
        f"{NAMES[case.network]}: batch {case.batch}, {case.pixels} pixels, {case.dtype}"
        for case in cases(settings)
    )
    return (
        "A training step of torchvision's networks, 16 bits by autocast, channels_last, "
        f"torch's SGD with momentum. {listed}. Speeds are over eager's, in turns with it. MB: at "
        "most allocated by a step, beyond weights and states. First step: with conversion or "
        "compilation."
    )


EXPERIMENT = Experiment(
    name="networks",
    title="Networks at 224 pixels",
    question="What does fusedtrain give whole networks of the usual size, beside torch.compile?",
    setup=_setup,
    columns={
        "speed": Column("images/s", 1),
        **columns_of("speed over eager"),
        "mb": Column("peak MB", 0),
        "first": Column("s to the first step", 1),
    },
    claims=(
        Claim("convert is never slower than eager torch.", "fusedtrain; no number"),
        Claim("convert saves memory in training.", "fusedtrain; no number"),
        Claim('convert with memory="recompute" saves memory in training.', "fusedtrain; no number"),
    ),
    runs=_runs,
    judge=_judge,
)
