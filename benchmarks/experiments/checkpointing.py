"""Recompute activations: what does it cost to compute them again instead of keeping them?

Each block is checkpointed; gradients are compared in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedtrain
from benchmarks.experiments.experiment import Numbers, Row, Settings, require, timed
from benchmarks.experiments.models import Block, gradient_of, random_batch
from benchmarks.harness.memory import bytes_of_step, step_of

EAGER, CHECKPOINT, FORWARD = "everything kept", "torch.utils.checkpoint", "forward alone"
STORE, RECOMPUTE = "fusedtrain, store", "fusedtrain, recompute"
SAME = 1e-7  # of the gradient's norm, in float64


class Checkpointed(nn.Sequential):
    """Keeps the input of each module, and runs the module again in backward."""

    def forward(self, input: Tensor) -> Tensor:
        for module in self:
            input = checkpoint(module, input, use_reentrant=False)
        return input


def models(channels: int, blocks: int, settings: Settings) -> dict[str, nn.Module]:
    """Copies of one network: a stem, residual blocks and a head, in training mode."""
    torch.manual_seed(settings.seed)
    stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
    stock = nn.Sequential(
        nn.Sequential(stem, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
        nn.Sequential(*(Block(channels, channels) for _ in range(blocks))),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)),
    ).to(settings.device)
    made = {who: copy.deepcopy(stock) for who in (EAGER, CHECKPOINT, STORE, RECOMPUTE)}
    made[CHECKPOINT][1] = Checkpointed(*made[CHECKPOINT][1])  # type: ignore[misc]
    fusedtrain.convert(made[STORE], memory="store")
    fusedtrain.convert(made[RECOMPUTE], memory="recompute")
    return {**made}


def _gradient_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """All gradients, computed in float64: no rounding takes a ReLU over its edge."""
    wide = copy.deepcopy(model).double()
    step_of(wide, images.double(), labels)()
    return gradient_of(wide)


def rows(settings: Settings) -> Iterator[Row]:
    sizes = settings.pick((2, 8, 8, 2), (16, 32, 32, 8), (256, 64, 56, 12))
    batch, channels, pixels, blocks = sizes
    contestants = models(channels, blocks, settings)
    images, labels = random_batch(settings, batch, pixels, more_seed=1)
    exact = _gradient_of(contestants[EAGER], images, labels)
    numbers: dict[str, Numbers] = {FORWARD: {}}
    for who, model in contestants.items():
        off = (_gradient_of(model, images, labels) - exact).norm() / exact.norm()
        peak, kept = bytes_of_step(model, images, labels)
        numbers[who] = {
            "peak MB": peak / 1e6,
            "kept MB": kept / 1e6,
            "gradient differs, 1e-9": 1e9 * require(f"gradients of {who}", float(off), SAME),
        }
        model.zero_grad()
    calls = {who: step_of(model, images, labels) for who, model in contestants.items()}
    forward = {FORWARD: lambda: F.cross_entropy(contestants[EAGER](images), labels)}
    times = timed({**calls, **forward}, settings, 30, 15.0)
    for who in (*contestants, FORWARD):
        more: Numbers = {} if who == EAGER else {"of everything kept": times.gain(who, EAGER)}
        if who == RECOMPUTE:
            more["times as fast as checkpointing"] = times.gain(CHECKPOINT, who)
        note = "running statistics of batch norms move twice a step" if who == CHECKPOINT else ""
        yield Row(who, {"ms a step": 1e3 * times.seconds(who), **more, **numbers[who]}, note)
