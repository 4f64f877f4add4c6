"""Gradient accumulation: the gradient of a large batch from micro-batches, its memory and time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.gains import columns_of, triple
from benchmarks.experiments.measure import gain_text, peak_megabytes, timed
from benchmarks.experiments.models import random_batch, small_resnet
from fusedtrain.advisor.bench.clock import Effort

MICRO = (1, 4, 16)  # micro-batches a batch
EFFORT = Effort(min_rounds=8, max_rounds=20, seconds=40.0, sample_ns=0.0)
TORCH, OURS = "torch SGD", "fusedtrain SGD"
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    TORCH: torch.optim.SGD,
    OURS: fusedtrain.optim.SGD,
}
LR, MOMENTUM = 1e-3, 0.9
SAME = 1e-9  # of the gradient's norm, in float64: sums in another order differ by about 1e-15
MEMORY = 1.05  # times a micro-batch's memory and the gradients' is still that: sizes are rounded
RATIO = ("ratio", "low", "high")
ALONE = "one micro-batch alone"


class Sizes(NamedTuple):
    """Sizes for these settings."""

    batch: int
    pixels: int
    width: int
    epoch: int  # batches


def sizes(settings: Settings) -> Sizes:
    if settings.quick:
        return Sizes(batch=32, pixels=8, width=8, epoch=1)
    if settings.device == "cuda":
        return Sizes(batch=1024, pixels=32, width=64, epoch=8)
    return Sizes(batch=128, pixels=32, width=16, epoch=2)


def accumulate(model: nn.Module, images: Tensor, labels: Tensor, micro: int) -> None:
    """Adds the gradient of the mean loss over the batch to the parameters' gradients."""
    for part, wanted in zip(images.chunk(micro), labels.chunk(micro), strict=True):
        (F.cross_entropy(model(part), wanted) * (len(part) / len(images))).backward()


def gradient(
    model: nn.Module, images: Tensor, labels: Tensor, micro: int, *, frozen: bool
) -> Tensor:
    """All gradients in a row, in float64.

    Args:
        model: stays as it is.
        images, labels: the batch.
        micro: number of micro-batches.
        frozen: batch norms use their running statistics, so that no sample sees another.
    """
    network = copy.deepcopy(model).double().train()
    for module in network.modules():
        if frozen and isinstance(module, nn.BatchNorm2d):
            module.eval()
    accumulate(network, images.double(), labels, micro)
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def difference(model: nn.Module, settings: Settings, micro: int, *, frozen: bool) -> float:
    """Norm of the difference from the whole batch's gradient, relative to that gradient's norm."""
    batch = random_batch(settings, *sizes(settings)[:2])
    # 128 images are enough: float64 is slow on many GPUs.
    images, labels = (part[:128] for part in batch)
    whole = gradient(model, images, labels, 1, frozen=frozen)
    parts = gradient(model, images, labels, micro, frozen=frozen)
    return float((parts - whole).norm() / whole.norm())


def label_of(micro: int, who: str) -> str:
    batches = "the whole batch" if micro == 1 else f"{micro} micro-batches"
    return f"{batches}, {who}"


def _alone(micro: int) -> str:
    return f"{ALONE} (1/{micro} of the batch)"


def _epoch(model: nn.Module, who: str, micro: int, settings: Settings) -> Callable[[], None]:
    """An epoch; the first call makes the states of the optimizer."""
    optimizer = OPTIMIZERS[who](model.parameters(), lr=LR, momentum=MOMENTUM)
    images, labels = random_batch(settings, *sizes(settings)[:2])

    def epoch() -> None:
        for _ in range(sizes(settings).epoch):
            optimizer.zero_grad()
            accumulate(model, images, labels, micro)
            optimizer.step()
        optimizer.zero_grad()  # the memory of the next epoch is measured without them

    return epoch


def _peak_alone(model: nn.Module, micro: int, settings: Settings) -> float:
    """MB of one micro-batch's forward and backward."""
    batch = random_batch(settings, *sizes(settings)[:2])
    images, labels = (part.chunk(micro)[0] for part in batch)

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        model.zero_grad()

    step()
    return peak_megabytes(step, settings)


