"""Activations: kept, computed again by torch.utils.checkpoint, and computed again by fusedtrain."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as T
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedtrain
from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.gains import (
    COLUMNS,
    Gain,
    columns_of,
    gain_of,
    is_faster,
    numbers_of,
    triple,
)
from benchmarks.experiments.measure import gain_text, timed
from benchmarks.experiments.models import random_batch
from benchmarks.harness.memory import bytes_of_step
from fusedtrain.advisor.bench.clock import Effort

EFFORT = Effort(min_rounds=8, max_rounds=30, seconds=15.0, sample_ns=0.0)
EAGER, CHECKPOINT = "everything kept", "torch.utils.checkpoint"
STORE, RECOMPUTE = "fusedtrain, store", "fusedtrain, recompute"
FORWARD = "forward alone"
COST = ("cost", "cost_low", "cost_high")
ABOUT = (1.15, 1.35)  # of the time of a step is about 20 to 30 % more


@dataclass(frozen=True)
class Size:
    """Sizes of the network and its batch."""

    batch: int
    channels: int
    pixels: int
    blocks: int


SIZES = {"cpu": Size(16, 32, 32, 8), "cuda": Size(256, 64, 56, 12)}
QUICK = Size(2, 8, 8, 2)


class Block(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        result: Tensor = self.relu(out)
        return result


class Checkpointed(nn.Sequential):
    """Keeps the input of each module, and runs the module again in backward."""

    def forward(self, input: Tensor) -> Tensor:
        for module in self:
            input = checkpoint(module, input, use_reentrant=False)
        return input


def size_of(settings: Settings) -> Size:
    return QUICK if settings.quick else SIZES[settings.device]


def network(size: Size, blocks: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    """A stem, residual blocks and a head, in training mode."""
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(3, size.channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(size.channels),
            nn.ReLU(inplace=True),
        ),
        blocks(*(Block(size.channels) for _ in range(size.blocks))),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size.channels, 10)),
    )


def models(settings: Settings) -> dict[str, nn.Module]:
    """Copies of one network."""
    size = size_of(settings)
    torch.manual_seed(settings.seed)
    stock = network(size).to(settings.device)
    checkpointed = network(size, Checkpointed).to(settings.device)
    checkpointed.load_state_dict(stock.state_dict())
    made: dict[str, nn.Module] = {EAGER: stock, CHECKPOINT: checkpointed}
    for who, memory in ((STORE, "store"), (RECOMPUTE, "recompute")):
        made[who] = copy.deepcopy(stock)
        fusedtrain.convert(made[who], memory=memory)
    return made


def batch_of(settings: Settings) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    size = size_of(settings)
    return random_batch(settings, size.batch, size.pixels, more_seed=1)


def step_of(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Forward and backward; the optimizer is the same for all."""

    def step() -> None:
        model.zero_grad()
        T.cross_entropy(model(images), labels).backward()

    return step


def gradient_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """All gradients in one row, computed in float64: no rounding takes a ReLU over its edge."""
    wide = copy.deepcopy(model).double()
    step_of(wide, images.double(), labels)()
    return torch.cat([p.grad.flatten() for p in wide.parameters() if p.grad is not None])


def _runs(settings: Settings) -> Iterator[Run]:
    contestants, (images, labels) = models(settings), batch_of(settings)
    exact = gradient_of(contestants[EAGER], images, labels)
    numbers: dict[str, dict[str, float]] = {}
    for who, model in contestants.items():
        off = (gradient_of(model, images, labels) - exact).norm() / exact.norm()
        peak, kept = bytes_of_step(model, images, labels)
        numbers[who] = {"peak": peak / 1e6, "kept": kept / 1e6, "difference": 1e9 * float(off)}
    calls = {who: step_of(model, images, labels) for who, model in contestants.items()}
    for model in contestants.values():
        model.zero_grad()
    times = timed(
        {**calls, FORWARD: lambda: T.cross_entropy(contestants[EAGER](images), labels)},
        settings,
        EFFORT,
    )
    for who in (*contestants, FORWARD):
        cost = () if who == EAGER else times.gain(who, EAGER)
        ratio = dict(zip(COST, cost))
        if who == RECOMPUTE:
            numbers[who] |= numbers_of(times.gain(CHECKPOINT, who))
        note = NOTES.get(who, "")
        yield Run(who, {"ms": 1e3 * times.seconds(who), **ratio, **numbers.get(who, {})}, note)


