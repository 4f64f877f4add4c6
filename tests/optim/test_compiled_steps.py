"""torch.compile around a training step, or around `optimizer.step` alone: the numbers of the plain
step, and no compilation after the first step, whatever the learning rate is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

import fusedtrain
from helpers.optimizer_steps import same
from helpers.optimizers import make

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 20


def network(converted: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 2)
    )
    if converted:
        assert fusedtrain.convert(model, lambda: torch.randn(2, 3, 6, 6)).norms
    return model


def train(
    name: str, way: str, rate: Any, compiled: Callable[..., Any], converted: bool = True
) -> tuple[Any, list[int]]:
    """Losses and parameters of STEPS steps, and how many frames Dynamo has seen after each."""
    model = network(converted)
    options: dict[str, Any] = {"max_grad_norm": 1.0, "ema_decay": 0.9}
    optimizer = make(name, model.parameters(), lr=copy.copy(rate), **options)
    scaler = fusedtrain.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if way == "scaled":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if way == "whole":
                optimizer.step()
            else:
                update()
        return loss.detach()

    update: Any = compiled(optimizer.step) if way == "the optimizer's" else None
    run = step if way == "the optimizer's" else compiled(step)
    losses, frames = [], []
    for number in range(STEPS):
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(0.1 / (number + 1))
            else:
                group["lr"] = 0.1 / (number + 1)
        losses.append(run())
        frames.append(counters["frames"]["total"])
    assert int(optimizer.applied_steps) == STEPS
    return [*losses, *(p.detach() for p in model.parameters())], frames


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize(
    ("name", "way"),
    [("AdamW", "whole"), ("AdamW", "scaled"), ("AdamW", "the optimizer's"), ("LAMB", "whole")],
)
def test_compiled_steps(name: str, way: str, rate: Any) -> None:
    torch._dynamo.reset()
    counters.clear()

    def compiled(function: Callable[..., Any]) -> Any:
        return torch.compile(function, backend="eager")

    results, frames = train(name, way, rate, compiled)
    # Compiled, a converted model has the numbers of the stock one.
    expected, _ = train(name, way, rate, lambda function: function, way == "the optimizer's")
    assert same(results, expected)
    assert frames[0] > 0
    assert frames[1:] == [frames[1]] * (STEPS - 1)  # one more may come with the second step
    assert frames[-1] - frames[0] <= 1


def test_a_full_graph_has_no_step() -> None:
    """As torch's optimizers, which break the graph around their step."""
    for kind in (fusedtrain.optim.AdamW, torch.optim.AdamW):
        p = nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        optimizer = kind([p], lr=0.1)
        torch._dynamo.reset()
        with pytest.raises(Unsupported):
            torch.compile(optimizer.step, fullgraph=True, backend="eager")()
        assert torch.equal(p, torch.ones(3))  # nothing has moved
        optimizer.step()
        assert not torch.equal(p, torch.ones(3))
