"""Optimizer states of 8 bits and split masters beside float32: loss and accuracy on real images."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.images import DEBIAN, RealImages, digit_images, real_images
from benchmarks.experiments.large_batch import accuracy, batches
from benchmarks.experiments.models import cifar_resnet, decayed_groups, small_vit

DIGITS, FASHION = "digits", "Fashion-MNIST"
PIXELS = {DIGITS: 8, FASHION: 12}
RESNET, VIT = "ResNet-18", "ViT"
QUARTERS = 4  # of a training, whose mean losses are the loss curve
DEVIATIONS = 2.0  # of float32 runs over seeds: the run-to-run spread
# The share of differences beyond the spread if nothing differs but the seeds: a difference of means
# of 3 seeds has a deviation of sqrt(2 / 3) runs; Student's t beyond 2.45 with 4 (3 - 1) degrees.
BY_CHANCE = 0.04

FLOAT32, CODES, RANDOM = (
    "float32 states and masters",
    "8-bit states, split24",
    "8-bit states, split24, stochastic rounding",
)
WAYS: Mapping[str, Mapping[str, Any]] = {
    FLOAT32: {"state_dtype": torch.float32, "master_weights": True},
    CODES: {"state_dtype": "q8", "master_weights": "split24"},
    RANDOM: {"state_dtype": "q8", "master_weights": "split24", "stochastic_rounding": True},
}


@dataclass(frozen=True)
class Rule:
    """An optimizer.

    Args:
        name: of its class in fusedtrain.optim.
        rate: the largest learning rate of the schedule, for each network.
        decay: of weights of two dimensions and more.
        options: further ones.
    """

    name: str
    rate: Mapping[str, float]
    decay: float
    options: Mapping[str, float]

    def make(self, network: str, params: Sequence[nn.Parameter], way: str) -> torch.optim.Optimizer:
        groups = decayed_groups(params, self.decay)
        make: Callable[..., torch.optim.Optimizer] = getattr(fusedtrain.optim, self.name)
        return make(groups, lr=self.rate[network], **self.options, **WAYS[way])


RULES = (
    Rule("SGD", {RESNET: 0.05, VIT: 0.05}, 5e-4, {"momentum": 0.9}),
    Rule("AdamW", {RESNET: 3e-3, VIT: 2e-3}, 0.05, {}),
    Rule("Lion", {RESNET: 1e-3, VIT: 5e-4}, 0.1, {}),
    Rule("LAMB", {RESNET: 0.02, VIT: 0.02}, 0.01, {}),
)


@dataclass(frozen=True)
class Sizes:
    """Sizes for these settings."""

    images: int
    width: int
    epochs: int
    batch: int
    seeds: int
    rules: Sequence[Rule]


def sizes(settings: Settings) -> Sizes:
    if settings.quick:
        return Sizes(images=64, width=8, epochs=2, batch=32, seeds=2, rules=RULES[1:2])
    if settings.device == "cuda":
        return Sizes(images=1_500, width=16, epochs=6, batch=50, seeds=3, rules=RULES)
    return Sizes(images=1_500, width=8, epochs=6, batch=50, seeds=3, rules=RULES)


def data_sets(settings: Settings) -> list[str]:
    """Fashion-MNIST where Debian's package is installed."""
    return [DIGITS, FASHION] if DEBIAN.is_dir() and not settings.quick else [DIGITS]


@lru_cache(maxsize=1)
def _images(name: str, most: int, device: str) -> RealImages:
    return (digit_images if name == DIGITS else real_images)(PIXELS[name], most).to(device)


