"""Training steps that recompute have the bits of those that store, in the layout and precision of
users: channels_last and bfloat16 autocast, beside float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
from helpers.recompute import assert_same_bits


class Twice(nn.Module):
    """One depthwise layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.depthwise = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.depthwise(self.depthwise(self.norm(x)).relu())


def norm(**options: Any) -> Callable[[], list[nn.Module]]:
    return lambda: [nn.BatchNorm2d(8, **options)]


class Act(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.depthwise, self.function = nn.Conv2d(8, 8, 3, padding=1, groups=8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.depthwise(x))


MIDDLES: dict[str, Callable[[], list[nn.Module]]] = {
    "norm": norm(),
    "norm without weight": norm(affine=False),
    "norm without weight and statistics": norm(affine=False, track_running_stats=False),
    "depthwise called twice": lambda: [Twice()],
    "relu": lambda: [Act(torch.relu)],
    "leaky_relu in place": lambda: [Act(lambda y: T.leaky_relu(y, 0.1, inplace=True))],
}


def gradients(model: nn.Module, x: Tensor, autocast: bool, second: bool) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    loss = y.float().square().mean()
    parameters = list(model.parameters())
    if second:
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        loss = torch.stack([g.square().sum() for g in first]).sum()
    loss.backward()
    return [y.detach(), *(p.grad for p in parameters if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("memory", ["recompute", "plan"])
@pytest.mark.parametrize("middle", MIDDLES)
def test_modes_have_the_bits_of_store(
    middle: str, memory: Any, autocast: bool, second: bool
) -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Conv2d(3, 8, 3), *MIDDLES[middle](), nn.Conv2d(8, 4, 3))
    stock = stock.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 12, 12).contiguous(memory_format=torch.channels_last)
    if memory == "plan":
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            plan = fusedtrain.plan_memory(stock, x, 10**9)
        memory = replace(plan, steps=[step._replace(recompute=True) for step in plan.steps])
    runs = []
    for mode in ("store", memory):
        model = copy.deepcopy(stock)
        fusedtrain.convert(model, memory=mode)
        runs.append(gradients(model, x, autocast, second))
    assert_same_bits(runs)
