"""The bias before a batch norm: what does a convolution's bias cost there?

Few channels on large images: there the bias is most of what a convolution does besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Numbers, Row, Settings, peak_mb, require, timed
from benchmarks.experiments.models import random_batch

BIAS, NO_BIAS, DROPPED = "with bias", "without bias", "fusedtrain.drop_redundant_bias"
USELESS = 10.0  # ppm that rounding in float32 may change; a bias of 1 that counted is 1e6


def _network(channels: int, layers: int, *, bias: bool) -> nn.Sequential:
    """Convolution, batch norm and ReLU, repeated; a bias is as large as the activations."""
    parts: list[nn.Module] = []
    for layer in range(layers):
        conv = nn.Conv2d(channels if layer else 3, channels, 3, padding=1, bias=bias)
        if conv.bias is not None:
            nn.init.normal_(conv.bias)
        parts += [conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)


def models(channels: int, layers: int, settings: Settings) -> dict[str, nn.Sequential]:
    """Networks of the same weights."""
    torch.manual_seed(settings.seed)
    made = {
        who: _network(channels, layers, bias=who != NO_BIAS) for who in (BIAS, NO_BIAS, DROPPED)
    }
    for who in (NO_BIAS, DROPPED):
        # The bias is an unexpected key for a convolution without one.
        made[who].load_state_dict(made[BIAS].state_dict(), strict=who == DROPPED)
    assert len(fusedtrain.drop_redundant_bias(made[DROPPED])) == layers
    return {who: model.to(settings.device) for who, model in made.items()}


def _step_of(model: nn.Module, images: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    return step


def _bias_gradient(model: nn.Sequential, images: Tensor) -> float:
    """Norm of the gradients of biases over that of the weights before norms, in ppm."""
    _step_of(model, images)()
    convs: list[Any] = [module for module in model if isinstance(module, nn.Conv2d)]
    biases, weights = (
        torch.cat([getattr(conv, name).grad.flatten() for conv in convs]).norm()
        for name in ("bias", "weight")
    )
    return 1e6 * float(biases / weights)


def rows(settings: Settings) -> Iterator[Row]:
    batch, channels, pixels, layers = settings.pick(
        (2, 8, 8, 2), (16, 16, 64, 6), (256, 64, 112, 8)
    )
    contestants = models(channels, layers, settings)
    images, _ = random_batch(settings, batch, pixels, more_seed=1)
    numbers: dict[str, Numbers] = {who: {} for who in contestants}
    # Without TF32, whose 10 bits make more of a rounding than the bias does.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        with torch.no_grad():
            outputs = {who: model(images).double() for who, model in contestants.items()}
        for who in (NO_BIAS, DROPPED):
            ppm = 1e6 * float((outputs[who] - outputs[BIAS]).norm() / outputs[BIAS].norm())
            numbers[who]["output differs, ppm"] = require(f"output {who}, ppm", ppm, USELESS)
        numbers[BIAS]["bias gradient, ppm"] = _bias_gradient(contestants[BIAS], images)
    calls = {who: _step_of(model, images) for who, model in contestants.items()}
    for who, call in calls.items():
        contestants[who].zero_grad()
        numbers[who]["peak MB"] = peak_mb(call, settings)
    times = timed(calls, settings, 40, 15.0, 2e7)
    for who in contestants:
        more = times.over(BIAS, who) | numbers[who]
        yield Row(who, {"ms a step": 1e3 * times.seconds(who), **more})