def _runs(settings: Settings) -> Iterator[Run]:
    model = small_resnet(settings, sizes(settings).width)
    gradients = sum(4 * p.numel() for p in model.parameters()) / 1e6
    for micro in MICRO[1:]:
        peak = _peak_alone(copy.deepcopy(model), micro, settings)
        yield Run(_alone(micro), {"mb": peak, "gradients": gradients}, "forward and backward")
    epochs = {
        label_of(micro, who): _epoch(copy.deepcopy(model), who, micro, settings)
        for who in OPTIMIZERS
        for micro in MICRO
    }
    times = timed(epochs, settings, EFFORT)
    for who in OPTIMIZERS:
        for micro in MICRO:
            label = label_of(micro, who)
            numbers = {
                "s": times.seconds(label),
                "mb": peak_megabytes(epochs[label], settings),
            }
            if micro > 1:
                gain = times.gain(label, label_of(1, who))
                numbers |= dict(zip(RATIO, gain, strict=True))
                for key, frozen in (("frozen", True), ("norm", False)):
                    numbers[key] = 100 * difference(model, settings, micro, frozen=frozen)
            yield Run(label, numbers)


def _judge(runs: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    micros = [
        run
        for micro in MICRO[1:]
        for who in OPTIMIZERS
        if (run := runs.get(label_of(micro, who))) is not None
    ]
    if not micros:
        return [Verdict(None, "nothing was measured")] * 2
    return [_judge_gradient(micros), _judge_memory(runs)]


def _judge_gradient(micros: Sequence[Run]) -> Verdict:
    frozen = max(run.numbers["frozen"] for run in micros) / 100
    norm = max(run.numbers["norm"] for run in micros) / 100
    words = (
        f"with frozen batch norms the gradients differ by at most {frozen:.0e} of the norm in "
        f"float64; batch norms in training see micro-batches, and the gradient is another one, off "
        f"by up to {norm:.0%} of the norm"
    )
    return Verdict(frozen < SAME < norm, words)


def _judge_memory(runs: Mapping[str, Run]) -> Verdict:
    ratios, words = [], []
    for micro in MICRO[1:]:
        for who in OPTIMIZERS:
            run, small = runs.get(label_of(micro, who)), runs.get(_alone(micro))
            whole = runs.get(label_of(1, who))
            if run is None or small is None or whole is None:
                continue
            mb = run.numbers["mb"]
            ratios.append(mb / (small.numbers["mb"] + small.numbers["gradients"]))
            words.append(
                f"{run.label}: {mb:.2f} MB (a micro-batch alone {small.numbers['mb']:.2f}, the "
                f"gradients {small.numbers['gradients']:.2f}, the whole batch "
                f"{whole.numbers['mb']:.2f}), time {gain_text(triple(run, RATIO))} of the whole "
                "batch's"
            )
    if not ratios:
        return Verdict(None, "nothing was measured")
    reason = f"; up to {max(ratios):.2f}x of the two together"
    holds = max(ratios) <= MEMORY
    return Verdict(holds, "; ".join(words) + ("" if holds else reason))


def _setup(settings: Settings) -> str:
    batch, pixels, width, epoch = sizes(settings)
    return (
        f"ResNet-8 ({width} to {4 * width} channels), {epoch * batch} random images of {pixels} "
        f"pixels an epoch, a step for each {batch} images, float32, SGD with momentum. MB: at most "
        f"allocated beyond weights and states. Gradients are compared in float64 with the "
        f"gradient of the whole batch ({min(batch, 128)} images), as percent of its norm."
    )


EXPERIMENT = Experiment(
    name="accumulation",
    title="Gradient accumulation",
    question="Does accumulation give the large batch's gradient in the small batch's memory, and "
    "what does it cost?",
    setup=_setup,
    columns={
        "s": Column("s an epoch", 3),
        **columns_of("time, of the whole batch", RATIO),
        "mb": Column("peak MB", 2),
        "gradients": Column("MB of gradients", 2),
        "frozen": Column("gradient off by %, frozen batch norm", 4),
        "norm": Column("gradient off by %, batch norm", 4),
    },
    claims=(
        Claim(
            "The gradient accumulated over micro-batches is that of the whole batch, unless layers "
            "such as batch norm mix the samples.",
            "guides to training; no number, no device",
        ),
        Claim(
            "Accumulation needs the memory of one micro-batch, and of the gradients.",
            "guides to training; no number, no device",
        ),
    ),
    runs=_runs,
    judge=_judge,
)
