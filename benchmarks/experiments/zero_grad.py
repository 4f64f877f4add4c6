"""Gradients: is it faster to drop them, or to zero them within the fused step, than a memset?

A step is zeroing, a backward pass that makes a new gradient for each parameter, and SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Row, Settings, timed
from benchmarks.harness.shapes import Shape, shapes

SMALL: list[Shape] = [(64,), (256,), (16, 16), (3, 3, 8, 8)] * 100
QUICK: list[Shape] = [(64, 3, 7, 7), (64,), (256, 64)]
MEMSET, NONE, WITHIN = "memset", "None", "zeroed by the step"
TORCH, OURS = "torch SGD", "fusedtrain SGD"
# The optimizer and what becomes of the gradients. torch's loops over the parameters.
WAYS = ((TORCH, MEMSET), (TORCH, NONE), (OURS, MEMSET), (OURS, NONE), (OURS, WITHIN))


class Layers(torch.autograd.Function):
    """In the place of a network: backward makes a new gradient for each parameter."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *params: Tensor) -> Tensor:
        ctx.gradients = gradients
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(gradient.clone() for gradient in ctx.gradients))


def step_of(
    who: str, way: str, params: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> Callable[[], None]:
    """A training step but for the network: zero, backward, update."""
    options: dict[str, Any] = {"lr": 1e-6, "momentum": 0.9}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(params, **options)
    if who == OURS:
        options["gradient_writeback"] = "zero" if way == WITHIN else "none"
        optimizer = fusedtrain.optim.SGD(params, **options)

    def step() -> None:
        if way == MEMSET and who == OURS:
            fusedtrain.zero_grad(optimizer, set_to_none=False)
        elif way != WITHIN:
            optimizer.zero_grad(set_to_none=way == NONE)
        Layers.apply(gradients, *params).backward()
        optimizer.step()

    return step


def rows(settings: Settings) -> Iterator[Row]:
    large = QUICK if settings.quick else shapes("resnet50")
    small = SMALL[:8] if settings.quick else SMALL
    for name, sizes in (("ResNet-50", large), ("small tensors", small)):
        generator = torch.Generator().manual_seed(settings.seed)
        values, gradients = (
            [torch.randn(shape, generator=generator).to(settings.device) for shape in sizes]
            for _ in range(2)
        )
        calls = {
            f"{name}, {who}: {way}": step_of(
                who, way, [nn.Parameter(value.clone()) for value in values], gradients
            )
            for who, way in WAYS
        }
        times = timed(calls, settings, 40, 10.0, 5e6)
        for label, (who, _) in zip(calls, WAYS, strict=True):
            gain = times.over(f"{name}, {who}: {MEMSET}", label)
            yield Row(label, {"ms a step": 1e3 * times.seconds(label), **gain})
