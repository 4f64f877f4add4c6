"""Numbers that `plan_memory` says of the models of training scripts, and their measured steps:
peaks, budgets, time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain import MemoryPlan, plan_memory
from fusedtrain.planning._meter import Meter
from scripts.harness import call, leaves
from scripts.test_scripts import SCRIPTS

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 0.7  # of eager's peak
KINDS = ("timm_efficientnet", "diffusion", "nanogpt", "bert_trainer", "deeplab", "wgan_gp",
         "apex_loop")  # fmt: skip
QUICK = ("timm_efficientnet", "nanogpt", "wgan_gp")


def loss_of(output: Any) -> torch.Tensor:
    """The loss of `plan_memory`, that of the scripts in as many bytes or none."""
    return torch.stack([y.float().sum() for y in leaves(output) if y.requires_grad]).sum()


def peak_of(model: nn.Module, example: Any, narrow: bool) -> int:
    """The peak of a training step: forward and loss within autocast, backward outside."""
    peaks = []
    for _ in range(2):  # the first step may set something up
        with Meter(torch.device("cpu")) as meter:
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                output = call(model, example)
                loss = loss_of(output)
            loss.backward()
        del output, loss
        model.zero_grad()
        peaks.append(meter.peak)
    return peaks[-1]


def plan_of(model: nn.Module, example: Any, narrow: bool) -> MemoryPlan:
    """The plan of BUDGET; where it is refused, of the lowest peak that the message says."""
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        try:
            return plan_memory(model, example, BUDGET)
        except ValueError as error:
            lowest = float(str(error).partition("lowest peak is ")[2].split()[0])
        assert BUDGET < lowest <= 1
        plan = plan_memory(model, example, lowest)
        assert plan.peak > BUDGET * plan.eager_peak
        return plan


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in KINDS]
)
def test_plans(name: str, narrow: bool) -> None:
    for part in SCRIPTS[name][0]().parts.values():
        model = part.model.train()
        model.zero_grad()
        plan = plan_of(model, part.example, narrow)
        eager = peak_of(model, part.example, narrow)
        assert plan.eager_peak == pytest.approx(eager, rel=0.02)
        planned = copy.deepcopy(model)
        fusedtrain.convert(planned, part.example, memory=plan)
        peak = peak_of(planned, part.example, narrow)
        assert peak <= plan.budget
        assert plan.peak == pytest.approx(peak, rel=0.02)
        assert plan.predicted == pytest.approx(peak, rel=0.02)
        extra, alone = plan.extra_milliseconds, plan.milliseconds
        assert extra >= 0 < alone  # times of a busy machine tell no more
        assert f"{100 * extra / alone:.0f}% more time ({extra:.1f} ms a step" in str(plan)
