"""Schedulers that count applied steps. conformance/test_optimizers.py has torch's own."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR

import fusedtrain
from helpers.optimizer_steps import parameters, step
from helpers.optimizers import make

SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: OneCycleLR(o, [0.2, 0.4], total_steps=200, cycle_momentum=False),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 7),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 5), StepLR(o, 3, 0.5)], [5]
    ),
}


class Scheduled:
    """An optimizer with an AppliedStepScheduler, and beside it one stepped by hand."""

    def __init__(self, schedule: Any) -> None:
        self.p = parameters(torch.float32, [(3,), (2,)])
        q = [torch.zeros(1), torch.zeros(1)]
        groups = [{"params": [self.p[0]]}, {"params": [self.p[1]], "lr": 0.05}]
        self.optimizer = fusedtrain.optim.SGD(groups, lr=0.1)
        self.scheduler = fusedtrain.optim.AppliedStepScheduler(self.optimizer, schedule)
        plain = torch.optim.SGD([{"params": [q[0]]}, {"params": [q[1]], "lr": 0.05}], lr=0.1)
        self.by_hand: LRScheduler = schedule(plain)
        self.choose = random.Random(0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            kind = self.choose.choice(["applied", "applied", "skipped", "nothing"])
            for p in self.p:
                p.grad = torch.full_like(p, float("nan") if kind == "skipped" else 1.0)
                if kind == "nothing":
                    p.grad = None
            self.optimizer.found_inf = torch.tensor(float(kind == "skipped"))
            self.optimizer.step()
            self.scheduler.step()
            if kind == "applied":
                self.by_hand.optimizer.step()
                self.by_hand.step()
            self.check()

    def check(self) -> None:
        rates = [float(lr) for lr in self.scheduler.get_last_lr()]
        assert rates == pytest.approx(self.by_hand.get_last_lr(), rel=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers_that_count_applied_steps(schedule: str) -> None:
    scheduled = Scheduled(SCHEDULES[schedule])
    scheduled.check()
    scheduled.run(80)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # of the copy made by hand
@pytest.mark.parametrize("order", ["optimizer first", "scheduler first"])
@pytest.mark.parametrize("onto", ["fresh", "live", "made after loading"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_such_schedulers_go_on_from_a_checkpoint(schedule: str, onto: str, order: str) -> None:
    make_schedule = SCHEDULES[schedule]
    first = Scheduled(make_schedule)
    first.run(11)
    saved = copy.deepcopy((first.optimizer.state_dict(), first.scheduler.state_dict()))
    by_hand = copy.deepcopy(first.by_hand)
    if onto == "live":
        first.run(9)
        second = first
    else:
        second = Scheduled(make_schedule)
    second.by_hand = by_hand
    if onto == "made after loading":
        second.optimizer.load_state_dict(saved[0])
        second.scheduler = fusedtrain.optim.AppliedStepScheduler(second.optimizer, make_schedule)
        second.scheduler.load_state_dict(saved[1])
    elif order == "optimizer first":
        second.optimizer.load_state_dict(saved[0])
        second.scheduler.load_state_dict(saved[1])
    else:
        second.scheduler.load_state_dict(saved[1])
        second.optimizer.load_state_dict(saved[0])
    second.check()
    second.run(30)


def test_groups_without_parameters_and_with_tensors() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    groups = [{"params": []}, {"params": [weight], "scale": torch.ones(3)}]
    optimizer = fusedtrain.optim.SGD(groups, lr=1.0)
    scheduler = fusedtrain.optim.AppliedStepScheduler(optimizer, lambda o: StepLR(o, 1, 0.5))
    scheduler.load_state_dict(scheduler.state_dict())
    weight.grad = torch.zeros(2)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5, 0.5]


def test_such_a_scheduler_may_change_nothing_but_rates() -> None:
    optimizer = make("SGD", parameters())
    with pytest.raises(RuntimeError, match="momentum"):
        fusedtrain.optim.AppliedStepScheduler(optimizer, lambda o: OneCycleLR(o, 0.2, 9))
    with pytest.raises(TypeError, match="fusedtrain"):
        fusedtrain.optim.AppliedStepScheduler(torch.optim.SGD(parameters()), StepLR)


def test_counts_of_steps() -> None:
    p = parameters()
    optimizer = make("Adam", p)
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (0, 0)
    for seed in range(3):
        step(optimizer, p, seed)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert optimizer.last_step_skipped
    optimizer.zero_grad()
    optimizer.step()  # has nothing to do
    assert not optimizer.last_step_skipped
    assert optimizer.grad_norm is None
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (3, 1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.load_state_dict(optimizer.state_dict())
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (3, 1)
    assert optimizer.applied_steps.dtype is torch.int64