def build(network: str, data: RealImages, seed: int, settings: Settings) -> nn.Module:
    """The network with the weights of this seed."""
    torch.manual_seed(seed)
    width, size = sizes(settings).width, data.images.shape[-1]
    if network == RESNET:
        model = cifar_resnet("resnet18", data.classes, width)
    else:
        model = small_vit(size, patch=size // 4, width=8 * width, depth=2, classes=data.classes)
    return model.to(settings.device)


@dataclass(frozen=True)
class Outcome:
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
    model = build(network, data, seed, settings)
    wide = [*model.parameters()]
    params = [nn.Parameter(p.detach().bfloat16()) for p in wide]
    optimizer = rule.make(network, params, way)
    losses: list[Tensor] = []
    rate = rule.rate[network]
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
    curve = torch.stack(losses).tensor_split(QUARTERS)
    return Outcome(
        accuracy(model, data.test_images, data.test_labels),
        [float(part.mean()) for part in curve],
        coded_share(optimizer),
    )


@torch.no_grad()
def _copy(params: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
    torch._foreach_copy_([*wide], [*params])


def coded_share(optimizer: torch.optim.Optimizer) -> float:
    """Percentage of the parameters whose states are kept as codes."""
    state = optimizer.state
    coded = [p.numel() for p, values in state.items() if any("scale" in key for key in values)]
    return 100 * sum(coded) / sum(p.numel() for p in state)


def label_of(data: str, network: str, rule: str, way: str) -> str:
    return f"{data}, {network}, {rule}, {way}"


def _runs(settings: Settings) -> Iterator[Run]:
    s = sizes(settings)
    for name in data_sets(settings):
        data = _images(name, s.images, settings.device)
        for network in (RESNET, VIT):
            for rule in s.rules:
                for way in WAYS:
                    seeds = range(settings.seed, settings.seed + s.seeds)
                    outcomes = [train(network, rule, way, data, n, settings) for n in seeds]
                    yield Run(label_of(name, network, rule.name, way), numbers_of(outcomes))


def numbers_of(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Over seeds: mean, extremes and deviation of the accuracy; of each quarter's loss the
    geometric mean, and the deviation of its logarithm as percent."""
    accuracies = [outcome.accuracy for outcome in outcomes]
    numbers = {
        "coded": outcomes[0].coded,
        "accuracy": statistics.mean(accuracies),
        "low": min(accuracies),
        "high": max(accuracies),
        "deviation": statistics.stdev(accuracies),
    }
    for quarter in range(QUARTERS):
        logarithms = [math.log(max(outcome.losses[quarter], 1e-9)) for outcome in outcomes]
        numbers[f"loss{quarter + 1}"] = math.exp(statistics.mean(logarithms))
        numbers[f"loss_deviation{quarter + 1}"] = 100 * statistics.stdev(logarithms)
    return numbers


# --- the verdict ---


@dataclass(frozen=True)
class Group:
    """All rules of a network on a data set, beside float32.

    Args:
        name: data set and network.
        spread: of single float32 runs over seeds, both ways.
        differences: rule -> mean over seeds, minus that of float32.
        unit: of both.
        seeds: of each mean.
    """

    name: str
    spread: float
    differences: Mapping[str, float]
    unit: str
    seeds: int

    @property
    def beyond(self) -> dict[str, float]:
        return {rule: d for rule, d in self.differences.items() if abs(d) > self.spread}

    def words(self) -> str:
        differences = ", ".join(f"{rule} {_signed(d)}" for rule, d in self.differences.items())
        mean = statistics.mean(self.differences.values())
        pairs = self.seeds * len(self.differences)
        error = self.spread / DEVIATIONS * math.sqrt(2 / pairs)
        return (
            f"{self.name}: {differences}, mean {_signed(mean)} +- {error:.2g} {self.unit} "
            f"(spread {self.spread:.2g})"
        )


def _signed(number: float) -> str:
    return f"{round(number, 3) + 0.0:+.2g}"  # -0.0 + 0.0 is 0.0


def _accuracy_difference(run: Run, line: Run) -> float:
    return run.numbers["accuracy"] - line.numbers["accuracy"]


def _loss_difference(quarter: int) -> Callable[[Run, Run], float]:
    key = f"loss{quarter}"
    return lambda run, line: 100 * math.log(run.numbers[key] / line.numbers[key])


@dataclass(frozen=True)
class Measure:
    """A number that is compared.

    Args:
        name: of the number.
        sign: 1 where more is better, -1 where more is worse.
        deviation: key of its deviation over seeds.
        differ: 8-bit run, float32 run -> difference.
        unit: of difference and deviation.
    """

    name: str
    sign: int
    deviation: str
    differ: Callable[[Run, Run], float]
    unit: str


ACCURACY = Measure("accuracy", 1, "deviation", _accuracy_difference, "percentage points")
LOSSES = [
    Measure(f"loss of quarter {n}", -1, f"loss_deviation{n}", _loss_difference(n), "%")
    for n in range(1, QUARTERS + 1)
]


def groups(runs: Mapping[str, Run], way: str, measure: Measure, seeds: int) -> list[Group]:
    """A group for each data set and network of which runs were measured. The deviations of float32
    runs are pooled over the rules: those of a single rule have two degrees of freedom."""
    made = []
    for name in (DIGITS, FASHION):
        for network in (RESNET, VIT):
            pairs = {
                rule.name: (line, run)
                for rule in RULES
                if (line := runs.get(label_of(name, network, rule.name, FLOAT32)))
                and (run := runs.get(label_of(name, network, rule.name, way)))
            }
            if pairs:
                squares = [line.numbers[measure.deviation] ** 2 for line, _ in pairs.values()]
                spread = DEVIATIONS * math.sqrt(statistics.mean(squares))
                differences = {
                    rule: measure.differ(run, line) for rule, (line, run) in pairs.items()
                }
                made.append(Group(f"{name}, {network}", spread, differences, measure.unit, seeds))
    return made


def _judge_measures(
    runs: Mapping[str, Run], way: str, measures: Sequence[Measure], settings: Settings
) -> Verdict:
    """The words have the differences of the last measure, and all that are beyond the spread."""
    seeds = sizes(settings).seeds
    made = {measure: groups(runs, way, measure, seeds) for measure in measures}
    last = measures[-1]
    if not made[last]:
        return Verdict(None, "not all runs were measured")
    differences = "; ".join(group.words() for group in made[last])
    words = f"{last.name}, difference from float32, mean of the seeds: {differences}"
    beyond: dict[str, list[str]] = {"worse": [], "better": []}
    for measure, its_groups in made.items():
        for group in its_groups:
            for rule, d in group.beyond.items():
                kind = "better" if measure.sign * d > 0 else "worse"
                beyond[kind].append(
                    f"{group.name}, {rule}, {measure.name}: {_signed(d)} {measure.unit} of a "
                    f"spread of {group.spread:.2g}"
                )
    for kind, cases in beyond.items():
        if cases:
            words += f". {kind.capitalize()} beyond the spread: {'; '.join(cases)}"
    compared = sum(len(group.differences) for its_groups in made.values() for group in its_groups)
    words += f". Beyond the spread are {sum(map(len, beyond.values()))} of {compared} differences"
    words += f"; {BY_CHANCE * compared:.1f} are expected by chance of the seeds alone"
    return Verdict(not any(beyond.values()), words)


def _judge(runs: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    return [
        _judge_measures(runs, way, measures, settings)
        for way in (CODES, RANDOM)
        for measures in ([ACCURACY], LOSSES)
    ]


def _setup(settings: Settings) -> str:
    s = sizes(settings)
    names = " and ".join(f"{name} of {PIXELS[name]} pixels" for name in data_sets(settings))
    rates = "; ".join(
        f"{rule.name} {rule.rate[RESNET]:g} and {rule.rate[VIT]:g}" for rule in s.rules
    )
    return (
        f"ResNet-18 ({s.width} to {8 * s.width} channels) and a ViT (2 blocks of {8 * s.width} "
        f"channels, 16 tokens) on {s.images} images for training of {names}. {s.epochs} epochs, "
        f"batch {s.batch}, {s.seeds} seeds of weights and order. Parameters and gradients are "
        f"bfloat16, the forward is in float32 with the values of the parameters. Warm-up, then a "
        f"cosine; largest rates, of ResNet and ViT, not tuned: {rates}. Losses are means of the "
        f"quarters of a training, geometric over seeds. The spread is {DEVIATIONS:g} deviations "
        f"over seeds of a float32 run, pooled over the optimizers of a network and data set. +- is "
        f"the standard error of a mean over seeds and optimizers. "
        f"Parameters of fewer than 4096 elements keep float32 states."
    )


def _columns() -> dict[str, Column]:
    columns = {
        "coded": Column("8-bit states, % of parameters", 0),
        "accuracy": Column("accuracy, %", 2),
        "low": Column("worst seed", 1),
        "high": Column("best seed", 1),
        "deviation": Column("deviation over seeds", 2),
    }
    for n in range(1, QUARTERS + 1):
        columns[f"loss{n}"] = Column(f"loss, quarter {n}", 4)
    for n in range(1, QUARTERS + 1):
        columns[f"loss_deviation{n}"] = Column(f"deviation of loss {n}, %", 1)
    return columns


EXPERIMENT = Experiment(
    name="eight_bit_states",
    title="Optimizer states of 8 bits",
    question="Do 8-bit states and 24-bit masters train as float32 states and masters do?",
    setup=_setup,
    columns=_columns(),
    claims=(
        Claim(
            "8-bit states and 24-bit masters do not change the quality of a training.",
            "FlashOptim, CUDA, paper of 2026 (arXiv:2602.23349); no number repeated here",
        ),
        Claim(
            "Loss curves of 8-bit states and split24 masters are within the run-to-run spread of "
            "float32.",
            "fusedtrain; no number",
        ),
        Claim(
            "With stochastic rounding of the 24 bits, accuracy is within the run-to-run spread of "
            "float32.",
            "fusedtrain; no number",
        ),
        Claim(
            "With stochastic rounding of the 24 bits, loss curves are within the run-to-run spread "
            "of float32.",
            "fusedtrain; no number",
        ),
    ),
    runs=_runs,
    judge=_judge,
)
