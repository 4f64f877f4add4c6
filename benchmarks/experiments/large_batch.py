"""Large batches: do LARS and LAMB train without loss of accuracy, and does SGD?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import fusedtrain
from benchmarks.experiments.experiment import Row, Settings
from benchmarks.experiments.models import RealImages, decayed_groups, real_images, small_resnet

FACTORS = (0.25, 1.0, 4.0)  # of each optimizer's rate: the grid
WARM_UP = 0.2  # of all steps
DECAY, MOMENTUM = 5e-4, 0.9
SMALL_RATE = 0.05  # of SGD at the small batch


class Sizes(NamedTuple):
    images: int
    pixels: int
    width: int
    epochs: int
    small: int  # batch
    large: int
    seeds: int


def sizes(settings: Settings) -> Sizes:
    return settings.pick(
        Sizes(160, 8, 4, 1, 32, 64, 2),
        Sizes(5_000, 14, 8, 8, 32, 256, 3),
        Sizes(10_000, 28, 32, 15, 64, 2048, 3),
    )


class Contestant(NamedTuple):
    """An optimizer at a batch size; the rate is the middle of the grid."""

    batch: int
    rate: float
    make: Callable[..., Optimizer]


def contestants(s: Sizes) -> dict[str, Contestant]:
    """The rates: SGD by the linear scaling rule (Goyal et al. 2017); LARS ten times SGD's, as its
    trust coefficient of 0.001 makes steps small (You et al. 2017 have 10 to 30 of batches of 8K to
    32K); LAMB as You et al. 2019, 0.01 by the order of magnitude."""
    scaled = SMALL_RATE * s.large / s.small
    sgd = partial(torch.optim.SGD, momentum=MOMENTUM)
    lars = partial(fusedtrain.optim.LARS, momentum=MOMENTUM)
    return {
        "SGD, small batch": Contestant(s.small, SMALL_RATE, sgd),
        "SGD, large batch": Contestant(s.large, scaled, sgd),
        "LARS, large batch": Contestant(s.large, 10 * scaled, lars),
        "LAMB, large batch": Contestant(s.large, 0.01, fusedtrain.optim.LAMB),
    }


@lru_cache(maxsize=1)
def _images(pixels: int, count: int, device: str) -> tuple[RealImages, int]:
    """Images on the device, and how many of those for training are held out to choose a rate."""
    data = real_images(pixels, count, device)
    return data, len(data.images) // 10


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
    parts = zip(images.split(1024), labels.split(1024), strict=True)
    right = sum(int((model(part).argmax(1) == wanted).sum()) for part, wanted in parts)
    model.train()
    return 100 * right / len(labels)


def _train(who: Contestant, factor: float, seed: int, settings: Settings) -> tuple[float, float]:
    """Accuracy of held out images, by which the rate is chosen, and of the test, in percent."""
    s = sizes(settings)
    data, held = _images(s.pixels, s.images, settings.device)
    images, labels = data.images[:-held], data.labels[:-held]
    model = small_resnet(replace(settings, seed=seed), s.width, classes=data.classes)
    fusedtrain.convert(model)
    rate = who.rate * factor
    optimizer = who.make(decayed_groups(model.parameters(), DECAY), lr=rate)
    for part in batches(images, min(who.batch, len(images)), s.epochs, seed, optimizer, rate):
        optimizer.zero_grad()
        F.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
    chosen_by = accuracy(model, data.images[-held:], data.labels[-held:])
    return chosen_by, accuracy(model, data.test_images, data.test_labels)


def rows(settings: Settings) -> Iterator[Row]:
    s = sizes(settings)
    for label, who in contestants(s).items():
        tried = {f: _train(who, f, settings.seed, settings) for f in FACTORS}
        best = max(tried, key=lambda factor: tried[factor][0])
        more_seeds = range(settings.seed + 1, settings.seed + s.seeds)
        accuracies = [tried[best][1], *(_train(who, best, n, settings)[1] for n in more_seeds)]
        numbers = {
            "batch": float(who.batch),
            "learning rate": who.rate * best,
            "accuracy, %": statistics.mean(accuracies),
            **{f"seed {n}": value for n, value in enumerate(accuracies)},
        }
        yield Row(label, numbers, "" if best == 1 else f"the best rate is {best:g} of the middle")
