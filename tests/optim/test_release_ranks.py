"""Gradient release of sharded parameters (FSDP2), on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from helpers.optimizer_steps import alike
from helpers.optimizers import NAMES, make
from helpers.rank_processes import results_of_two_ranks

OPTIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {"ema_decay": 0.9}),
    "split24": (torch.bfloat16, {"master_weights": "split24", "stochastic_rounding": True}),
}


def _trained(rank: int, name: str, kind: str, released: bool) -> list[Any]:
    """Reports, states and weights after some steps."""
    torch.manual_seed(0)
    dtype, options = OPTIONS[kind]
    last = nn.Linear(7, 1, bias=False)  # one row: a rank of two holds nothing of it
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.SiLU(), last).to(dtype)
    fully_shard(model[0])
    fully_shard(model)
    if name == "LAMB":
        options = {**options, "max_grad_norm": None}
    optimizer = make(name, model.parameters(), **options)
    if released:
        optimizer.release_gradients(model)
    reports = []
    for step in range(4):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x.to(dtype)).square().mean().backward()
        if released:
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        reports.append((optimizer.applied_steps, optimizer.grad_norm))
    state = optimizer.state_dict(compressed=True)["state"]
    values = [v for i in sorted(state) for v in state[i].values()]
    locals_ = [v.to_local() if hasattr(v, "to_local") else v for v in values]
    weights = [p.full_tensor().detach() for p in model.parameters()]
    return [reports, locals_, weights]


def _on_a_rank(rank: int) -> bool:
    for name in NAMES:
        for kind in OPTIONS:
            ordinary, released = (_trained(rank, name, kind, r) for r in (False, True))
            assert alike(ordinary, released), (rank, name, kind)
    return True


@pytest.mark.slow
def test_fully_sharded(tmp_path: Path) -> None:
    assert results_of_two_ranks(_on_a_rank, tmp_path) == [True, True]
