"""What "the fused run follows the eager one" means, in numbers.

Two runs that differ in the last bit of one activation part ways: training is chaotic. So the
precise test is made before training, on gradients from equal weights, where a wrong backward
shows most clearly; the loss curves are then held to what honest rounding does to them.

How the limits were measured: the digits, ResNet-18 of width 16 and 32, seeds 0 and 1, CPU,
torch 2.13; "honest" multiplies the output of every activation by 1 +- one unit in the last
place at random, "wrong" scales the backward of every activation (or of a single one).

| quantity                          | honest            | 5 % wrong     | sign wrong |
|-----------------------------------|-------------------|---------------|------------|
| gradient, float32: relative error | 0.0005 ... 0.0025 | 0.07 (one), 1 | 1.2 ... 2  |
| gradient, bf16: median slope off  | 0.04 ... 0.11     | 0.39          | 1.0        |
| loss, first 10 steps, bf16        | 0.03 ... 0.09     | 0.02 ... 0.10 | 0.15 ... 0.3 |
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from _modes import Mode
from torch import Tensor

GRADIENT_ERROR = 0.02
SLOPE_ERROR = 0.2
HEAD_STEPS = 10
HEAD_TOLERANCE = {None: 0.1, torch.float16: 0.15, torch.bfloat16: 0.2}
# A shorter run has no end: its losses and accuracies still swing from step to step.
STEPS_WITH_AN_END = 20


@dataclass
class Check:
    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # NaN fails


def compare_gradients(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], dtype: torch.dtype | None
) -> Check:
    """In float32 the error of the whole gradient; in half precision its systematic part.

    Rounding to bf16 turns 30 to 60 % of a deep net's gradient into noise, but noise averages
    out in a projection: the slope of one gradient on the other stays near 1 per parameter.
    """
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"parameters differ: {sorted(ours.keys() ^ theirs.keys())[:5]} ...")
    if dtype is None:
        error = sum(float((ours[k] - theirs[k]).square().sum()) for k in theirs)
        size = sum(float(theirs[k].square().sum()) for k in theirs)
        return Check("first gradient, float32: relative error", _root(error, size), GRADIENT_ERROR)
    slopes = [
        float((ours[k] * theirs[k]).sum() / theirs[k].square().sum()) for k in theirs if theirs[k].ndim > 1
    ]
    name = f"first gradient, {str(dtype).removeprefix('torch.')}: slope off 1 (median)"
    return Check(name, _median(abs(slope - 1) for slope in slopes), SLOPE_ERROR)
