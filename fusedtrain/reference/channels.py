"""One value a sample and channel: how values meet a tensor, and how they are summed."""

from __future__ import annotations

from torch import Tensor


def spread(scale: Tensor, input: Tensor, dim: int) -> Tensor:
    """[samples, channels] so that it broadcasts over the input."""
    shape = [1] * input.dim()
    if shape:
        shape[0] = scale.shape[0]
    if dim >= 0:
        shape[dim] = scale.shape[1]
    return scale.reshape(shape)


def channel_sums(t: Tensor, samples: int, dim: int) -> Tensor:
    """One value a sample and channel, [samples, channels]."""
    channels = t.shape[dim] if dim >= 0 else 1
    kept = {0} if samples != 1 else set()
    kept |= {dim} if dim >= 0 else set()
    over = [d for d in range(t.dim()) if d not in kept]
    return (t.sum(over) if over else t).reshape(samples, channels)
