"""Optimizer states of 8 bits: do they and 24-bit masters train as float32 states and masters do?

Losses are means of the quarters of a training. Parameters of fewer than 4096 elements keep float32
states.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Row, Settings
from benchmarks.experiments.large_batch import accuracy, batches
from benchmarks.experiments.models import (
    DEBIAN,
    RealImages,
    SmallViT,
    cifar_resnet,
    decayed_groups,
    real_images,
)

DIGITS, FASHION = "digits", "Fashion-MNIST"
PIXELS = {DIGITS: 8, FASHION: 12}
RESNET, VIT = "ResNet-18", "ViT"
QUARTERS = 4  # of a training, whose mean losses are the loss curve
FLOAT32 = "float32 states and masters"
WAYS: Mapping[str, Mapping[str, Any]] = {
    FLOAT32: {"state_dtype": torch.float32, "master_weights": True},
    "8-bit states, split24": {"state_dtype": "q8", "master_weights": "split24"},
    "8-bit states, split24, stochastic rounding": {
        "state_dtype": "q8", "master_weights": "split24", "stochastic_rounding": True,
    },
}  # fmt: skip


class Rule(NamedTuple):
    """An optimizer of fusedtrain.optim: the largest rate for each network; decay of weights of two
    dimensions and more."""

    name: str
    rate: Mapping[str, float]
    options: Mapping[str, float]
    decay: float


RULES = (
    Rule("SGD", {RESNET: 0.05, VIT: 0.05}, {"momentum": 0.9}, 5e-4),
    Rule("AdamW", {RESNET: 3e-3, VIT: 2e-3}, {}, 0.05),
    Rule("Lion", {RESNET: 1e-3, VIT: 5e-4}, {}, 0.1),
    Rule("LAMB", {RESNET: 0.02, VIT: 0.02}, {}, 0.01),
)


class Sizes(NamedTuple):
    images: int
    width: int
    epochs: int
    batch: int
    seeds: int
    rules: Sequence[Rule]


def sizes(settings: Settings) -> Sizes:
    return settings.pick(
        Sizes(64, 8, 2, 32, 2, RULES[1:2]),
        Sizes(1_500, 8, 6, 50, 3, RULES),
        Sizes(1_500, 16, 6, 50, 3, RULES),
    )


@lru_cache(maxsize=1)
def _images(name: str, most: int, device: str) -> RealImages:
    return real_images(PIXELS[name], most, device, digits=name == DIGITS)


def _build(network: str, data: RealImages, seed: int, settings: Settings) -> nn.Module:
    """The network with the weights of this seed."""
    torch.manual_seed(seed)
    width, size = sizes(settings).width, data.images.shape[-1]
    if network == RESNET:
        return cifar_resnet("resnet18", data.classes, width).to(settings.device)
    return SmallViT(size, size // 4, 8 * width, 2, data.classes).to(settings.device)


class Outcome(NamedTuple):
    """A training: test accuracy in percent, mean loss of each quarter, and the percentage of the
    parameters whose states are codes."""

    accuracy: float
    losses: Sequence[float]
    coded: float


def train(
    network: str, rule: Rule, way: str, data: RealImages, seed: int, settings: Settings
) -> Outcome:
    """Trains bfloat16 parameters.

    The forward is in float32 with the values of the bfloat16 parameters, the gradients are rounded
    to bfloat16: convolutions in bfloat16 are slow on most CPUs.
    """
    s = sizes(settings)
    model = _build(network, data, seed, settings)
    wide = [*model.parameters()]
    params = [nn.Parameter(p.detach().bfloat16()) for p in wide]
    groups, rate = decayed_groups(params, rule.decay), rule.rate[network]
    make: Callable[..., torch.optim.Optimizer] = getattr(fusedtrain.optim, rule.name)
    optimizer = make(groups, lr=rate, **rule.options, **WAYS[way])
    losses: list[Tensor] = []
    for part in batches(data.images, s.batch, s.epochs, seed, optimizer, rate):
        _copy(params, wide)
        loss = F.cross_entropy(model(data.images[part]), data.labels[part])
        model.zero_grad()
        loss.backward()
        for param, source in zip(params, wide, strict=True):
            assert source.grad is not None
            param.grad = source.grad.bfloat16()
        optimizer.step()
        losses.append(loss.detach())
    _copy(params, wide)
    right = accuracy(model, data.test_images, data.test_labels)
    curve = [float(part.mean()) for part in torch.stack(losses).tensor_split(QUARTERS)]
    state = optimizer.state
    coded = [p.numel() for p, values in state.items() if any("scale" in key for key in values)]
    return Outcome(right, curve, 100 * sum(coded) / sum(p.numel() for p in state))


@torch.no_grad()
def _copy(params: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
    torch._foreach_copy_([*wide], [*params])


def rows(settings: Settings) -> Iterator[Row]:
    s = sizes(settings)
    # Fashion-MNIST where Debian's package is installed.
    for name in [DIGITS, FASHION] if DEBIAN.is_dir() and not settings.quick else [DIGITS]:
        data = _images(name, s.images, settings.device)
        for network in (RESNET, VIT):
            for rule in s.rules:
                for way in WAYS:
                    seeds = range(settings.seed, settings.seed + s.seeds)
                    outcomes = [train(network, rule, way, data, n, settings) for n in seeds]
                    yield Row(f"{name}, {network}, {rule.name}, {way}", _numbers_of(outcomes))


def _numbers_of(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Over seeds: mean, extremes and deviation of the accuracy; of each quarter's loss the
    geometric mean, and the deviation of its logarithm as percent."""
    accuracies = [outcome.accuracy for outcome in outcomes]
    numbers = {
        "8-bit states, % of parameters": outcomes[0].coded,
        "accuracy, %": statistics.mean(accuracies),
        "worst seed": min(accuracies),
        "best seed": max(accuracies),
        "deviation over seeds": statistics.stdev(accuracies),
    }
    for quarter in range(QUARTERS):
        logarithms = [math.log(max(outcome.losses[quarter], 1e-9)) for outcome in outcomes]
        numbers[f"loss, quarter {quarter + 1}"] = math.exp(statistics.mean(logarithms))
        numbers[f"deviation of loss {quarter + 1}, %"] = 100 * statistics.stdev(logarithms)
    return numbers
