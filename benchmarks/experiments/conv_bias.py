"""The bias of a convolution in front of a batch norm: with it, without it, and dropped later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.gains import COLUMNS, gain_of, judge, numbers_of
from benchmarks.experiments.measure import peak_megabytes, timed
from fusedtrain.advisor.bench.clock import Effort

EFFORT = Effort(min_rounds=8, max_rounds=40, seconds=15.0, sample_ns=2e7)
BIAS, NO_BIAS, DROPPED = "with bias", "without bias", "fusedtrain.drop_redundant_bias"
USELESS = 10.0  # ppm that rounding in float32 may change; a bias of 1 that counted is 1e6


@dataclass(frozen=True)
class Size:
    """Sizes of the network and its batch."""

    batch: int
    channels: int
    pixels: int
    layers: int


# Few channels on large images: there the bias is most of what a convolution does besides.
SIZES = {"cpu": Size(16, 16, 64, 6), "cuda": Size(256, 64, 112, 8)}
QUICK = Size(2, 8, 8, 2)


def size_of(settings: Settings) -> Size:
    return QUICK if settings.quick else SIZES[settings.device]


def network(size: Size, *, bias: bool) -> nn.Sequential:
    """Convolution, batch norm and ReLU, repeated; a bias is as large as the activations."""
    parts: list[nn.Module] = []
    for layer in range(size.layers):
        conv = nn.Conv2d(size.channels if layer else 3, size.channels, 3, padding=1, bias=bias)
        if conv.bias is not None:
            nn.init.normal_(conv.bias)
        parts += [conv, nn.BatchNorm2d(size.channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)


def models(settings: Settings) -> dict[str, nn.Sequential]:
    """Networks of the same weights."""
    size = size_of(settings)
    torch.manual_seed(settings.seed)
    made = {BIAS: network(size, bias=True)}
    state = made[BIAS].state_dict()
    for who in (NO_BIAS, DROPPED):
        made[who] = network(size, bias=who == DROPPED)
        # The bias is an unexpected key for a convolution without one.
        made[who].load_state_dict(state, strict=who == DROPPED)
    for model in made.values():
        model.to(settings.device)
    report = fusedtrain.drop_redundant_bias(made[DROPPED])
    assert len(report) == size.layers
    return made


def images_of(settings: Settings) -> Tensor:
    """The input."""
    size, generator = size_of(settings), torch.Generator().manual_seed(settings.seed + 1)
    shape = (size.batch, 3, size.pixels, size.pixels)
    return torch.randn(shape, generator=generator).to(settings.device)


def step_of(model: nn.Module, images: Tensor) -> Callable[[], None]:
    """Forward, backward and SGD."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    return step


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """Without TF32, whose 10 bits make more of a rounding than the bias does."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@torch.no_grad()
def difference(model: nn.Module, other: nn.Module, images: Tensor) -> float:
    """Difference of the outputs in training, in ppm of their norm."""
    with exact_convolutions():
        output, expected = model(images).double(), other(images).double()
    return 1e6 * float((output - expected).norm() / expected.norm())


def bias_gradient(model: nn.Sequential, images: Tensor) -> float:
    """Norm of the gradients of biases over that of the weights before norms, in ppm."""
    with exact_convolutions():
        step_of(model, images)()
    convs: list[Any] = [module for module in model if isinstance(module, nn.Conv2d)]
    biases, weights = (
        torch.cat([getattr(conv, name).grad.flatten() for conv in convs]).norm()
        for name in ("bias", "weight")
    )
    return 1e6 * float(biases / weights)


def _runs(settings: Settings) -> Iterator[Run]:
    contestants, images = models(settings), images_of(settings)
    numbers: dict[str, dict[str, float]] = {who: {} for who in contestants}
    for who in (NO_BIAS, DROPPED):
        numbers[who]["difference"] = difference(contestants[who], contestants[BIAS], images)
    numbers[BIAS]["gradient"] = bias_gradient(contestants[BIAS], images)
    calls = {who: step_of(model, images) for who, model in contestants.items()}
    for who, call in calls.items():
        contestants[who].zero_grad()
        numbers[who]["peak"] = peak_megabytes(call, settings)
    times = timed(calls, settings, EFFORT)
    for who in contestants:
        gain = {} if who == BIAS else numbers_of(times.gain(BIAS, who))
        yield Run(who, {"ms": 1e3 * times.seconds(who), **gain, **numbers[who]})


def _judge(runs: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    gains = {who: gain_of(runs, who) for who in (NO_BIAS, DROPPED)}
    return [
        _useless(runs),
        *(judge({who: gain}, OTHERWISE[settings.device]) for who, gain in gains.items()),
    ]


def _useless(runs: Mapping[str, Run]) -> Verdict:
    off = {
        who: run.numbers["difference"] for who, run in runs.items() if "difference" in run.numbers
    }
    if not off or BIAS not in runs:
        return Verdict(None, "Outputs were not compared.")
    words = ", ".join(f"{who}: {ppm:.2g} ppm" for who, ppm in off.items())
    gradient = runs[BIAS].numbers.get("gradient", float("nan"))
    words = (
        f"Outputs differ by: {words}; the gradient of the biases is {gradient:.2g} ppm of that of "
        "the weights"
    )
    if max(off.values()) < USELESS:
        return Verdict(True, f"{words}: rounding.")
    return Verdict(False, f"{words}: more than rounding in float32.")


def _setup(settings: Settings) -> str:
    size = size_of(settings)
    return (
        f"{size.layers} times convolution 3 x 3 of {size.channels} channels, batch norm, ReLU at "
        f"{size.pixels} x {size.pixels}, batch {size.batch}, float32; forward, backward and SGD. "
        "Biases are N(0, 1)."
    )


OTHERWISE = {
    "cpu": "the CPU's convolution adds the bias as it writes its output, and sums its gradient as "
    "it reads the gradient for the weight",
    "cuda": "the bias is added and its gradient is summed in a time that does not show",
}
GUIDE = "PyTorch performance tuning guide; no number, no device"
EXPERIMENT = Experiment(
    name="conv_bias",
    title="The bias before a batch norm",
    question="What does a convolution's bias cost in front of a batch norm?",
    setup=_setup,
    columns={
        "ms": Column("ms a step", 2),
        **COLUMNS,
        "peak": Column("peak MB"),
        "difference": Column("output differs, ppm", 2),
        "gradient": Column("bias gradient, ppm", 2),
    },
    claims=(
        Claim("A convolution's bias is useless before a batch norm.", GUIDE),
        Claim("Without the bias a step is faster.", GUIDE),
        Claim(
            "drop_redundant_bias makes a step faster and leaves its numbers.",
            "fusedtrain, docs/folding.md",
        ),
    ),
    runs=_runs,
    judge=_judge,
)