def _cost(runs: Mapping[str, Run], label: str) -> Gain | None:
    """Time of a step over that of the eager step."""
    return triple(runs[label], COST) if label in runs and "cost" in runs[label].numbers else None


def _memory(runs: Mapping[str, Run], label: str) -> float | None:
    """Peak of a step over that of the eager step."""
    if not all("peak" in runs[who].numbers for who in (EAGER, label) if who in runs):
        return None
    return runs[label].numbers["peak"] / runs[EAGER].numbers["peak"]


def _judge(runs: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    missing = [who for who in (EAGER, CHECKPOINT, RECOMPUTE, FORWARD) if who not in runs]
    if missing:
        return [Verdict(None, f"Not measured: {', '.join(missing)}.")] * 2
    return [_checkpointing(runs), _recomputing(runs)]


def _checkpointing(runs: Mapping[str, Run]) -> Verdict:
    cost, memory, forward = _cost(runs, CHECKPOINT), _memory(runs, CHECKPOINT), _cost(runs, FORWARD)
    if cost is None or memory is None or forward is None:
        return Verdict(None, "A number lacks.")
    words = f"{memory:.2f}x of the peak for {gain_text(cost)} of the time"
    if memory >= 1:
        return Verdict(
            False, f"{words}: memory is not saved; gradients and one block are the peak."
        )
    if ABOUT[0] <= cost[1] and cost[2] <= ABOUT[1]:
        return Verdict(True, f"{words}.")
    if cost[1] > ABOUT[1] or cost[2] < ABOUT[0]:
        which = "more" if cost[1] > ABOUT[1] else "less"
        return Verdict(
            False,
            f"{words}: {which} than 20 to 30 %, since the forward that runs twice is "
            f"{forward[0]:.2f} of a step in this network.",
        )
    return Verdict(None, f"{words}: the interval is too wide for a claim of 20 to 30 %.")


def _recomputing(runs: Mapping[str, Run]) -> Verdict:
    ours, theirs = _cost(runs, RECOMPUTE), _cost(runs, CHECKPOINT)
    memory, checkpointed = _memory(runs, RECOMPUTE), _memory(runs, CHECKPOINT)
    gain = gain_of(runs, RECOMPUTE)
    if not (ours and theirs and memory and checkpointed and gain):
        return Verdict(None, "A number lacks.")
    words = (
        f"{memory:.2f}x of the peak for {gain_text(ours)} of the time, where checkpointing has "
        f"{checkpointed:.2f}x of the peak for {gain_text(theirs)}; {gain_text(gain)} as fast"
    )
    if memory >= 1:
        return Verdict(False, f"{words}: memory is not saved.")
    faster = is_faster(gain)
    if faster:
        return Verdict(True, f"{words}.")
    if faster is False:
        return Verdict(False, f"{words}: what is computed again costs as much as a forward.")
    return Verdict(None, f"{words}: the interval contains 1.")


def _setup(settings: Settings) -> str:
    size = size_of(settings)
    return (
        f"{size.blocks} residual blocks of {size.channels} channels at {size.pixels} x "
        f"{size.pixels}, batch {size.batch}, float32; forward and backward, each block "
        "checkpointed. Peak: with gradients; kept: by forward; difference: of all gradients, "
        "computed in float64, relative to their norm."
    )


NOTES = {
    CHECKPOINT: "running statistics of batch norms move twice a step",
}
EXPERIMENT = Experiment(
    name="checkpointing",
    title="Recompute activations",
    question="What does it cost to compute activations again instead of keeping them?",
    setup=_setup,
    columns={
        "ms": Column("ms a step"),
        **columns_of("of everything kept", COST),
        **COLUMNS,
        "gain": Column("times as fast as checkpointing", 2),
        "peak": Column("peak MB"),
        "kept": Column("kept MB"),
        "difference": Column("gradient differs, 1e-9", 4),
    },
    claims=(
        Claim(
            "Checkpointing trades memory for about 20 to 30 % more time.",
            "Chen et al. 2016, arXiv:1604.06174: a ResNet of 1000 layers, 30 %",
            {CHECKPOINT: {"cost": 1.30}},
        ),
        Claim(
            "convert(memory='recompute') saves memory for less time than checkpointing.",
            "fusedtrain, docs/memory.md",
        ),
    ),
    runs=_runs,
    judge=_judge,
)
