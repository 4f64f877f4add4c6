"""Gradients between two steps: zeroed by a memset, dropped, or zeroed within the fused step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.gains import COLUMNS, gain_of, judge, numbers_of
from benchmarks.experiments.measure import timed
from benchmarks.harness.shapes import Shape, count, shapes
from fusedtrain.advisor.bench.clock import Effort

LR, MOMENTUM = 1e-6, 0.9
EFFORT = Effort(min_rounds=8, max_rounds=40, seconds=10.0, sample_ns=5e6)
MANY_SMALL = [(64,), (256,), (16, 16), (3, 3, 8, 8)] * 100
QUICK = {"large": [(64, 3, 7, 7), (64,), (256, 64)], "small": MANY_SMALL[:8]}
MEMSET, NONE, WITHIN = "memset", "None", "zeroed by the step"
TORCH, OURS = "torch SGD", "fusedtrain SGD"
# The optimizer and what becomes of the gradients. torch's loops over the parameters.
WAYS = ((TORCH, MEMSET), (TORCH, NONE), (OURS, MEMSET), (OURS, NONE), (OURS, WITHIN))
LARGE, SMALL = "ResNet-50", "small tensors"


class Layers(torch.autograd.Function):
    """In the place of a network: backward makes a new gradient for each parameter."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *params: Tensor) -> Tensor:
        ctx.gradients = gradients
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(gradient.clone() for gradient in ctx.gradients))


def lists(settings: Settings) -> dict[str, list[Shape]]:
    """Shapes of the parameters by the name of the list."""
    if settings.quick:
        return {LARGE: list(QUICK["large"]), SMALL: list(QUICK["small"])}
    return {LARGE: shapes("resnet50"), SMALL: list(MANY_SMALL)}


def tensors(of: Sequence[Shape], settings: Settings) -> tuple[list[Tensor], list[Tensor]]:
    """Values of the parameters, and the gradients that backward makes."""
    generator = torch.Generator().manual_seed(settings.seed)
    values, gradients = (
        [torch.randn(shape, generator=generator).to(settings.device) for shape in of]
        for _ in range(2)
    )
    return values, gradients


def step_of(
    who: str, way: str, params: Sequence[nn.Parameter], gradients: Sequence[Tensor], lr: float = LR
) -> Callable[[], None]:
    """A training step but for the network: zero, backward, update."""
    options: dict[str, Any] = {"lr": lr, "momentum": MOMENTUM}
    optimizer: torch.optim.Optimizer
    if who == TORCH:
        optimizer = torch.optim.SGD(params, **options)
    else:
        writeback = "zero" if way == WITHIN else "none"
        optimizer = fusedtrain.optim.SGD(params, **options, gradient_writeback=writeback)

    def step() -> None:
        if way == NONE:
            optimizer.zero_grad(set_to_none=True)
        elif way == MEMSET and who == OURS:
            fusedtrain.zero_grad(optimizer, set_to_none=False)
        elif way == MEMSET:
            optimizer.zero_grad(set_to_none=False)
        Layers.apply(gradients, *params).backward()
        optimizer.step()

    return step


def label_of(of: str, who: str, way: str) -> str:
    return f"{of}, {who}: {way}"


def _runs(settings: Settings) -> Iterator[Run]:
    for name, of in lists(settings).items():
        values, gradients = tensors(of, settings)
        calls = {
            label_of(name, who, way): step_of(
                who, way, [nn.Parameter(value.clone()) for value in values], gradients
            )
            for who, way in WAYS
        }
        times = timed(calls, settings, EFFORT)
        for who, way in WAYS:
            label = label_of(name, who, way)
            gain = times.gain(label_of(name, who, MEMSET), label)
            numbers = {"ms": 1e3 * times.seconds(label)}
            yield Run(label, numbers if way == MEMSET else {**numbers, **numbers_of(gain)})
        del calls, values, gradients


def _judge(runs: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    return [
        judge({f"{way} on {of}": gain_of(runs, label_of(of, who, way))}, otherwise)
        for who, way, otherwise in (
            (TORCH, NONE, "memory that is allocated anew costs what the memset costs"),
            (OURS, WITHIN, "the memset was not what the step waited for"),
        )
        for of in (LARGE, SMALL)
    ]


def _setup(settings: Settings) -> str:
    each = "; ".join(
        f"{name}: {len(of)} tensors of {count(of) / 1e6:.2g} million elements together"
        for name, of in lists(settings).items()
    )
    return (
        f"A step is zeroing, a backward pass that makes a new gradient for each parameter, and SGD "
        f"with momentum, float32. {each}. Gains are over the memset with the same optimizer."
    )


EXPERIMENT = Experiment(
    name="zero_grad",
    title="Gradients: zeroed, dropped, or zeroed by the step",
    question="Is it faster to drop gradients than to zero them?",
    setup=_setup,
    columns={"ms": Column("ms a step", 3), **COLUMNS},
    claims=(
        *(
            Claim(
                "zero_grad(set_to_none=True) saves memsets, and backward writes where it would "
                f"have read and added ({of}).",
                "PyTorch performance tuning guide; no number, no device",
            )
            for of in (LARGE, SMALL)
        ),
        *(
            Claim(
                "Gradients that must stay cost less zeroed by the fused step than by a memset "
                f"({of}).",
                "fusedtrain, docs/optimizers.md; no number",
            )
            for of in (LARGE, SMALL)
        ),
    ),
    runs=_runs,
    judge=_judge,
)
