"""Definition of "the fused run follows the eager one", in numbers.

Two runs that differ in the last bit of one activation part ways: training is chaotic, and in bf16
the loss curve does not tell a gradient that is 5 % off from honest rounding. So the precise test
is made before training, on float32 gradients from equal weights; the loss curves are then held to
what honest rounding does to them. The optimizers are compared apart from all that: three steps from
equal weights on equal gradients, of alternating sign and size, at the peak learning rate.

The limits come from these measurements (digits, batches of 64, torch 2.13 on a CPU, 1 to 4 seeds,
widths 8 to 32, learning rate 0.05). "Honest" multiplies the output of every activation by 1 +- one
unit in the last place at random, which is more than a correct kernel does; the others scale the
gradient of every activation or of one (the first, the middle or the last).

| quantity                              | honest              | 5 % off           | sign flipped |
|---------------------------------------|---------------------|-------------------|--------------|
| float32 gradient, worst weight tensor | 0.00002 ... 0.005,  | 0.05 (one) ... 1  | 2            |
|                                       | ResNet-50 ... 0.027 |                   |              |
| bf16 gradient, median slope from 1    | 0.04 ... 0.2        | 0.39 (all)        | 1            |
| loss, first 10 steps, ResNet-18, bf16 | 0.03 ... 0.09       | 0.02 ... 0.1      | 0.2 ... 0.3  |
| loss, first 10 steps, float32 or fp16 | 0.02 ... 0.05       |                   |              |
| loss, last steps, ResNet-18, bf16     | 0.03 ... 0.08       | 0.05 ... 0.1      | 1.9          |
| accuracy after 30 to 40 steps         | 0.01 ... 0.07       | 0.01 ... 0.02     | 0.6          |

Rounding hurts some nets more: in bf16 at the start, ResNet-50's gradient is mostly noise. How far
AMP eager is from fp32 eager shows that in the same run, so twice this distance is granted on top.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from _train.modes import Mode
from _train.optimizers import Settings

GRADIENT_ERROR = 0.04
SLOPE_ERROR = 0.2
UPDATE_ERROR = 0.001
# Limits for three steps with rounded states, by --optimizer-state and optimizer ("": all others).
# Measured at the default learning rates with clipping to 1 and averages (ResNet-18, ResNet-50 and
# EfficientNet-B0, widths 8 to 16, gradients of 16 digits). bf16: up to 0.0022. q8 rounds a momentum
# m to within (s + |m|)^2 / (250 s), where s is the largest of its group of 32: up to 0.0048. The
# root of an average of squares is rounded to within 1/255 of its group's largest, and small
# gradients are divided by small roots: up to 0.016 of Adagrad and RMSprop, 0.046 of Adam, AdamW and
# NAdamW, 0.067 of LAMB. Lion's sign turns where the momentum is nearly zero: up to 0.044. Without
# momentum the error is 0.55 to 0.8 (of Lion three steps do not show it), at a learning rate of 1.1
# times the right one 0.1. A turned sign gives 2.
_SQUARES_Q8 = dict.fromkeys(("adam", "adamw", "nadamw", "lion"), 0.1)
UPDATE_ERRORS = {
    "bf16": {"": 0.006},
    "q8": {"": 0.015, "adagrad": 0.04, "rmsprop": 0.04, **_SQUARES_Q8, "lamb": 0.15},
}
WEIGHT_ULPS = 4  # of three steps, each of which rounds the weight
# Weights in two parts are less precise than float32 ones (docs/optimizers.md).
SPLIT_ULP = {
    ("split24", torch.bfloat16): 2.0**-16,
    ("split24", torch.float16): 2.0**-18,
    ("split32", torch.float16): 2.0**-23,
}
HEAD_STEPS = 10
HEAD_LOSS = {None: 0.1, torch.float16: 0.1, torch.bfloat16: 0.15}
# A shorter run has no end: its losses and accuracies still swing from step to step.
STEPS_WITH_AN_END = 40
END_LOSS = (0.15, 0.25)  # absolute, and as a part of the eager loss
END_ACCURACY = 0.05  # beside twice the standard error of a difference on so many images
GRANTED = 2.0  # times the distance of AMP eager from fp32 eager, but not without end: where
GRANTED_AT_MOST = 0.5  # AMP eager itself tumbles, an open limit would say nothing

Gradients = dict[str, Tensor]


class Run(Protocol):
    """A training run and its place in a comparison: a Mode, or what another process reports."""

    @property
    def name(self) -> str: ...
    @property
    def reference(self) -> str | None: ...
    @property
    def fused(self) -> bool: ...
    @property
    def dtype(self) -> torch.dtype | None: ...
    @property
    def losses(self) -> list[float]: ...
    @property
    def accuracy(self) -> float: ...


@dataclass
class Check:
    name: str
    value: float
    limit: float
    mode: str = ""  # of which this is a check; empty: of all

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # NaN fails


def compare_gradients(ours: Gradients, theirs: Gradients) -> Check:
    """In float32: the relative error of the worst weight tensor.

    Biases stay out: in front of a batch norm their true gradient is zero, and all is rounding.
    """
    _same_names(ours, theirs)
    errors = (
        _ratio((ours[k] - theirs[k]).norm(), theirs[k].norm()) for k in theirs if theirs[k].ndim > 1
    )
    return Check("first gradient, float32: worst relative error", _worst(errors), GRADIENT_ERROR)


def compare_rounded_gradients(ours: Gradients, theirs: Gradients, exact: Gradients) -> Check:
    """In half precision: the systematic part of the error, the median over the weight tensors.

    Rounding turns a third of a deep net's gradient into noise, but noise averages out in a
    projection: the slope of one gradient on the other stays near 1.
    """
    _same_names(ours, theirs)
    limit = SLOPE_ERROR + GRANTED * _slope_error(theirs, exact)
    return Check("first gradient, AMP: median slope from 1", _slope_error(ours, theirs), limit)


def compare_updates(
    what: str,
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    weights: Sequence[Tensor],
    settings: Settings,
) -> Check:
    """Steps of two optimizers on equal gradients: the relative error of the worst tensor's change.

    A change is a difference of weights, in float32 or split: what their rounding amounts to does
    not count. ``weights`` are those of the fused optimizer.
    """
    errors = []
    for a, b, weight in zip(ours, theirs, weights, strict=True):
        ulp = SPLIT_ULP.get((settings.masters, weight.dtype), torch.finfo(torch.float32).eps)
        rounding = WEIGHT_ULPS * ulp * weight.detach().double().norm()
        error = max(0.0, float((a - b).norm()) - float(rounding))
        # NaN and infinity fail, and so does a change where there is to be none.
        finite = bool(a.isfinite().all() and b.isfinite().all())
        errors.append((error and error / float(b.norm() or 1e-30)) if finite else math.nan)
    limit = update_limit(settings)
    return Check(f"3 equal steps, {what}: worst relative error", _worst(errors), limit)


def update_limit(settings: Settings) -> float:
    """Limit to the relative error of three steps' change."""
    if settings.states == "float32":
        return UPDATE_ERROR
    return UPDATE_ERRORS[settings.states].get(settings.name, UPDATE_ERRORS[settings.states][""])


