"""Pairs of equal networks, one with ordinary steps and one with gradient release."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedtrain.optim import FusedOptimizer
from helpers.optimizer_steps import alike, in_groups
from helpers.optimizers import make


class Net(nn.Module):
    """Its branch is not always used, its last weight is tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.branch, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(self.branch(x).tanh() if branch else x)


def network(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def loss_of(model: nn.Module, seed: int, **options: Any) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(x.to(next(model.parameters()).dtype), **options).square().mean()
    return loss


def options_of(name: str, **options: Any) -> dict[str, Any]:
    if name in ("LAMB", "FusedLAMB"):
        options["max_grad_norm"] = None
    if name == "FusedAdam":
        options["capturable"] = True
    return {"gradient_writeback": "none", **options}


def pair(
    name: str = "AdamW", dtype: torch.dtype = torch.float32, **options: Any
) -> list[tuple[Net, FusedOptimizer]]:
    """Two equal networks, the second with gradient release."""
    results = []
    for _ in range(2):
        torch.manual_seed(1)  # the stream of stochastic rounding
        model = network(dtype)
        groups = in_groups(list(model.parameters()))
        results.append((model, make(name, groups, **options_of(name, **options))))
    results[1][1].release_gradients(results[1][0])
    return results


def train(model: nn.Module, optimizer: FusedOptimizer, seeds: range) -> list[Any]:
    reports = []
    for seed in seeds:
        loss_of(model, seed, branch=seed % 3 != 1).backward()
        optimizer.step()
        for p in model.parameters():  # `zero_grad` of Apex's FusedSGD leaves zeros
            p.grad = None
        reports.append((
            optimizer.grad_norm, optimizer.applied_steps, optimizer.skipped_steps,
            optimizer.last_step_skipped,
        ))  # fmt: skip
    return reports


def assert_alike(both: list[tuple[Net, FusedOptimizer]]) -> None:
    (model, optimizer), (released, other) = both
    assert alike(dict(model.named_parameters()), dict(released.named_parameters()))
    assert alike(optimizer.state_dict(), other.state_dict())
    if optimizer.ema_decay is not None:
        averages = ([b for _, b in o.averaged_parameters()] for o in (optimizer, other))
        assert alike(*averages)
