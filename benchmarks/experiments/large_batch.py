"""Large batches with LARS and LAMB beside SGD: accuracy after equal epochs on real images."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.images import RealImages, real_images
from benchmarks.experiments.models import decayed_groups, small_resnet

FACTORS = (0.25, 1.0, 4.0)  # of each optimizer's rate: the grid
WARM_UP = 0.2  # of all steps
DECAY, MOMENTUM = 5e-4, 0.9
SMALL_RATE = 0.05  # of SGD at the small batch
TOLERATED = 1.0  # percentage points that are no loss of accuracy


@dataclass(frozen=True)
class Sizes:
    """Sizes for these settings."""

    images: int
    pixels: int
    width: int
    epochs: int
    small: int
    large: int
    seeds: int


def sizes(settings: Settings) -> Sizes:
    if settings.quick:
        return Sizes(images=160, pixels=8, width=4, epochs=1, small=32, large=64, seeds=2)
    if settings.device == "cuda":
        return Sizes(images=10_000, pixels=28, width=32, epochs=15, small=64, large=2048, seeds=3)
    return Sizes(images=5_000, pixels=14, width=8, epochs=8, small=32, large=256, seeds=3)


@dataclass(frozen=True)
class Contestant:
    """An optimizer at a batch size.

    Args:
        label: of the run.
        large: whether the batch is the large one.
        rate: the middle of the grid.
        make: groups of parameters and a rate -> optimizer.
    """

    label: str
    large: bool
    rate: float
    make: Callable[..., torch.optim.Optimizer]


def _sgd(groups: object, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM)  # type: ignore[arg-type]


def _lars(groups: object, lr: float) -> torch.optim.Optimizer:
    return fusedtrain.optim.LARS(groups, lr=lr, momentum=MOMENTUM)  # type: ignore[arg-type]


def _lamb(groups: object, lr: float) -> torch.optim.Optimizer:
    return fusedtrain.optim.LAMB(groups, lr=lr)  # type: ignore[arg-type]


LINE, SGD, LARS, LAMB = (
    "SGD, small batch",
    "SGD, large batch",
    "LARS, large batch",
    "LAMB, large batch",
)


def contestants(settings: Settings) -> list[Contestant]:
    """The rates: SGD by the linear scaling rule (Goyal et al. 2017); LARS ten times SGD's, as its
    trust coefficient of 0.001 makes steps small (You et al. 2017 have 10 to 30 of batches of 8K to
    32K); LAMB as You et al. 2019, 0.01 by the order of magnitude."""
    s = sizes(settings)
    scaled = SMALL_RATE * s.large / s.small
    return [
        Contestant(LINE, False, SMALL_RATE, _sgd),
        Contestant(SGD, True, scaled, _sgd),
        Contestant(LARS, True, 10 * scaled, _lars),
        Contestant(LAMB, True, 0.01, _lamb),
    ]


@lru_cache(maxsize=1)
def _images(pixels: int, count: int, device: str) -> tuple[RealImages, int]:
    """Images on the device, and how many of those for training are held out to choose a rate."""
    data = real_images(pixels, most=count)
    return data.to(device), len(data.images) // 10


def rate_at(step: int, steps: int, rate: float) -> float:
    """Linear warm-up, then a cosine to 0."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return rate * (step + 1) / warm
    return rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def batches(
    images: Tensor,
    batch: int,
    epochs: int,
    seed: int,
    optimizer: torch.optim.Optimizer,
    rate: float,
) -> Iterator[Tensor]:
    """Places of the images of each step, whole batches in random order; sets the learning rate."""
    an_epoch, step = len(images) // batch, 0
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator).to(images.device)
        for part in order[: an_epoch * batch].split(batch):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, an_epoch * epochs, rate)
            yield part
            step += 1


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent."""
    model.eval()
    right = 0
    for part, wanted in zip(images.split(1024), labels.split(1024), strict=True):
        right += int((model(part).argmax(1) == wanted).sum())
    model.train()
    return 100 * right / len(labels)


def train(who: Contestant, factor: float, seed: int, settings: Settings) -> tuple[float, float]:
    """Accuracy of held out images, by which the rate is chosen, and of the test, in percent."""
    s = sizes(settings)
    data, held = _images(s.pixels, s.images, settings.device)
    images, labels = data.images[:-held], data.labels[:-held]
    model = small_resnet(replace(settings, seed=seed), s.width, classes=data.classes)
    fusedtrain.convert(model)
    optimizer = who.make(decayed_groups(model.parameters(), DECAY), lr=who.rate * factor)
    batch = min(s.large if who.large else s.small, len(images))
    for part in batches(images, batch, s.epochs, seed, optimizer, who.rate * factor):
        optimizer.zero_grad()
        F.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
    chosen_by = accuracy(model, data.images[-held:], data.labels[-held:])
    return chosen_by, accuracy(model, data.test_images, data.test_labels)


def _runs(settings: Settings) -> Iterator[Run]:
    s = sizes(settings)
    for who in contestants(settings):
        tried = {f: train(who, f, settings.seed, settings) for f in FACTORS}
        best = max(tried, key=lambda factor: tried[factor][0])
        accuracies = [tried[best][1]]
        for seed in range(settings.seed + 1, settings.seed + s.seeds):
            accuracies.append(train(who, best, seed, settings)[1])
        numbers = {
            "batch": float(s.large if who.large else s.small),
            "rate": who.rate * best,
            "accuracy": statistics.mean(accuracies),
            "low": min(accuracies),
            "high": max(accuracies),
        }
        numbers |= {f"seed{n}": value for n, value in enumerate(accuracies)}
        edge = best != FACTORS[len(FACTORS) // 2]
        yield Run(who.label, numbers, f"the best rate is {best:g} of the middle" if edge else "")


def losses_of(run: Run, line: Run) -> list[float]:
    """Percentage points lost against the small batch, of each seed that both have."""
    keys = [key for key in run.numbers if key.startswith("seed") and key in line.numbers]
    return [line.numbers[key] - run.numbers[key] for key in keys]


def _judge(runs: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    return [_judge_one(runs, label, settings) for label in (LARS, LAMB)]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _judge_one(runs: Mapping[str, Run], label: str, settings: Settings) -> Verdict:
    run, line, rival = runs.get(label), runs.get(LINE), runs.get(SGD)
    if run is None or line is None or rival is None:
        return Verdict(None, "not all runs were measured")
    lost, lost_by_sgd = losses_of(run, line), losses_of(rival, line)
    words = (
        f"{run.label}: {run.numbers['accuracy']:.1f} %, {line.label}: "
        f"{line.numbers['accuracy']:.1f} %; percentage points lost, over {len(lost)} seeds: "
        f"{_spread(lost)}, by SGD at the same batch {_spread(lost_by_sgd)}"
    )
    if max(lost_by_sgd) <= TOLERATED:
        words += "; SGD needs no help at this batch"
    elif min(lost_by_sgd) > max(lost):
        words += "; in each seed less than SGD loses"
    elif max(lost_by_sgd) < min(lost):
        words += "; SGD loses less in each seed"
    if max(lost) <= TOLERATED:
        return Verdict(True, words)
    if min(lost) > TOLERATED:
        s = sizes(settings)
        steps = (s.images // s.large * s.epochs, s.images // s.small * s.epochs)
        return Verdict(False, f"{words}; the large batch takes {steps[0]} steps, not {steps[1]}")
    return Verdict(None, f"{words}; the seeds are on both sides of {TOLERATED:g}")


def _setup(settings: Settings) -> str:
    s = sizes(settings)
    rates = ", ".join(f"{who.rate:g} ({who.label})" for who in contestants(settings))
    factors = ", ".join(f"{factor:g}" for factor in FACTORS)
    return (
        f"ResNet-8 ({s.width} to {4 * s.width} channels) after fusedtrain.convert, at most "
        f"{s.images} real images of {s.pixels} pixels (Fashion-MNIST, or scikit-learn's digits). "
        f"{s.epochs} epochs, batches of {s.small} and {s.large}, warm-up over {WARM_UP:.0%} of the "
        f"steps, then a cosine. Each tries {factors} of a rate of {rates}. A tenth of the images "
        f"for training chooses with one seed, {s.seeds} seeds are tested."
    )


def _columns(most_seeds: int) -> dict[str, Column]:
    columns = {
        "batch": Column("batch", 0),
        "rate": Column("learning rate", 4),
        "accuracy": Column("accuracy, %", 1),
        "low": Column("worst seed", 1),
        "high": Column("best seed", 1),
    }
    return columns | {f"seed{n}": Column(f"seed {n}", 1) for n in range(most_seeds)}


EXPERIMENT = Experiment(
    name="large_batch",
    title="Large batches",
    question="Do LARS and LAMB train with a large batch without loss of accuracy, and does SGD?",
    setup=_setup,
    columns=_columns(3),
    claims=(
        Claim(
            "LARS trains with large batches without loss of accuracy (ResNet-50 with batches up to "
            "32K; AlexNet with 8K).",
            "Intel Xeon Phi and GPU clusters, ImageNet, paper of 2017 (arXiv:1708.03888)",
        ),
        Claim(
            "LAMB trains with large batches without loss of accuracy (BERT with batches up to 64K; "
            "ResNet-50 with 32K).",
            "TPUv3 pod, paper of 2019 (arXiv:1904.00962)",
        ),
    ),
    runs=_runs,
    judge=_judge,
)