def check_rounding(distance: float, dtype: torch.dtype) -> Check:
    """16-bit parameters are their float32 weights, rounded."""
    name = "3 equal steps, 16-bit weights: worst distance from float32 ones"
    return Check(name, distance, torch.finfo(dtype).eps / 2)


def _slope_error(ours: Gradients, theirs: Gradients) -> float:
    names = [k for k in theirs if theirs[k].ndim > 1]
    slopes = [_ratio((ours[k] * theirs[k]).sum(), theirs[k].square().sum()) for k in names]
    return statistics.median(abs(slope - 1) for slope in slopes)


def _same_names(ours: Gradients, theirs: Gradients) -> None:
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"parameters differ: {sorted(ours.keys() ^ theirs.keys())[:5]}")


def compare_runs(modes: Sequence[Run], test_images: int, tolerance: float | None) -> list[Check]:
    """Hold every fused mode to the run that it is compared with."""
    by_name = {mode.name: mode for mode in modes}
    wrong = sum(not math.isfinite(loss) for mode in modes for loss in mode.losses)
    checks = [Check("losses that are not finite", wrong, 0)]
    for mode in modes:
        if not mode.fused or mode.reference is None:
            continue
        eager = by_name[mode.reference]
        exact = by_name[eager.reference] if eager.reference else eager
        steps = len(mode.losses)
        chance = 2 * math.sqrt(2 * eager.accuracy * (1 - eager.accuracy) / test_images)
        last = max(5, steps // 10)
        head, end = f"first {min(steps, HEAD_STEPS)} steps", f"mean of the last {last} steps"
        end_limit = END_LOSS[0] + END_LOSS[1] * _end_loss(eager, last)
        plan: list[tuple[str, Distance, float]] = [
            (f"loss, {head}: relative difference", _head_difference, HEAD_LOSS[mode.dtype]),
            (f"loss, {end}: difference", partial(_end_difference, last), end_limit),
            ("final accuracy: difference", _accuracy_difference, END_ACCURACY + chance),
        ]
        for name, distance, limit in plan[: None if steps >= STEPS_WITH_AN_END else 1]:
            granted = limit + min(GRANTED * distance(eager, exact), GRANTED_AT_MOST)
            checks.append(Check(name, distance(mode, eager), granted, mode.name))
        if tolerance is not None:
            checks[1].limit = tolerance
    return checks


def compare_bits(modes: Sequence[Mode]) -> list[Check]:
    """Recomputing what backward needs must not change a bit of any loss."""
    losses = {mode.memory: mode.losses for mode in modes}
    stored, again = losses.get("store"), losses.get("recompute")
    if stored is None or again is None:
        return []
    different = sum(a != b for a, b in zip(stored, again, strict=True))
    return [Check("losses of recompute that differ from those of store", different, 0)]


Distance = Callable[[Run, Run], float]


def _head_difference(mode: Run, reference: Run) -> float:
    pairs = zip(mode.losses[:HEAD_STEPS], reference.losses[:HEAD_STEPS], strict=True)
    return _worst(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def _end_difference(last: int, mode: Run, reference: Run) -> float:
    return abs(_end_loss(mode, last) - _end_loss(reference, last))


def _accuracy_difference(mode: Run, reference: Run) -> float:
    return abs(mode.accuracy - reference.accuracy)


def _end_loss(mode: Run, last: int) -> float:
    return statistics.fmean(mode.losses[-last:])


def curve_difference(mode: Run, reference: Run) -> float:
    """The largest difference of two loss curves at any step."""
    return _worst(abs(a - b) for a, b in zip(mode.losses, reference.losses, strict=True))


def _worst(values: Iterable[float]) -> float:
    """The maximum; NaN if one is NaN, which max() would lose."""
    numbers = list(values)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if whole else math.inf
