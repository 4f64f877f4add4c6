"""8-bit states of neighbours with very different magnitudes: the limits that the docs state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers.optimizers import make

_WEIGHTS = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * 0.05


def moves(name: str, spread: float, large_noise: float, large: float, **options: object) -> Tensor:
    """How far 100 steps move the first of 32 neighbours, and the other 31, which are smaller."""
    p = nn.Parameter(_WEIGHTS.clone())
    optimizer = make(name, [p], lr=1e-3, weight_decay=0.01, max_grad_norm=None, **options)
    first = (torch.arange(p.numel()) % 32 == 0).reshape(p.shape)
    mean, noise = (
        torch.where(first, large, 1 / spread),
        torch.where(first, large_noise, 0.3 / spread),
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        p.grad = mean + noise * torch.randn(p.shape, generator=generator)
        optimizer.step()
    moved = (p.detach() - _WEIGHTS).abs()
    return torch.stack([moved[first].mean(), moved[~first].mean()])


# Rule, spread, mean and noise of the large gradients; how many times as far as with floats.
LIMITS = [
    ("AdamW", 100, 1.0, 0.3, 1.00, 1.12),
    ("AdamW", 1e3, 1.0, 0.3, 1.00, 0.28),
    ("AdamW", 1e5, 1.0, 0.3, 1.00, 0.013),
    ("LAMB", 100, 1.0, 0.3, 0.83, 0.93),
    ("LAMB", 1e3, 1.0, 0.3, 1.97, 0.54),
    ("LAMB", 1e5, 1.0, 0.3, 4.95, 0.026),
    ("LAMB", 1e5, 0.0, 1.0, 17.2, 0.070),
    ("Lion", 1e5, 1.0, 0.3, 1.00, 1.00),
]


@pytest.mark.parametrize(("name", "spread", "mean", "noise", "large", "small"), LIMITS)
def test_the_documented_limits(
    name: str, spread: float, mean: float, noise: float, large: float, small: float
) -> None:
    floats, codes = (moves(name, spread, noise, mean, state_dtype=s) for s in (None, "q8"))
    assert (codes / floats).tolist() == pytest.approx([large, small], rel=0.1)
