"""The loss scale's update and the zeroing of gradients, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def update_scale(
    scale: Tensor, growth_tracker: Tensor, hysteresis_tracker: Tensor, found_inf: Tensor,
    growth_factor: float, backoff_factor: float, growth_interval: int, hysteresis: int,
    min_scale: float, max_scale: float,
) -> None:  # fmt: skip
    """Updates the loss scale and the counts of good and of tolerated bad steps, on the device."""
    bad = found_inf.reshape(()) != 0
    left = torch.where(bad, hysteresis_tracker - 1, hysteresis)
    good_steps = torch.where(bad, 0, growth_tracker + 1)
    grown = scale * growth_factor
    grows = good_steps == growth_interval
    larger = torch.where(grows & torch.isfinite(grown), grown, scale)
    smaller = torch.where(left <= 0, scale * backoff_factor, scale)
    new = torch.where(bad, smaller, larger).clamp(min_scale, max_scale)
    scale.copy_(new)
    growth_tracker.copy_(torch.where(grows, 0, good_steps))
    hysteresis_tracker.copy_(left.clamp(min=0))


def zero_tensors(tensors: list[Tensor]) -> None:
    """Sets all tensors to 0."""
    for tensor in tensors:
        tensor.zero_()
